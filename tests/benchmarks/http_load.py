"""Concurrent streaming clients against an OpenAI-style server, counted by one tokenizer for every server."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import aiohttp


@dataclass(frozen=True, slots=True)
class Stream:
    """One client's experience: when the first text came, when the last, and the text."""

    first_s: float
    last_s: float
    text: str


@dataclass(frozen=True, slots=True)
class Load:
    """What one round of concurrent streams gave."""

    seconds: float
    streams: tuple[Stream, ...]

    def tokens_per_s(self, count: Callable[[str], int]) -> float:
        return sum(count(stream.text) for stream in self.streams) / self.seconds

    def first_text_s(self) -> float:
        """Median wait for the first text."""
        waits = sorted(stream.first_s for stream in self.streams)
        return waits[len(waits) // 2]


def run_streams(url: str, prompts: Sequence[str], max_tokens: int) -> Load:
    """All `prompts` at once as greedy streamed completions; returns when the last stream has ended."""
    return asyncio.run(_run(url, prompts, max_tokens))


async def _run(url: str, prompts: Sequence[str], max_tokens: int) -> Load:
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        started = time.perf_counter()
        streams = await asyncio.gather(
            *(_stream(session, f"{url}/v1/completions", prompt, max_tokens) for prompt in prompts)
        )
        return Load(time.perf_counter() - started, tuple(streams))


async def _stream(session: aiohttp.ClientSession, url: str, prompt: str, max_tokens: int) -> Stream:
    body = {"model": "any", "prompt": prompt, "max_tokens": max_tokens, "stream": True, "temperature": 0.0}
    started = time.perf_counter()
    first = 0.0
    pieces: list[str] = []
    async with session.post(url, json=body) as response:
        if response.status != 200:
            raise SystemExit(f"{url}: status {response.status}: {(await response.text())[:500]}")
        async for line in response.content:
            data = line.removeprefix(b"data:").strip()
            if not line.startswith(b"data:") or data == b"[DONE]":
                continue
            event = json.loads(data)
            if "choices" not in event:
                raise SystemExit(f"{url}: the stream says {event}")
            text = event["choices"][0].get("text", "") if event["choices"] else ""
            if text and not pieces:
                first = time.perf_counter() - started
            pieces.append(text)
    return Stream(first, time.perf_counter() - started, "".join(pieces))
