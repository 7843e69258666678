"""Checking a wished grammar and turning it into what the shard takes.

Choice: a JSON schema goes to the shard as it is (GRAMMAR_TYPE_JSON), and our shard compiles it. TGI's router turns it
into a regular expression first, because its shard knows nothing else, and loses what an expression cannot say. A
stock TGI shard behind this router therefore serves `regex` grammars only. What TGI's clients rely on is kept: a schema
with `properties` means an object, even without `type`, and one of these properties alone (`_as_tgi_reads`).
"""

from __future__ import annotations

import json
from typing import Any

import orjson

from deepseek_tgi.pb import generate_pb2 as pb
from deepseek_tgi.router.errors import ValidationError
from deepseek_tgi.router.requests import Grammar


def compile_grammar(wish: Grammar) -> tuple[str, pb.GrammarType]:
    """Text and type for the wire. May take milliseconds: call it off the event loop.

    Raises: `ValidationError` for what is no schema, has no top-level properties, or does not compile.
    """
    from llguidance import LLMatcher

    if wish.kind == "regex":
        fault = LLMatcher.validate_grammar(LLMatcher.grammar_from_regex(wish.value), None)
        if fault:
            raise ValidationError(f"grammar is not valid: {_first_lines(fault)}")
        return wish.value, pb.GRAMMAR_TYPE_REGEX
    schema = _schema(wish.value)
    try:
        schema = _as_tgi_reads(schema, closing=not _has_joint_parts(schema))
        text = json.dumps(schema, ensure_ascii=False)
    except RecursionError:
        raise ValidationError("grammar is not valid: the schema nests too deeply") from None
    fault = LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(text), None)
    if fault:
        raise ValidationError(f"cannot compile regex from schema: {_first_lines(fault)}")
    return text, pb.GRAMMAR_TYPE_JSON


def _schema(value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError as error:
            raise ValidationError(f"grammar is not valid: {error}") from None
    if not isinstance(value, dict):
        raise ValidationError("grammar is not valid: a schema must be a JSON object")
    if "properties" not in value:
        raise ValidationError("grammar is not valid: Grammar must have a 'properties' field")
    return value


_SCHEMA_MAPS = ("properties", "$defs", "definitions", "$functions")
_SCHEMA_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SCHEMAS = ("items", "additionalProperties")
_OPENING = ("additionalProperties", "patternProperties", "unevaluatedProperties", *_SCHEMA_LISTS[:3], "$ref")
"""Keywords with which a schema says itself what else its object may hold."""


def _as_tgi_reads(schema: Any, closing: bool) -> Any:
    """A copy in which every schema with `properties` is an object, if `closing` one with no other properties."""
    if not isinstance(schema, dict):
        return schema
    read = dict(schema)
    for key in _SCHEMA_MAPS:
        if isinstance(read.get(key), dict):
            read[key] = {name: _as_tgi_reads(part, closing) for name, part in read[key].items()}
    for key in _SCHEMA_LISTS:
        if isinstance(read.get(key), list):
            read[key] = [_as_tgi_reads(part, closing) for part in read[key]]
    for key in _SCHEMAS:
        if key in read:
            read[key] = _as_tgi_reads(read[key], closing)
    if isinstance(read.get("properties"), dict):
        read.setdefault("type", "object")
        if closing and not any(key in read for key in _OPENING):
            read["additionalProperties"] = False
    return read


def _has_joint_parts(value: Any) -> bool:
    """True if several parts describe one object together: none of them may refuse the properties of the others."""
    if isinstance(value, dict):
        joint = value.get("allOf")
        return (isinstance(joint, list) and len(joint) > 1) or any(map(_has_joint_parts, value.values()))
    return isinstance(value, list) and any(map(_has_joint_parts, value))


def _first_lines(fault: str) -> str:
    return " ".join(fault.split())[:500]
