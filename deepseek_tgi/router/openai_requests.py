"""What a client may ask on the OpenAI routes, as typed values."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from deepseek_tgi.router.errors import ShapeError
from deepseek_tgi.router.fields import Fields, anything, boolean, float32, list_of, string, u32, u64, wrong_type
from deepseek_tgi.router.requests import Grammar, Parameters, grammar

SERVED_MODEL = "tgi"
"""The model name that means "whatever you serve"."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message with its content as one text: parts are joined, tool calls are their JSON."""

    role: str
    content: str
    tool_call_ids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Tool:
    """A function the model may call. `source` is the object as the client sent it."""

    name: str
    description: str | None
    parameters: dict[str, Any]
    source: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """`/v1/chat/completions`."""

    messages: tuple[Message, ...]
    parameters: Parameters
    model: str | None = None
    stream: bool = False
    include_usage: bool = False
    logprobs: bool = False
    tools: tuple[Tool, ...] = ()
    tool_choice: str = "auto"
    tool_name: str | None = None
    tool_prompt: str | None = None


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """`/v1/completions`."""

    prompts: tuple[str, ...]
    parameters: Parameters
    stream: bool = False
    suffix: str | None = None


def chat_request(value: Any) -> ChatRequest:
    """Read a chat body. Raises `ShapeError`."""
    fields = Fields(value, "", "ChatRequest")
    options = fields.optional("stream_options", _include_usage)
    choice, name = fields.optional("tool_choice", _tool_choice) or ("auto", None)
    presence = fields.optional("presence_penalty", float32)
    return ChatRequest(
        messages=tuple(fields.required("messages", list_of(_message))),
        parameters=_openai_parameters(
            fields,
            fields.optional("max_tokens", u32, "max_completion_tokens"),
            # TGI's own mapping: OpenAI's range -2..2 becomes a repetition penalty of 0..4.
            repetition_penalty=None if presence is None else presence + 2.0,
            top_n_tokens=fields.optional("top_logprobs", u32),
            grammar=fields.optional("response_format", _response_format),
        ),
        model=fields.optional("model", string),
        stream=fields.plain("stream", boolean, False),
        include_usage=options or False,
        logprobs=fields.optional("logprobs", boolean) or False,
        tools=tuple(fields.optional("tools", list_of(_tool)) or ()),
        tool_choice=choice,
        tool_name=name,
        tool_prompt=fields.optional("tool_prompt", string),
    )


def completion_request(value: Any) -> CompletionRequest:
    """Read a completion body. Raises `ShapeError`."""
    fields = Fields(value, "", "CompletionRequest")
    stream = fields.plain("stream", boolean, False)
    return CompletionRequest(
        prompts=fields.required("prompt", _prompts),
        parameters=_openai_parameters(
            fields,
            fields.optional("max_tokens", u32),
            repetition_penalty=fields.optional("repetition_penalty", float32),
            decoder_input_details=not stream,
        ),
        stream=stream,
        suffix=fields.optional("suffix", string),
    )


def _openai_parameters(fields: Fields, max_tokens: int | None, **more: Any) -> Parameters:
    """The fields both routes share; temperature 0 means greedy, anything else samples."""
    temperature = fields.optional("temperature", float32)
    model = fields.optional("model", string)
    return Parameters(
        temperature=None if temperature == 0 else temperature,
        do_sample=temperature != 0,
        top_p=fields.optional("top_p", float32),
        frequency_penalty=fields.optional("frequency_penalty", float32),
        max_new_tokens=max_tokens,
        stop=tuple(fields.optional("stop", _stop) or ()),
        seed=fields.optional("seed", u64),
        details=True,
        adapter_id=None if model == SERVED_MODEL else model,
        **more,
    )


def _stop(value: Any, path: str) -> list[str]:
    """A list, or one string as OpenAI's API also allows."""
    return [value] if isinstance(value, str) else list_of(string)(value, path)


def _prompts(value: Any, path: str) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list):
        raise wrong_type(path, value, "a string or an array of strings")
    if not value:
        raise ShapeError(path, "Empty array detected. Do not use an empty array for the prompt")
    return tuple(list_of(string)(value, path))


def _include_usage(value: Any, path: str) -> bool:
    return Fields(value, path, "StreamOptions").required("include_usage", boolean)


def _response_format(value: Any, path: str) -> Grammar | None:
    """As `grammar`; `{"type": "text"}` asks for nothing and OpenAI's own spelling of a schema is understood."""
    kind = Fields(value, path, "GrammarType").required("type", string)
    if kind == "text":
        return None
    if kind == "json_schema" and "value" not in value and "json_schema" in value:
        return grammar({"type": kind, "value": value["json_schema"]}, path)
    return grammar(value, path)


def _message(value: Any, path: str) -> Message:
    fields = Fields(value, path, "Message")
    role = fields.required("role", string)
    fields.optional("name", string)
    calls = fields.optional("tool_calls", list_of(_tool_call)) or []
    content = fields.optional("content", _content)
    if calls and not content:
        text = json.dumps(calls, ensure_ascii=False, separators=(",", ":"))
        return Message(role, text, tuple(str(call["id"]) for call in calls))
    if content is None:
        allowed = "only an assistant message with `tool_calls` may go without"
        raise ShapeError(fields.path("content"), f"missing content, expected a string or an array of parts; {allowed}")
    return Message(role, content, tuple(str(call["id"]) for call in calls))


def _content(value: Any, path: str) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise wrong_type(path, value, "a string or an array of parts")
    return "".join(_part(part, f"{path}[{i}]") for i, part in enumerate(value))


def _part(value: Any, path: str) -> str:
    fields = Fields(value, path, "MessageChunk")
    kind = fields.required("type", string)
    if kind == "text":
        return fields.required("text", string)
    if kind == "image_url":
        url = Fields(fields.required("image_url", anything), fields.path("image_url"), "Url").required("url", string)
        return f"![]({url})"
    raise ShapeError(fields.path("type"), f"unknown variant `{kind}`, expected `text` or `image_url`")


def _tool_call(value: Any, path: str) -> dict[str, Any]:
    fields = Fields(value, path, "ToolCall")
    function = Fields(fields.required("function", anything), fields.path("function"), "FunctionDefinition")
    return {
        "id": fields.required("id", string),
        "type": fields.required("type", string),
        "function": {
            "description": function.optional("description", string),
            "name": function.required("name", string),
            "arguments": function.required("arguments", anything, "parameters"),
        },
    }


def _tool(value: Any, path: str) -> Tool:
    fields = Fields(value, path, "Tool")
    fields.required("type", string)
    function = Fields(fields.required("function", anything), fields.path("function"), "FunctionDefinition")
    parameters = function.optional("parameters", anything, "arguments")
    if parameters is not None and not isinstance(parameters, dict):
        raise wrong_type(function.path("parameters"), parameters, "a JSON schema object")
    return Tool(
        name=function.required("name", string),
        description=function.optional("description", string),
        parameters=parameters or {},
        source=value,
    )


def _tool_choice(value: Any, path: str) -> tuple[str, str | None]:
    """`auto`, `none`, `required`, a function's name, or an object that names one."""
    if isinstance(value, str):
        return (value, None) if value in {"auto", "none", "required"} else ("function", value)
    fields = Fields(value, path, "ToolChoice")
    fields.required("type", string)
    function = Fields(fields.required("function", anything), fields.path("function"), "FunctionName")
    return "function", function.required("name", string)
