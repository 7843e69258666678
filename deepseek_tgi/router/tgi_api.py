"""TGI's own routes: `/`, `/generate`, `/generate_stream`."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator
from typing import Any

from deepseek_tgi.errors import DeepseekTgiError
from deepseek_tgi.router import sse
from deepseek_tgi.router.http import Exchange
from deepseek_tgi.router.infer import Generated, TokenStream
from deepseek_tgi.router.requests import GenerateRequest, generate_request
from deepseek_tgi.router.state import RouterState
from deepseek_tgi.router.tokens import Ending, Token, TokenEvent
from deepseek_tgi.router.validation import check_best_of, check_streamable


class NativeApi:
    """Handlers of the native routes."""

    def __init__(self, state: RouterState) -> None:
        self._state = state

    async def generate(self, exchange: Exchange) -> None:
        """POST /generate: the whole answer."""
        request = generate_request(await self._state.body(exchange))
        body, headers = await self.answer(request)
        await exchange.respond_json(200, body, headers)

    async def generate_stream(self, exchange: Exchange) -> None:
        """POST /generate_stream: one event a token."""
        await self.answer_stream(exchange, generate_request(await self._state.body(exchange)))

    async def compat_generate(self, exchange: Exchange) -> None:
        """POST /: either of the two, by the body's `stream`; the whole answer comes as a list of one."""
        await self.compat(exchange, generate_request(await self._state.body(exchange)))

    async def compat(self, exchange: Exchange, request: GenerateRequest) -> None:
        """The compat route with a body that is read already."""
        if request.parameters.return_full_text is None:
            full = self._state.pipeline_tag in {None, "text-generation"}
            request = dataclasses.replace(
                request, parameters=dataclasses.replace(request.parameters, return_full_text=full)
            )
        if request.stream:
            await self.answer_stream(exchange, request)
        else:
            body, headers = await self.answer(request)
            await exchange.respond_json(200, [body], headers)

    async def answer(self, request: GenerateRequest) -> tuple[dict[str, Any], list[tuple[str, str]]]:
        """Body and headers of a whole answer."""
        best, others = await self._candidates(request)
        headers = self._state.answer_headers(best, len(request.inputs))
        prompt = request.inputs if request.parameters.return_full_text else ""
        body: dict[str, Any] = {"generated_text": prompt + best.ending.text}
        if request.parameters.details or request.parameters.decoder_input_details:
            details: dict[str, Any] = {**_ending(best.ending), **_token_lists(best)}
            if others:
                details["best_of_sequences"] = [
                    {"generated_text": prompt + other.ending.text, **_ending(other.ending), **_token_lists(other)}
                    for other in others
                ]
            tops = details.pop("top_tokens", None)
            if tops is not None:
                details["top_tokens"] = tops
            body["details"] = details
        return body, headers

    async def answer_stream(self, exchange: Exchange, request: GenerateRequest) -> None:
        """The stream, errors inside it."""
        await sse.stream(exchange, self._events(request), self._state.stream_headers(len(request.inputs)))

    async def _candidates(self, request: GenerateRequest) -> tuple[Generated, list[Generated]]:
        """The answer and, with best_of, the candidates that lost."""
        best_of = request.parameters.best_of
        if best_of is None or best_of == 1:
            return await self._state.infer.generate(request), []
        check_best_of(best_of, self._state.limits)
        tasks = [asyncio.ensure_future(self._state.infer.generate(request)) for _ in range(best_of)]
        try:
            found = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        winner = max(range(len(found)), key=lambda i: mean_logprob(found[i].tokens))
        return found[winner], [other for i, other in enumerate(found) if i != winner]

    async def _events(self, request: GenerateRequest) -> AsyncGenerator[bytes, None]:
        stream: TokenStream | None = None
        try:
            check_streamable(request.parameters)
            stream = await self._state.infer.open(request)
            index = 0
            while not stream.finished:
                chunk = b""
                for item in await stream.read():
                    index += 1
                    chunk += token_event(index, item, request, stream.input_length)
                yield chunk
        except DeepseekTgiError as error:
            self._state.infer.note_failed(error)
            yield sse.native_error(error)
        finally:
            if stream is not None:
                stream.close()


def mean_logprob(tokens: list[Token]) -> float:
    """What best_of candidates are compared by."""
    return sum(token.logprob or 0.0 for token in tokens) / len(tokens)


def token_json(token: Token) -> dict[str, Any]:
    """A token as the native routes show it."""
    return {"id": token.id, "text": token.text, "logprob": token.logprob, "special": token.special}


def token_event(index: int, item: TokenEvent, request: GenerateRequest, input_length: int) -> bytes:
    """One event of a native stream."""
    value: dict[str, Any] = {"index": index, "token": token_json(item.token)}
    if item.top_tokens:
        value["top_tokens"] = [token_json(token) for token in item.top_tokens]
    ending = item.ending
    value["generated_text"] = value["details"] = None
    if ending is not None:
        value["generated_text"] = (request.inputs if request.parameters.return_full_text else "") + ending.text
        if request.parameters.details:
            value["details"] = {**_ending(ending), "input_length": input_length}
    return sse.event(value)


def _ending(ending: Ending) -> dict[str, Any]:
    return {
        "finish_reason": ending.finish_reason,
        "generated_tokens": ending.generated_tokens,
        "seed": ending.seed,
    }


def _token_lists(generated: Generated) -> dict[str, Any]:
    lists: dict[str, Any] = {
        "prefill": [{"id": token.id, "text": token.text, "logprob": token.logprob} for token in generated.prefill],
        "tokens": [token_json(token) for token in generated.tokens],
    }
    if generated.top_tokens:
        lists["top_tokens"] = [[token_json(token) for token in tops] for tops in generated.top_tokens]
    return lists
