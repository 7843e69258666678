"""The shapes of OpenAI answers and chunks: key order and null fields as TGI writes them."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import orjson

from deepseek_tgi.router.tokens import Token, TokenEvent

REASONS = {"eos_token": "stop"}
STRICT_REASONS = {"eos_token": "stop", "stop_sequence": "stop"}


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of an answer."""

    prompt_tokens: int
    completion_tokens: int

    def json(self) -> dict[str, int]:
        """As answers carry it."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }


@dataclass(frozen=True, slots=True)
class Reasons:
    """How endings are named. `strict` uses OpenAI's own words only; otherwise they are TGI's."""

    strict: bool = False

    def final(self, reason: str) -> str:
        """In a whole answer and in chat streams."""
        return (STRICT_REASONS if self.strict else REASONS).get(reason, reason)

    def streamed_completion(self, reason: str) -> str:
        """In completion streams, where TGI writes its own word."""
        return self.final(reason) if self.strict else reason


def now() -> int:
    """Unix seconds."""
    return int(time.time())


def chat_logprobs(events: list[TokenEvent]) -> dict[str, Any]:
    """`logprobs` of a chat choice."""
    return {
        "content": [
            {
                "token": event.token.text,
                "logprob": event.token.logprob,
                "top_logprobs": [{"token": top.text, "logprob": top.logprob} for top in event.top_tokens],
            }
            for event in events
        ]
    }


def visible(token: Token) -> str:
    """Text of a token in chat: special tokens say nothing."""
    return "" if token.special else token.text


class ChatChunks:
    """Writes chunks of one chat stream; the parts that do not change are encoded once."""

    def __init__(self, model: str, fingerprint: str) -> None:
        self._head = b'data: {"object":"chat.completion.chunk","id":"","created":'
        self._names = b',"model":' + orjson.dumps(model) + b',"system_fingerprint":' + orjson.dumps(fingerprint)

    def chunk(self, delta: bytes, logprobs: dict[str, Any] | None, reason: str | None) -> bytes:
        """A chunk with one choice; `delta` is JSON."""
        return b"".join(
            (
                self._head,
                b"%d" % now(),
                self._names,
                b',"choices":[{"index":0,"delta":',
                delta,
                b',"logprobs":',
                b"null" if logprobs is None else orjson.dumps(logprobs),
                b',"finish_reason":',
                b"null" if reason is None else orjson.dumps(reason),
                b'}],"usage":null}\n\n',
            )
        )

    def content(self, text: str, logprobs: dict[str, Any] | None, reason: str | None) -> bytes:
        """A piece of text."""
        return self.chunk(b'{"role":"assistant","content":' + orjson.dumps(text) + b"}", logprobs, reason)

    def tool_call(self, call_id: str, name: str | None, arguments: str) -> bytes:
        """A piece of a tool call."""
        function = {"name": name, "arguments": arguments}
        call = {"index": 0, "id": call_id, "type": "function", "function": function}
        return self.chunk(orjson.dumps({"role": "assistant", "tool_calls": [call]}), None, None)

    def usage(self, usage: Usage) -> bytes:
        """The extra chunk that carries the counts."""
        counts = orjson.dumps(usage.json())
        return self._head + b"%d" % now() + self._names + b',"choices":[],"usage":' + counts + b"}\n\n"


def chat_completion(model: str, fingerprint: str, choice: dict[str, Any], usage: Usage) -> dict[str, Any]:
    """A whole chat answer."""
    return {
        "object": "chat.completion",
        "id": "",
        "created": now(),
        "model": model,
        "system_fingerprint": fingerprint,
        "choices": [{"index": 0, **choice}],
        "usage": usage.json(),
    }


def completion(model: str, fingerprint: str, choices: list[dict[str, Any]], usage: Usage) -> dict[str, Any]:
    """A whole completion answer, or the last event of a prompt in a stream."""
    return {
        "object": "text_completion",
        "id": "",
        "created": now(),
        "model": model,
        "system_fingerprint": fingerprint,
        "choices": choices,
        "usage": usage.json(),
    }


def completion_chunk(model: str, fingerprint: str, choice: dict[str, Any]) -> dict[str, Any]:
    """A token of a completion stream."""
    return {
        "object": "text_completion",
        "id": "",
        "created": now(),
        "choices": [choice],
        "model": model,
        "system_fingerprint": fingerprint,
    }


def completion_choice(index: int, text: str, reason: str) -> dict[str, Any]:
    """One choice of a completion."""
    return {"index": index, "text": text, "logprobs": None, "finish_reason": reason}
