"""`fmaas.GenerationService`: text generation as TGIS clients ask for it.

What is asked for and cannot be done here (a least number of new tokens, a length penalty, ranks, context-free grammars,
prefixes) is refused by name rather than left out.
"""

# ruff: noqa: N802 - the methods carry the wire's names

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from typing import Any

from deepseek_tgi.errors import RequestError
from deepseek_tgi.pb import fmaas_pb2 as pb
from deepseek_tgi.pb import fmaas_pb2_grpc
from deepseek_tgi.router.grpc_calls import Calls, answered, streamed
from deepseek_tgi.router.infer import TokenStream
from deepseek_tgi.router.models import Models
from deepseek_tgi.router.requests import GenerateRequest, Grammar, Parameters
from deepseek_tgi.router.served_model import ServedModel
from deepseek_tgi.router.stop_text import StopText
from deepseek_tgi.router.tokens import Token, TokenEvent

DEFAULT_NEW_TOKENS = 20
MAX_PROMPTS = 256


class FmaasService(fmaas_pb2_grpc.GenerationServiceServicer):
    """Every call takes the served model once and keeps it; `model_id` is not looked at, as TGIS does not either."""

    def __init__(self, calls: Calls, models: Models) -> None:
        self.calls = calls
        self._models = models

    @answered
    async def Generate(self, request: pb.BatchedGenerationRequest, context: Any) -> pb.BatchedGenerationResponse:
        """Whole answers, in the order of the prompts."""
        self.calls.admit(context)
        if len(request.requests) > MAX_PROMPTS:
            raise RequestError(f"requests: got {len(request.requests)}, expected at most {MAX_PROMPTS}")
        with self.calls.traffic.request():
            model = await self._models.admitted()
            with model.traffic.request():
                adapter = request.adapter_id if request.HasField("adapter_id") else None
                asked = [_Asked(each.text, request.params, adapter, False) for each in request.requests]
                tasks = [asyncio.ensure_future(_whole(model, each)) for each in asked]
                try:
                    return pb.BatchedGenerationResponse(responses=await asyncio.gather(*tasks))
                finally:
                    for task in tasks:
                        task.cancel()

    @streamed
    async def GenerateStream(
        self, request: pb.SingleGenerationRequest, context: Any
    ) -> AsyncIterator[pb.GenerationResponse]:
        """What is known of the prompt, then the text as it comes."""
        self.calls.admit(context)
        with self.calls.traffic.request():
            model = await self._models.admitted()
            with model.traffic.request():
                adapter = request.adapter_id if request.HasField("adapter_id") else None
                async for piece in _pieces(model, _Asked(request.request.text, request.params, adapter, True)):
                    yield piece

    @answered
    async def Tokenize(self, request: pb.BatchedTokenizeRequest, context: Any) -> pb.BatchedTokenizeResponse:
        """Tokens of texts, special ones included; offsets count characters."""
        self.calls.admit(context)
        with self.calls.traffic.request():
            model = await self._models.admitted()
            with model.traffic.request():
                validator = model.state.infer.validator
                responses = [
                    await validator.off_loop(_tokenized, request, each.text, await validator.spans(each.text, True))
                    for each in request.requests
                ]
        return pb.BatchedTokenizeResponse(responses=responses)

    @answered
    async def ModelInfo(self, request: pb.ModelInfoRequest, context: Any) -> pb.ModelInfoResponse:
        """Kind and limits."""
        limits = (await self._models.admitted()).state.limits
        return pb.ModelInfoResponse(
            model_kind=pb.ModelInfoResponse.DECODER_ONLY,
            max_sequence_length=limits.max_total_tokens,
            max_new_tokens=limits.max_total_tokens - 1,
        )


def _tokenized(request: pb.BatchedTokenizeRequest, text: str, spans: list[Any]) -> pb.TokenizeResponse:
    kept = spans[-request.truncate_input_tokens :] if request.truncate_input_tokens else spans
    response = pb.TokenizeResponse(token_count=len(kept))
    if request.return_tokens:
        response.tokens.extend(span.text for span in kept)
    if request.return_offsets:
        characters = _character_of(text)
        response.offsets.extend(
            pb.TokenizeResponse.Offset(start=characters[span.start], end=characters[span.stop]) for span in kept
        )
    return response


class _Asked:
    """One prompt with its parameters, read and checked. Raises `RequestError` for what cannot be done."""

    def __init__(self, text: str, params: pb.Parameters, adapter_id: str | None, stream: bool) -> None:
        self.text = text
        self.options = params.response
        stopping, decoding = params.stopping, params.decoding
        _refuse_what_cannot_be_done(params, stream)
        self.seconds = stopping.time_limit_millis / 1000 or None
        self.stops = tuple(stopping.stop_sequences)
        self.keeps_stop = stopping.include_stop_sequence if stopping.HasField("include_stop_sequence") else True
        self.wanted = stopping.max_new_tokens or DEFAULT_NEW_TOKENS
        sampling = params.sampling
        greedy = params.method == pb.GREEDY or (sampling.HasField("temperature") and sampling.temperature == 0)
        self.request = GenerateRequest(
            text,
            Parameters(
                temperature=None if greedy or not sampling.HasField("temperature") else sampling.temperature,
                top_k=None if greedy else sampling.top_k or None,
                top_p=None if greedy or sampling.top_p >= 1 else sampling.top_p or None,
                typical_p=None if greedy or sampling.typical_p >= 1 else sampling.typical_p or None,
                repetition_penalty=decoding.repetition_penalty or None,
                do_sample=not greedy,
                seed=sampling.seed if sampling.HasField("seed") and not greedy else None,
                max_new_tokens=self.wanted,
                stop=self.stops,
                truncate=params.truncate_input_tokens or None,
                decoder_input_details=self.options.input_tokens,
                top_n_tokens=self.options.top_n_tokens or None,
                grammar=_grammar(decoding),
                adapter_id=adapter_id,
            ),
        )


