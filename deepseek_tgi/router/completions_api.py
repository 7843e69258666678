"""`/v1/completions`: one or several prompts, answered in order of completion."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing

from deepseek_tgi.errors import DeepseekTgiError
from deepseek_tgi.router import sse
from deepseek_tgi.router.errors import BatchSizeError, SuffixError
from deepseek_tgi.router.http import Exchange
from deepseek_tgi.router.infer import Generated
from deepseek_tgi.router.openai_format import Reasons, Usage, completion, completion_choice, completion_chunk
from deepseek_tgi.router.openai_requests import CompletionRequest, completion_request
from deepseek_tgi.router.requests import GenerateRequest
from deepseek_tgi.router.state import RouterState, milliseconds
from deepseek_tgi.router.tokens import TokenEvent
from deepseek_tgi.router.validation import check_streamable


class CompletionsApi:
    """Handler of the completions route."""

    def __init__(self, state: RouterState) -> None:
        self._state = state
        self._model = state.config.model_id
        self._reasons = Reasons(strict=state.config.openai_reasons == "openai")

    async def completions(self, exchange: Exchange) -> None:
        """POST /v1/completions."""
        await self.respond(exchange, completion_request(await self._state.body(exchange)))

    async def respond(self, exchange: Exchange, wish: CompletionRequest) -> None:
        """The same with a body that is read already."""
        self._state.metrics.count("tgi_request_count")
        if wish.suffix is not None:
            raise SuffixError
        limit = self._state.config.max_client_batch_size
        if len(wish.prompts) > limit:
            raise BatchSizeError(limit)
        requests = [GenerateRequest(prompt, wish.parameters, wish.stream) for prompt in wish.prompts]
        if wish.stream:
            headers = self._state.stream_headers(sum(map(len, wish.prompts)))
            await sse.stream(
                exchange, sse.openai_stream(self._events(requests), self._state.infer.note_failed), headers
            )
        else:
            await self._answer(exchange, requests)

    async def _answer(self, exchange: Exchange, requests: list[GenerateRequest]) -> None:
        started = time.monotonic()
        done: list[tuple[int, Generated]] = []

        async def generate(index: int, request: GenerateRequest) -> None:
            done.append((index, await self._state.infer.generate(request)))

        await _together([generate(i, request) for i, request in enumerate(requests)])
        choices = [completion_choice(i, g.ending.text, self._reasons.final(g.ending.finish_reason)) for i, g in done]
        generated = [g for _, g in done]
        usage = Usage(sum(g.input_length for g in generated), sum(g.ending.generated_tokens for g in generated))
        headers = self._headers(generated, sum(len(request.inputs) for request in requests), started)
        body = completion(self._model, self._state.system_fingerprint, choices, usage)
        await exchange.respond_json(200, body, headers)

    def _headers(self, generated: list[Generated], characters: int, started: float) -> list[tuple[str, str]]:
        """As for `/generate`, summed over prompts, and without `x-compute-time`."""
        now = time.monotonic()
        t = [g.timing for g in generated]
        inference = [now - timing.admitted for timing in t]
        counts = [g.ending.generated_tokens for g in generated]
        return [
            ("x-compute-type", self._state.config.compute_type),
            ("x-compute-characters", str(characters)),
            ("x-total-time", milliseconds(now - started)),
            ("x-validation-time", milliseconds(sum(timing.queued - timing.arrived for timing in t))),
            ("x-queue-time", milliseconds(sum(timing.admitted - timing.queued for timing in t))),
            ("x-inference-time", milliseconds(sum(inference))),
            ("x-time-per-token", milliseconds(sum(s / n for s, n in zip(inference, counts, strict=True)))),
            ("x-prompt-tokens", str(sum(g.input_length for g in generated))),
            ("x-generated-tokens", str(sum(counts))),
        ]

    async def _events(self, requests: list[GenerateRequest]) -> AsyncGenerator[bytes, None]:
        """Chunks of all prompts as they come. One prompt is read directly, several through a queue."""
        for request in requests:
            check_streamable(request.parameters)
        if len(requests) == 1:
            async with aclosing(self._prompt_events(0, requests[0])) as chunks:
                async for chunk in chunks:
                    yield chunk
            return
        found: asyncio.Queue[bytes | DeepseekTgiError | None] = asyncio.Queue(maxsize=64)

        async def pump(index: int, request: GenerateRequest) -> None:
            try:
                async with aclosing(self._prompt_events(index, request)) as chunks:
                    async for chunk in chunks:
                        await found.put(chunk)
                await found.put(None)
            except DeepseekTgiError as error:
                await found.put(error)

        tasks = [asyncio.create_task(pump(i, request)) for i, request in enumerate(requests)]
        running = len(tasks)
        try:
            while running:
                item = await found.get()
                if isinstance(item, DeepseekTgiError):
                    raise item
                if item is None:
                    running -= 1
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _prompt_events(self, index: int, request: GenerateRequest) -> AsyncGenerator[bytes, None]:
        stream = await self._state.infer.open(request)
        try:
            while not stream.finished:
                events = await stream.read()
                yield b"".join(self._event(index, event, stream.input_length) for event in events)
        finally:
            stream.close()

    def _event(self, index: int, event: TokenEvent, input_length: int) -> bytes:
        fingerprint = self._state.system_fingerprint
        if event.ending is None:
            choice = completion_choice(index, event.token.text, "")
            return sse.event(completion_chunk(self._model, fingerprint, choice))
        reason = self._reasons.streamed_completion(event.ending.finish_reason)
        choice = completion_choice(index, event.token.text, reason)
        usage = Usage(input_length, event.ending.generated_tokens)
        return sse.event(completion(self._model, fingerprint, [choice], usage))


async def _together(work: list[Coroutine[None, None, None]]) -> None:
    """Run all; if one fails, or we are cancelled, none goes on."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
