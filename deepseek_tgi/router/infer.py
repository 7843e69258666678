"""From a request to its tokens: permits, validation, queueing, and the splitting of long generations.

Splitting: the shard is first asked for at most 1024 new tokens, so that blocks are reserved for what comes soon and not
for what might come. When a piece ends by length and more is wanted, its text joins the prompt and the generation goes
on as a new entry with the same seed. Where this differs from TGI's router, on purpose: `max_new_tokens` is honoured
exactly (TGI overshoots to a multiple of 1024); a piece that would pass `max_total_tokens` is shortened to what fits;
and each further piece is as long as the output so far, so that re-tokenising costs time in proportion to the text and
not to its square.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass

from deepseek_tgi.errors import DeepseekTgiError, OverloadedError
from deepseek_tgi.pb import generate_pb2 as pb
from deepseek_tgi.router.entry import Delivery, Entry, Job, Mailbox
from deepseek_tgi.router.errors import FailureLabel, ValidationError
from deepseek_tgi.router.metrics import RouterMetrics
from deepseek_tgi.router.requests import GenerateRequest
from deepseek_tgi.router.scheduler import Scheduler
from deepseek_tgi.router.tokens import FINISH_REASONS, Ending, Token, TokenEvent, sorted_tops, tokens_of
from deepseek_tgi.router.validation import PIECE_TOKENS, Validated, Validator
from deepseek_tgi.text.detokenize import REPLACEMENT


@dataclass(frozen=True, slots=True)
class Timing:
    """Moments of a generation, monotonic seconds."""

    arrived: float
    queued: float
    admitted: float


@dataclass(frozen=True, slots=True)
class Generated:
    """A whole generation. `prefill` is empty unless prompt logprobs were asked for and delivered."""

    ending: Ending
    tokens: list[Token]
    top_tokens: list[list[Token]]
    prefill: list[Token]
    input_length: int
    timing: Timing


class Permits:
    """Owner of the places for generations; a place is held as long as its `TokenStream` is open."""

    def __init__(self, limit: int, metrics: RouterMetrics) -> None:
        self._limit = limit
        self._taken = 0
        self._metrics = metrics
        metrics.gauge("deepseek_tgi_requests_in_flight", 0)

    @property
    def taken(self) -> int:
        """Generations in flight."""
        return self._taken

    def take(self) -> Callable[[], None]:
        """Take a place and return what gives it back. Raises `OverloadedError` at once if there is none."""
        if self._taken >= self._limit:
            raise OverloadedError("Model is overloaded")
        self._taken += 1
        self._metrics.gauge("deepseek_tgi_requests_in_flight", self._taken)
        held = True

        def give_back() -> None:
            nonlocal held
            if held:
                held = False
                self._taken -= 1
                self._metrics.gauge("deepseek_tgi_requests_in_flight", self._taken)

        return give_back


class TokenStream:
    """The tokens of one generation, for one reader. Holds a permit and an entry until `close`, at whatever moment."""

    def __init__(self, infer: Infer, request: GenerateRequest, give_back: Callable[[], None]) -> None:
        self._infer = infer
        self._request = request
        self._give_back = give_back
        self._entry: Entry | None = None
        self._done = False
        self._text = ""
        self._generated = 0
        self._wanted = 0
        self.input_length = 0
        self.prefill: list[Token] = []
        self.timing = Timing(arrived=time.monotonic(), queued=0.0, admitted=0.0)

    async def start(self) -> None:
        """Validate and queue."""
        arrived = self.timing.arrived
        valid = await self._infer.validator.validate(self._request)
        self.input_length = valid.input_length
        self._wanted = valid.wanted_tokens
        self._entry = self._infer.scheduler.submit(valid.job)
        queued = time.monotonic()
        self.timing = Timing(arrived, queued, queued)
        self._infer.note_validated(valid, queued - arrived)

    @property
    def finished(self) -> bool:
        """True once the event with the ending was read."""
        return self._done

    async def read(self) -> list[TokenEvent]:
        """Wait for at least one event and return all there are. Raises what ended the generation early."""
        events: list[TokenEvent] = []
        while not events:
            await self._take(await self._mailbox.take(), events)
        while not self._done and (item := self._mailbox.take_nowait()) is not None:
            if isinstance(item, DeepseekTgiError):
                self._mailbox.put(item)  # what came before it is delivered first
                break
            await self._take(item, events)
        return events

    @property
    def _mailbox(self) -> Mailbox:
        assert self._entry is not None
        return self._entry.mailbox

    def close(self) -> None:
        """Give up what is still running and return the permit."""
        self._give_back()
        if self._entry is not None and not self._done:
            self._entry.cancel()
        self._done = True

    async def _take(self, item: Delivery, events: list[TokenEvent]) -> None:
        if isinstance(item, DeepseekTgiError):
            self._done = True
            raise item
        assert self._entry is not None
        if item.HasField("prefill_tokens"):
            self.prefill = tokens_of(item.prefill_tokens)
        if not self._generated:
            self.timing = Timing(self.timing.arrived, self.timing.queued, self._entry.admitted_at)
        tokens = tokens_of(item.tokens)
        self._infer.metrics.observe("tgi_request_skipped_tokens", len(tokens) - 1)
        tops = [sorted_tops(t) for t in item.top_tokens] if item.top_tokens else []
        self._generated += len(tokens)
        ending = await self._ending(item.generated_text) if item.HasField("generated_text") else None
        last = len(tokens) - 1
        for i, token in enumerate(tokens):
            events.append(TokenEvent(token, tops[i] if i < len(tops) else [], ending if i == last else None))

    async def _ending(self, piece: pb.GeneratedText) -> Ending | None:
        """The ending, or None if the generation went on with a further piece."""
        if piece.finish_reason == pb.FINISH_REASON_LENGTH and self._generated < self._wanted:
            whole = piece.text.rstrip(REPLACEMENT)  # a character that the cut went through is written anew
            job = await self._next_job(whole)
            if job is not None:
                self._text += whole
                self._entry = self._infer.scheduler.submit(job)
                return None
        self._text += piece.text
        self._done = True
        reason = FINISH_REASONS.get(piece.finish_reason, "length")
        seed = piece.seed if piece.HasField("seed") else None
        ending = Ending(self._text, self._generated, reason, seed)
        self._infer.note_finished(self, ending)
        return ending

    async def _next_job(self, written: str) -> Job | None:
        """The job of the next piece; None if the limits leave no room for one."""
        assert self._entry is not None
        job, limits = self._entry.job, self._infer.validator.limits
        text = job.text + written
        truncate = self._request.parameters.truncate
        try:
            ids = await self._infer.validator.encode(text, job.add_special_tokens, truncate)
        except ValidationError:
            return None
        room = min(self._wanted - self._generated, limits.max_total_tokens - len(ids))
        length = min(room, max(PIECE_TOKENS, self._generated))
        if length < 1 or len(ids) > limits.max_input_tokens:
            return None
        return dataclasses.replace(job, text=text, input_ids=ids, max_new_tokens=length)


class Infer:
    """The door's one way to generate."""

    def __init__(self, validator: Validator, scheduler: Scheduler, permits: Permits, metrics: RouterMetrics) -> None:
        self.validator = validator
        self.scheduler = scheduler
        self.permits = permits
        self.metrics = metrics

    async def open(self, request: GenerateRequest) -> TokenStream:
        """Start a generation; the caller must `close` the stream whatever happens.

        Raises: `OverloadedError` if there is no permit, `ValidationError` for a broken rule.
        """
        self.metrics.count("tgi_request_count")  # before all refusals, so that failures are a share of it
        stream = TokenStream(self, request, self.permits.take())
        try:
            await stream.start()
        except BaseException:
            stream.close()
            raise
        return stream

    async def generate(self, request: GenerateRequest) -> Generated:
        """A whole generation."""
        stream = await self.open(request)
        try:
            events: list[TokenEvent] = []
            while not stream.finished:
                events += await stream.read()
        finally:
            stream.close()
        ending = events[-1].ending
        assert ending is not None
        return Generated(
            ending=ending,
            tokens=[event.token for event in events],
            top_tokens=[event.top_tokens for event in events if event.top_tokens],
            prefill=stream.prefill,
            input_length=stream.input_length,
            timing=stream.timing,
        )

    def note_validated(self, valid: Validated, seconds: float) -> None:
        """Count what a request asks."""
        self.metrics.observe("tgi_request_validation_duration", seconds)
        self.metrics.observe("tgi_request_input_length", valid.input_length)
        self.metrics.observe("tgi_request_max_new_tokens", valid.wanted_tokens)

    def note_finished(self, stream: TokenStream, ending: Ending) -> None:
        """Count a generation that ended well."""
        now = time.monotonic()
        timing = stream.timing
        inference = now - timing.admitted
        self.metrics.count("tgi_request_success")
        self.metrics.observe("tgi_request_duration", now - timing.arrived)
        self.metrics.observe("tgi_request_queue_duration", timing.admitted - timing.queued)
        self.metrics.observe("tgi_request_inference_duration", inference)
        self.metrics.observe("tgi_request_mean_time_per_token_duration", inference / ending.generated_tokens)
        self.metrics.observe("tgi_request_generated_tokens", ending.generated_tokens)

    def note_failed(self, error: DeepseekTgiError) -> None:
        """Count a request that was refused or failed, by reason."""
        label = FailureLabel.BY_TYPE.get(error.error_type)
        if label is not None:
            self.metrics.count("tgi_request_failure", label=f'err="{label}"')