def _refuse_what_cannot_be_done(params: pb.Parameters, stream: bool) -> None:
    rules = (
        (params.stopping.min_new_tokens > 0, "stopping.min_new_tokens"),
        (params.decoding.HasField("length_penalty"), "decoding.length_penalty"),
        (params.response.token_ranks, "response.token_ranks"),
        (params.response.input_tokens and stream, "response.input_tokens of a stream"),
        (params.decoding.WhichOneof("guided") == "grammar", "decoding.grammar"),
    )
    refused = [name for broken, name in rules if broken]
    if refused:
        raise RequestError(f"params.{', params.'.join(refused)}: not supported; leave it out")


def _grammar(decoding: pb.DecodingParameters) -> Grammar | None:
    kind = decoding.WhichOneof("guided")
    if kind == "regex":
        return Grammar("regex", decoding.regex)
    if kind == "choice":
        return Grammar("regex", "|".join(f"({re.escape(choice)})" for choice in decoding.choice.choices))
    if kind == "json_schema":
        return Grammar("json", decoding.json_schema)
    if kind == "format" and decoding.format == pb.DecodingParameters.JSON:
        raise RequestError("params.decoding.format: JSON without a schema is not supported; give json_schema")
    return None


async def _whole(model: ServedModel, asked: _Asked) -> pb.GenerationResponse:
    """All pieces as one answer."""
    answer = pb.GenerationResponse()
    text = ""
    async for piece in _pieces(model, asked):
        text += piece.text
        tokens, inputs = list(answer.tokens), list(answer.input_tokens)
        answer.MergeFrom(piece)
        del answer.tokens[:], answer.input_tokens[:]
        answer.tokens.extend([*tokens, *piece.tokens])
        answer.input_tokens.extend([*inputs, *piece.input_tokens])
    answer.text = text
    return answer


async def _pieces(model: ServedModel, asked: _Asked) -> AsyncIterator[pb.GenerationResponse]:
    """What is known of the prompt, then the text as it comes, last how it ended. Ends early at the time limit."""
    stream = await model.state.infer.open(asked.request)
    loop = asyncio.get_running_loop()
    deadline = None if asked.seconds is None else loop.time() + asked.seconds
    shown = StopText(asked.stops, asked.keeps_stop)
    try:
        first = pb.GenerationResponse(input_token_count=stream.input_length)
        first.text = asked.text if asked.options.input_text else ""
        sent_prompt = False
        count = 0
        while not stream.finished:
            try:
                left = None if deadline is None else max(0.0, deadline - loop.time())
                events = await asyncio.wait_for(stream.read(), left)
            except (asyncio.TimeoutError, TimeoutError):
                if not sent_prompt:
                    yield first
                yield pb.GenerationResponse(generated_token_count=count, text=shown.rest(), stop_reason=pb.TIME_LIMIT)
                return
            if not sent_prompt:
                sent_prompt = True
                first.input_tokens.extend(_infos(stream.prefill, asked))
                yield first
            for event in events:
                count += 1
                yield _piece(event, count, stream, asked, shown)
    finally:
        stream.close()


def _piece(event: TokenEvent, count: int, stream: TokenStream, asked: _Asked, shown: StopText) -> pb.GenerationResponse:
    piece = pb.GenerationResponse(generated_token_count=count)
    if asked.options.generated_tokens:
        piece.tokens.extend(_infos([event.token], asked))
        for token in event.top_tokens:
            piece.tokens[0].top_tokens.add(text=token.text, logprob=_logprob(token))
    ending = event.ending
    if ending is None:
        piece.text = shown.feed("" if event.token.special else event.token.text)
        return piece
    # What was sent so far and this must be the text that ended, whatever its last characters became.
    piece.text = shown.finish(ending.text)
    piece.generated_token_count = ending.generated_tokens
    piece.stop_reason = {
        "length": pb.MAX_TOKENS if ending.generated_tokens >= asked.wanted else pb.TOKEN_LIMIT,
        "eos_token": pb.EOS_TOKEN,
        "stop_sequence": pb.STOP_SEQUENCE,
    }[ending.finish_reason]
    if piece.stop_reason == pb.STOP_SEQUENCE:
        piece.stop_sequence = shown.found
    if ending.seed is not None:
        piece.seed = ending.seed
    return piece


def _infos(tokens: list[Token], asked: _Asked) -> list[pb.TokenInfo]:
    with_logprobs = asked.options.token_logprobs
    return [pb.TokenInfo(text=token.text, logprob=_logprob(token) if with_logprobs else 0.0) for token in tokens]


def _logprob(token: Token) -> float:
    return float("nan") if token.logprob is None else float(token.logprob)


def _character_of(text: str) -> list[int]:
    """For each byte offset of `text`, the characters before it."""
    found = []
    for index, character in enumerate(text):
        found += [index] * len(character.encode())
    return [*found, len(text)]
