"""What a client may ask on TGI's own routes, as typed values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from deepseek_tgi.router.errors import ShapeError
from deepseek_tgi.router.fields import (
    Fields,
    anything,
    boolean,
    float32,
    list_of,
    signed32,
    string,
    u32,
    u64,
    usize,
)


@dataclass(frozen=True, slots=True)
class Grammar:
    """A wished constraint: `kind` is `json`, `json_schema` or `regex`; `value` is the schema or the pattern."""

    kind: str
    value: Any


@dataclass(frozen=True, slots=True)
class Parameters:
    """`parameters` of a native request; `grammar`, `seed` and the like are None when absent."""

    best_of: int | None = None
    temperature: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    typical_p: float | None = None
    do_sample: bool = False
    max_new_tokens: int | None = None
    return_full_text: bool | None = None
    stop: tuple[str, ...] = ()
    truncate: int | None = None
    watermark: bool = False
    details: bool = False
    decoder_input_details: bool = False
    seed: int | None = None
    top_n_tokens: int | None = None
    grammar: Grammar | None = None
    adapter_id: str | None = None


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One text to continue. `add_special_tokens` is false for rendered chats: the template brings them."""

    inputs: str
    parameters: Parameters
    stream: bool = False
    add_special_tokens: bool = True


def generate_request(value: Any) -> GenerateRequest:
    """Read the body of `/generate` and its kin. Raises `ShapeError`.

    A missing `parameters` means sampling, an empty one does not: that is TGI's own default.
    """
    fields = Fields(value, "", "GenerateRequest")
    inputs = fields.required("inputs", string)
    parameters = fields.plain("parameters", _parameters, Parameters(do_sample=True))
    return GenerateRequest(inputs, parameters, stream=fields.plain("stream", boolean, False))


def _parameters(value: Any, path: str) -> Parameters:
    fields = Fields(value, path, "GenerateParameters")
    return Parameters(
        best_of=fields.optional("best_of", usize),
        temperature=fields.optional("temperature", float32),
        repetition_penalty=fields.optional("repetition_penalty", float32),
        frequency_penalty=fields.optional("frequency_penalty", float32),
        top_k=fields.optional("top_k", signed32),
        top_p=fields.optional("top_p", float32),
        typical_p=fields.optional("typical_p", float32),
        do_sample=fields.plain("do_sample", boolean, False),
        max_new_tokens=fields.optional("max_new_tokens", u32),
        return_full_text=fields.optional("return_full_text", boolean),
        stop=tuple(fields.plain("stop", list_of(string), [])),
        truncate=fields.optional("truncate", usize),
        watermark=fields.plain("watermark", boolean, False),
        details=fields.plain("details", boolean, False),
        decoder_input_details=fields.plain("decoder_input_details", boolean, False),
        seed=fields.optional("seed", u64),
        top_n_tokens=fields.optional("top_n_tokens", u32),
        grammar=fields.optional("grammar", grammar),
        adapter_id=fields.optional("adapter_id", string),
    )


def grammar(value: Any, path: str) -> Grammar:
    """Read a `grammar` or `response_format` object. Raises `ShapeError`."""
    fields = Fields(value, path, "GrammarType")
    kind = fields.required("type", string)
    if kind == "regex":
        return Grammar("regex", fields.required("value", string))
    if kind in {"json", "json_object"}:
        return Grammar("json", fields.required("value", anything))
    if kind == "json_schema":
        inner = Fields(fields.required("value", anything, "json_schema"), fields.path("value"), "JsonSchemaConfig")
        inner.optional("name", string)
        return Grammar("json_schema", inner.required("schema", anything))
    expected = "`json`, `json_object`, `regex`, `json_schema`"
    raise ShapeError(fields.path("type"), f"unknown variant `{kind}`, expected one of {expected}")
