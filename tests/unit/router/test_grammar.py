"""What a schema of a request means: TGI's clients leave out `type`, and expect the named properties alone."""

from __future__ import annotations

import json
from typing import Any

import pytest

from deepseek_tgi.router.grammar import compile_grammar
from deepseek_tgi.router.requests import Grammar

TEXT, CLOSED = {"type": "string"}, {"additionalProperties": False}


def sent(schema: dict[str, Any]) -> Any:
    return json.loads(compile_grammar(Grammar("json", schema))[0])


def test_properties_without_a_type_mean_an_object_of_these_alone() -> None:
    inner = {"properties": {"b": TEXT}, "required": ["b"]}
    outer = {"properties": {"a": inner, "list": {"type": "array", "items": inner}}, "required": ["a"]}
    read = {**inner, "type": "object", **CLOSED}
    assert sent(outer) == {
        "properties": {"a": read, "list": {"type": "array", "items": read}},
        "required": ["a"],
        "type": "object",
        **CLOSED,
    }


def test_a_property_may_be_called_like_a_keyword() -> None:
    schema = {"properties": {"properties": TEXT, "items": {"enum": ["x"]}, "type": TEXT}}
    assert sent(schema) == {**schema, "type": "object", **CLOSED}


@pytest.mark.parametrize(
    "own",
    [{"additionalProperties": True}, {"additionalProperties": TEXT}, {"patternProperties": {"^x": TEXT}}],
)
def test_what_a_schema_says_of_other_properties_itself_counts(own: dict[str, Any]) -> None:
    schema = {"type": "object", "properties": {"a": TEXT}, **own}
    assert sent(schema) == schema


def test_parts_that_hold_together_do_not_shut_each_other_out() -> None:
    parts = [{"properties": {"a": TEXT}}, {"properties": {"b": TEXT}}]
    schema = {"properties": {"c": {"allOf": parts}}}
    assert sent(schema) == {
        "properties": {"c": {"allOf": [{**part, "type": "object"} for part in parts]}},
        "type": "object",
    }


def test_the_order_of_properties_is_the_clients() -> None:
    text = compile_grammar(Grammar("json", {"properties": {"z": TEXT, "a": TEXT}}))[0]
    assert text.index('"z"') < text.index('"a"')
