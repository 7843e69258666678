"""Validation off the event loop, and the parts of body reading that HTTP tests do not reach."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_tokenizer import write_tokenizer

from deepseek_tgi.router.errors import PlainError, ShapeError, ValidationError
from deepseek_tgi.router.fields import parse_json
from deepseek_tgi.router.openai_requests import chat_request, completion_request
from deepseek_tgi.router.requests import GenerateRequest, Parameters, generate_request
from deepseek_tgi.router.tools import CallReader, next_call_id, parse_call
from deepseek_tgi.router.validation import Limits, Validator
from deepseek_tgi.text.tokenizer import TextTokenizer

LIMITS = Limits(2, 4, 5, max_input_tokens=100, max_total_tokens=200)


@pytest.fixture
def validator(tmp_path: Path) -> Any:
    write_tokenizer(tmp_path)
    found = Validator(TextTokenizer.from_folder(tmp_path), LIMITS, workers=2)
    yield found
    found.close()


async def test_the_loop_runs_on_while_a_long_prompt_is_tokenised(validator: Validator) -> None:
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0.001)
            turns += 1

    counting = asyncio.create_task(count())
    with pytest.raises(ValidationError, match="180001 `inputs` tokens"):
        await validator.validate(GenerateRequest("hello the world " * 20_000, Parameters()))
    counting.cancel()
    assert turns >= 5


async def test_a_text_that_is_no_unicode_is_refused(validator: Validator) -> None:
    with pytest.raises(ValidationError, match="tokenizer error"):
        await validator.validate(GenerateRequest("\ud800", Parameters()))


async def test_wanted_tokens_default_to_all_that_fits(validator: Validator) -> None:
    found = await validator.validate(GenerateRequest("hello", Parameters()))
    assert (found.input_length, found.wanted_tokens, found.job.max_new_tokens) == (2, 198, 198)


@pytest.mark.parametrize("read", [generate_request, chat_request, completion_request])
@given(
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    ["inputs", "parameters", "messages", "prompt", "stop", "role", "content", "tools", "x"]
                ),
                inner,
                max_size=4,
            )
        ),
        max_leaves=12,
    )
)
def test_any_json_is_read_or_refused_by_name(read: Any, value: Any) -> None:
    with suppress(ShapeError):  # any other exception would be a 500
        read(value)


@given(st.binary(max_size=60))
def test_any_bytes_are_json_or_refused(body: bytes) -> None:
    with suppress(PlainError):
        parse_json(body)


def test_nesting_is_counted_outside_strings() -> None:
    assert parse_json(b'["' + b"[" * 500 + b'"]') == ["[" * 500]
    assert parse_json(b'["\\"' + b"[" * 500 + b'\\\\"]') == ['"' + "[" * 500 + "\\"]
    assert parse_json(b"[" * 128 + b"]" * 128)
    with pytest.raises(PlainError):
        parse_json(b"[" * 129 + b"]" * 129)


def test_a_body_of_escapes_that_never_ends_is_read_once() -> None:
    body = b"[" * 100 + b'"' + b'\\"' * 500_000 + b"[" * 100
    started = time.monotonic()
    with pytest.raises(PlainError, match=r"EOF|unexpected end"):
        parse_json(body)
    assert time.monotonic() - started < 10, "not once for each escape"


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({}, "missing field `messages`"),
        ({"messages": [{"content": "a"}]}, "messages[0]: missing field `role`"),
        ({"messages": [], "stream_options": {}}, "stream_options: missing field `include_usage`"),
        ({"messages": [], "tools": [{"type": "function"}]}, "tools[0]: missing field `function`"),
        ({"messages": [], "response_format": {"type": "xml"}}, "response_format.type: unknown variant `xml`"),
        ({"messages": [], "tool_choice": {"type": "function"}}, "tool_choice: missing field `function`"),
    ],
)
def test_chat_bodies_are_refused_by_path(body: dict[str, Any], text: str) -> None:
    with pytest.raises(ShapeError) as error:
        chat_request(body)
    assert text in str(error.value)


def test_openais_own_spelling_of_a_schema_is_understood() -> None:
    wish = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"properties": {}}}}
    found = chat_request({"messages": [], "response_format": wish}).parameters.grammar
    assert found is not None
    assert (found.kind, found.value) == ("json_schema", {"properties": {}})
    assert chat_request({"messages": [], "response_format": {"type": "text"}}).parameters.grammar is None


@given(st.data())
def test_a_call_cut_anywhere_gives_the_same_arguments(data: Any) -> None:
    text = '{"function": {"_name": "f", "a": {"b": [1, "}}"]}, "c": "x, \\"y\\""}}'
    cuts = sorted(data.draw(st.sets(st.integers(1, len(text) - 1), max_size=12)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    reader = CallReader()
    out = [part for piece in pieces for part in reader.feed(piece)]
    assert reader.name == "f"
    assert reader.complete
    assert out[0] == "{"
    assert "".join(out) == '{"a": {"b": [1, "}}"]}, "c": "x, \\"y\\""}'
    assert reader.feed("</s>") == []


def test_a_call_without_arguments() -> None:
    assert parse_call('{"function": {"_name": "f"}}').arguments == "{}"
    reader = CallReader()
    assert reader.feed('{"function": {"_name": "f"}}') == ["{", "}"]


def test_call_ids_count_on() -> None:
    def ids(*known: str) -> str:
        calls = [{"id": i, "type": "function", "function": {"name": "f", "arguments": "{}"}} for i in known]
        return next_call_id(chat_request({"messages": [{"role": "assistant", "tool_calls": calls}]}).messages)

    assert ids("3", "11") == "12"
    assert len(ids("3", "call_x")) == 36
    assert len(ids("9" * 5000)) == 36, "too long to be a number"
    assert next_call_id([]) == "0"
