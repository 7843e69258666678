"""The rules a generation must obey, in TGI's order and words, and its tokenisation."""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import orjson

from deepseek_tgi.errors import RequestError
from deepseek_tgi.pb import generate_pb2 as pb
from deepseek_tgi.router.entry import Job
from deepseek_tgi.router.errors import ValidationError
from deepseek_tgi.router.grammar import compile_grammar
from deepseek_tgi.router.requests import GenerateRequest, Parameters

PIECE_TOKENS = 1024
"""New tokens that the first piece of a generation may ask of the shard (TGI's default generation length)."""

T = TypeVar("T")


class Tokenizer(Protocol):
    """What the door needs of a tokenizer; the shard must have the same one."""

    def encode(self, text: str, add_special_tokens: bool = True, truncate: int | None = None) -> list[int]:
        """Ids; with `truncate` the last ones."""

    def encode_with_offsets(self, text: str, add_special_tokens: bool = True) -> list[Any]:
        """Tokens with `id`, `text`, `start`, `stop` (bytes)."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What this server allows a request."""

    max_best_of: int
    max_stop_sequences: int
    max_top_n_tokens: int
    max_input_tokens: int
    max_total_tokens: int
    grammars: bool = True


@dataclass(frozen=True, slots=True)
class Validated:
    """A job for the shard and how many tokens the client wants in all (the job may be its first piece only)."""

    job: Job
    wanted_tokens: int

    @property
    def input_length(self) -> int:
        """Prompt tokens, after truncation."""
        return len(self.job.input_ids)


class Validator:
    """Checks and tokenises; `close` stops its threads."""

    def __init__(self, tokenizer: Tokenizer, limits: Limits, workers: int) -> None:
        self.limits = limits
        self._tokenizer = tokenizer
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="validation")

    def close(self) -> None:
        """Stop the threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def off_loop(self, work: Callable[..., T], *args: Any) -> T:
        """Run slow work on a validation thread."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, work, *args)

    async def validate(self, request: GenerateRequest) -> Validated:
        """Apply all rules. Raises `ValidationError` with the first that is broken."""
        parameters = request.parameters
        check_parameters(parameters, self.limits)
        if not request.inputs:
            raise ValidationError("`inputs` cannot be empty")
        truncate = parameters.truncate
        most = self.limits.max_input_tokens
        if truncate is not None and not 0 < truncate <= most:
            raise ValidationError(f"`truncate` must be strictly positive and less than {most}. Given: {truncate}")
        ids = await self.encode(request.inputs, request.add_special_tokens, truncate)
        wanted = self.limits.max_total_tokens - len(ids)
        if parameters.max_new_tokens is not None:
            wanted = parameters.max_new_tokens
        piece = min(max(wanted, 0), PIECE_TOKENS)
        self._check_lengths(len(ids), piece)
        grammar = await self._grammar(parameters)
        job = Job(
            text=request.inputs,
            input_ids=ids,
            truncate=truncate or most,
            parameters=sampling(parameters, grammar),
            max_new_tokens=piece,
            stop_sequences=parameters.stop,
            add_special_tokens=request.add_special_tokens,
            prefill_logprobs=parameters.decoder_input_details,
            top_n_tokens=parameters.top_n_tokens or 0,
            adapter_id=parameters.adapter_id,
        )
        return Validated(job, wanted)

    async def encode(self, text: str, add_special_tokens: bool, truncate: int | None = None) -> list[int]:
        """Ids of a text. Raises `ValidationError` if the tokenizer refuses it."""
        try:
            return await self.off_loop(self._tokenizer.encode, text, add_special_tokens, truncate)
        except RequestError as error:
            raise ValidationError(f"tokenizer error {error}") from error

    async def tokens(self, text: str, add_special_tokens: bool) -> orjson.Fragment:
        """Tokens of a text with their byte offsets, as JSON. Raises `ValidationError` if the tokenizer refuses it."""
        try:
            return await self.off_loop(self._tokens, text, add_special_tokens)
        except RequestError as error:
            raise ValidationError(f"tokenizer error {error}") from error

    async def spans(self, text: str, add_special_tokens: bool) -> list[Any]:
        """As `tokens`, as values. Raises `ValidationError`."""
        try:
            return await self.off_loop(self._tokenizer.encode_with_offsets, text, add_special_tokens)
        except RequestError as error:
            raise ValidationError(f"tokenizer error {error}") from error

    def _tokens(self, text: str, add_special_tokens: bool) -> orjson.Fragment:
        spans = self._tokenizer.encode_with_offsets(text, add_special_tokens)
        return orjson.Fragment(
            orjson.dumps([{"id": s.id, "text": s.text, "start": s.start, "stop": s.stop} for s in spans])
        )

    def _check_lengths(self, input_length: int, piece: int) -> None:
        total, most = self.limits.max_total_tokens, self.limits.max_input_tokens
        if input_length + piece > total:
            raise ValidationError(
                f"`inputs` tokens + `max_new_tokens` must be <= {total}. "
                f"Given: {input_length} `inputs` tokens and {piece} `max_new_tokens`"
            )
        if input_length > most:
            raise ValidationError(f"`inputs` must have less than {most} tokens. Given: {input_length}")

    async def _grammar(self, parameters: Parameters) -> tuple[str, pb.GrammarType]:
        if parameters.grammar is None:
            return "", pb.GRAMMAR_TYPE_NONE
        if not self.limits.grammars:
            raise ValidationError("grammar is not supported")
        return await self.off_loop(compile_grammar, parameters.grammar)


def check_parameters(p: Parameters, limits: Limits) -> None:
    """Every rule that needs no tokenizer. Raises `ValidationError`."""
    sampled = p.do_sample or any(v is not None for v in (p.temperature, p.top_k, p.top_p, p.typical_p))
    best_of = p.best_of or 1
    top_n = p.top_n_tokens or 0
    rules = (
        (best_of > 1 and not sampled, "you must use sampling when `best_of` is > 1"),
        (p.temperature is not None and not 0 < p.temperature < math.inf, "`temperature` must be strictly positive"),
        (
            p.repetition_penalty is not None and not 0 < p.repetition_penalty < math.inf,
            "`repetition_penalty` must be strictly positive",
        ),
        (
            p.frequency_penalty is not None and not -2 <= p.frequency_penalty <= 2,
            "`frequency_penalty` must be >= -2.0 and <= 2.0",
        ),
        (p.top_p is not None and not 0 < p.top_p < 1, "`top_p` must be > 0.0 and < 1.0"),
        (p.typical_p is not None and not 0 < p.typical_p < 1, "`typical_p` must be > 0.0 and < 1.0"),
        (p.top_k is not None and p.top_k <= 0, "`top_k` must be strictly positive"),
        (p.max_new_tokens == 0, "`max_new_tokens` must be strictly positive"),
        (
            len(p.stop) > limits.max_stop_sequences,
            f"`stop` supports up to {limits.max_stop_sequences} stop sequences. Given: {len(p.stop)}",
        ),
        (best_of > 1 and p.seed is not None, "`seed` must not be set when `best_of` > 1"),
        (
            top_n > limits.max_top_n_tokens,
            f"`top_n_tokens` must be >= 0 and <= {limits.max_top_n_tokens}. Given: {top_n}",
        ),
    )
    for broken, text in rules:
        if broken:
            raise ValidationError(text)


def check_best_of(best_of: int, limits: Limits) -> None:
    """The rules that come before all others when several candidates are wanted. Raises `ValidationError`."""
    if best_of == 1:
        return
    if limits.max_best_of == 1:
        raise ValidationError("`best_of` != 1 is not allowed for this endpoint")
    if not 0 < best_of <= limits.max_best_of:
        raise ValidationError(f"`best_of` must be > 0 and <= {limits.max_best_of}. Given: {best_of}")


def check_streamable(parameters: Parameters) -> None:
    """What cannot be streamed. Raises `ValidationError`."""
    if parameters.best_of not in {None, 1}:
        raise ValidationError("`best_of` != 1 is not supported when streaming tokens")
    if parameters.decoder_input_details:
        raise ValidationError("`decoder_input_details` == true is not supported when streaming tokens")


def sampling(p: Parameters, grammar: tuple[str, pb.GrammarType]) -> pb.NextTokenChooserParameters:
    """The wire's sampling parameters: neutral values for what is absent, a random seed if none is given."""
    return pb.NextTokenChooserParameters(
        temperature=1.0 if p.temperature is None else p.temperature,
        top_k=p.top_k or 0,
        top_p=1.0 if p.top_p is None else p.top_p,
        typical_p=1.0 if p.typical_p is None else p.typical_p,
        do_sample=p.do_sample,
        seed=secrets.randbits(64) if p.seed is None else p.seed,
        repetition_penalty=1.0 if p.repetition_penalty is None else p.repetition_penalty,
        frequency_penalty=p.frequency_penalty or 0.0,
        watermark=p.watermark,
        grammar=grammar[0],
        grammar_type=grammar[1],
    )
