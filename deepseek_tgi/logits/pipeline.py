"""From raw logits to chosen ids and logprobs: the one place that knows the order of the steps.

calibration, watermark, repetition and frequency penalty, grammar mask, temperature, top-k, top-p, typical-p, choice.
A step touches only the rows of requests that ask for it; a row that asks for nothing is read twice and never written.

Guarantee: a row's result depends on its own logits and state alone, bit for bit, whatever else is in the batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from deepseek_tgi.core import SamplingParams
from deepseek_tgi.kernels.best_token import BestToken, best_token_on
from deepseek_tgi.logits.grammar import Constraint
from deepseek_tgi.logits.penalties import SeenTokens, apply_penalties
from deepseek_tgi.logits.sample import noise_keys, sample_dense, sample_sparse
from deepseek_tgi.logits.warp import apply_temperature, apply_top_k, apply_top_p, apply_typical_p
from deepseek_tgi.logits.watermark import Watermark

MINUS_INFINITY = float("-inf")
SPARE_FOR_TIES = 4
MAX_TOP_TOKENS = 1000
"""Longest list of alternatives: ties at the n-th place are all listed, but not a vocabulary of equals."""

OVERFLOW = "its sampling parameters are too extreme: the scores they give are not finite"

Calibration = Callable[[torch.Tensor], torch.Tensor]
Warper = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def identity(logits: torch.Tensor) -> torch.Tensor:
    """The calibration of a model that has none."""
    return logits


@dataclass(slots=True)
class SamplingState:
    """What choosing one request's tokens needs and remembers; owned by that request, through every batch it is in.

    `length` counts prompt and output tokens, `last_id` is the newest of them.
    """

    params: SamplingParams
    length: int
    last_id: int
    top_n_tokens: int = 0
    seen: SeenTokens | None = None
    constraint: Constraint | None = None

    def accept(self, token_id: int) -> None:
        """Take note of the chosen token."""
        self.length += 1
        self.last_id = token_id
        if self.seen is not None:
            self.seen.add(token_id)
        if self.constraint is not None:
            self.constraint.accept(token_id)


@dataclass(frozen=True, slots=True)
class Choice:
    """Result of a step for n rows. `tops[row]` is `(ids, logprobs)`, best first, for rows that wanted alternatives.

    `token_ids [n] int64` lies on the host and holds `ids`. `failed[row]` says why a row has no valid choice; its id and
    logprob are then meaningless.
    """

    token_ids: torch.Tensor
    ids: list[int]
    logprobs: list[float]
    tops: dict[int, tuple[list[int], list[float]]]
    failed: dict[int, str]


def sampling_state(
    params: SamplingParams, ids: Sequence[int], top_n_tokens: int = 0, constraint: Constraint | None = None
) -> SamplingState:
    """State of a request whose prompt is `ids`; tokens are counted only if a penalty asks for it."""
    penalised = params.repetition_penalty != 1.0 or params.frequency_penalty != 0.0
    seen = SeenTokens(ids) if penalised else None
    return SamplingState(params, len(ids), ids[-1], top_n_tokens, seen, constraint)


class Choosing:
    """A choice on its way: made where the logits are, not read back yet."""

    def __init__(self, columns: torch.Tensor, read: Callable[[list[list[float]]], Choice], back: ReadBack) -> None:
        """`columns [3, n]`: ids, their logprobs and the largest scores; `read` makes a `Choice` of them."""
        self._columns = columns
        self._read = read
        self._back = back

    @property
    def ids(self) -> torch.Tensor:
        """The ids `[n]`, whole numbers of a float type, on the device of the logits; valid ids even of failed rows."""
        return self._columns[0]

    def result(self) -> Choice:
        """Wait for the choice, and for nothing that was launched after it; once."""
        return self._read(self._back.values())


class ReadBack:
    """Numbers on their way from a device: a copy to pinned memory, and the event that says that it is done."""

    def __init__(self) -> None:
        self._host: torch.Tensor | None = None
        self._done: torch.Event | None = None
        self._here: list[list[float]] | None = None

    def begin(self, source: torch.Tensor) -> None:
        """Start; the values of an earlier one are gone, and the source may be written again by what comes after."""
        if source.device.type == "cpu":
            self._here = source.tolist()
            return
        self._here = None
        if self._host is None or self._host.dtype != source.dtype or self._host.shape != source.shape:
            self._host = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
            self._done = torch.Event(source.device)
        assert self._done is not None, "made with the memory"
        self._host.copy_(source, non_blocking=True)
        self._done.record()

    def values(self) -> list[list[float]]:
        """All numbers, once they are here."""
        if self._here is not None:
            return self._here
        assert self._host is not None, "begun"
        assert self._done is not None, "begun"
        self._done.synchronize()
        found: list[list[float]] = self._host.tolist()
        return found


class SamplingPlan:
    """Which rows need which step, worked out once for a list of requests and then run every step.

    Raises nothing: a row that cannot be sampled is reported in `Choice.failed`.
    """

    def __init__(self, states: Sequence[SamplingState], watermark: Watermark, calibration: Calibration) -> None:
        self._states = states
        self._watermark = watermark
        self._calibration = calibration
        params = [s.params for s in states]
        self._watermarked = [i for i, p in enumerate(params) if p.watermark]
        self._penalised = [i for i, s in enumerate(states) if s.seen is not None]
        self._constrained = [i for i, s in enumerate(states) if s.constraint is not None]
        self._topped = [i for i, s in enumerate(states) if s.top_n_tokens > 0]
        self._sampled = [i for i, p in enumerate(params) if p.samples]
        self._cut = [_is_cut(states[i]) for i in self._sampled]
        self._penalties = _columns(params, self._penalised, "repetition_penalty", "frequency_penalty")
        self._warps = _warps(params)
        self._device = torch.device("cpu")
        self._best: BestToken | None = None
        wishing = {*self._watermarked, *self._penalised, *self._constrained, *self._topped, *self._sampled}
        self._plain = torch.tensor([row not in wishing for row in range(len(states))])
        self._all_plain = not wishing
        self._back = ReadBack()

    def run(self, logits: torch.Tensor) -> Choice:
        """Choose a token for each row of raw `logits [n, V] float32`, which may be changed in place."""
        return self.begin(logits).result()

    @property
    def reads_logits_late(self) -> bool:
        """True if the result needs more of the device than the ids and what belongs to them."""
        return bool(self._topped)

    def begin(self, logits: torch.Tensor, best: torch.Tensor | None = None) -> Choosing:
        """As `run`, but the choice need not be read back yet; one at a time.

        All is worked out where the logits are, and the copy of what it came to begins at once. `best` is what
        `best_token` gives for the logits, if that is known.
        """
        if logits.device != self._device:
            self._device = logits.device
            self._best = best_token_on(logits.device)
            self._plain = self._plain.to(logits.device)
            self._warps = [(rows.to(self._device), values.to(self._device), warp) for rows, values, warp in self._warps]
        if self._calibration is not identity:
            logits, best = self._calibration(logits), None
        if best is None and self._best is not None:
            best = self._best(logits)
        if best is not None and self._all_plain:
            return self._choosing(best, {}, None)
        peaks = logits.amax(-1)
        failed: dict[int, str] = {}
        self._edit(logits, failed)
        for rows, values, warp in self._warps:
            if len(rows) == len(logits):
                logits = warp(logits, values)
            else:
                logits[rows] = warp(logits[rows], values)
        logprobs = logits.log_softmax(-1)
        chosen = self._choose(logits, logprobs)
        picked = logprobs.gather(1, chosen.unsqueeze(1)).squeeze(1)
        # float64 holds ids and float32 numbers exactly.
        columns = torch.stack((chosen.double(), picked.double(), peaks.double()))
        if best is not None:  # a row that wishes nothing has the same bits whatever its neighbours wish
            columns = torch.where(self._plain, best.double(), columns)
        return self._choosing(columns, failed, logprobs)

    def _choosing(self, columns: torch.Tensor, failed: dict[int, str], logprobs: torch.Tensor | None) -> Choosing:
        self._back.begin(columns)
        return Choosing(columns, partial(self._finished, failed=failed, logprobs=logprobs), self._back)

    def _finished(self, read: list[list[float]], failed: dict[int, str], logprobs: torch.Tensor | None) -> Choice:
        """The choice of ids, their logprobs and the largest scores of all rows."""
        ids, own = [int(number) if math.isfinite(number) else 0 for number in read[0]], read[1]
        for row, (logprob, peak) in enumerate(zip(own, read[2], strict=True)):
            if not (math.isfinite(peak) and math.isfinite(logprob)):
                model = "the model's logits are not finite"
                failed.setdefault(row, OVERFLOW if math.isfinite(peak) else model)
        tops = {} if logprobs is None or not self._topped else self._top_tokens(logprobs, failed)
        return Choice(torch.tensor(ids), ids, own, tops, failed)

    def _edit(self, logits: torch.Tensor, failed: dict[int, str]) -> None:
        """The steps that change single scores: watermark, penalties, grammar."""
        for row in self._watermarked:
            self._watermark.apply(logits[row], self._states[row].last_id)
        if self._penalised:
            seen = [s for i in self._penalised if (s := self._states[i].seen) is not None]
            repetition, frequency = self._penalties
            apply_penalties(logits, torch.tensor(self._penalised), seen, repetition, frequency)
        for row in self._constrained:
            constraint = self._states[row].constraint
            allowed = None if constraint is None else constraint.allowed(logits.shape[1])
            if allowed is None:
                continue
            if constraint is not None and not allowed.any():
                fault = constraint.fault()
                failed[row] = "the grammar allows no token here" + (f": {fault}" if fault else "")
                continue
            logits[row].masked_fill_(~allowed.to(logits.device, non_blocking=True), MINUS_INFINITY)

    def _choose(self, logits: torch.Tensor, logprobs: torch.Tensor) -> torch.Tensor:
        if not self._sampled:
            return logits.argmax(-1)
        states = [self._states[i] for i in self._sampled]
        keys = noise_keys([s.params.seed for s in states], [s.length for s in states]).to(
            logits.device, non_blocking=True
        )
        dense = [(row, place) for place, row in enumerate(self._sampled) if not self._cut[place]]
        sparse = [(row, place) for place, row in enumerate(self._sampled) if self._cut[place]]
        everyone = len(self._sampled) == len(logits)
        if everyone and not (dense and sparse):
            return (sample_dense if dense else sample_sparse)(logprobs, keys)
        chosen = torch.zeros(len(logits), dtype=torch.int64, device=logits.device) if everyone else logits.argmax(-1)
        for group, draw in ((dense, sample_dense), (sparse, sample_sparse)):
            if group:
                rows, places = (torch.tensor(column, device=logits.device) for column in zip(*group, strict=True))
                chosen[rows] = draw(logprobs[rows], keys[places])
        return chosen

    def _top_tokens(self, logprobs: torch.Tensor, failed: dict[int, str]) -> dict[int, tuple[list[int], list[float]]]:
        wanted = min(max(self._states[i].top_n_tokens for i in self._topped), MAX_TOP_TOKENS)
        most = min(wanted + SPARE_FOR_TIES, logprobs.shape[1])
        everyone = len(self._topped) == len(logprobs)
        best = (logprobs if everyone else logprobs[self._topped]).topk(most)
        tops = {}
        for row, values, ids in zip(self._topped, best.values.tolist(), best.indices.tolist(), strict=True):
            if row not in failed:
                tops[row] = _with_ties(logprobs[row], values, ids, self._states[row].top_n_tokens)
        return tops


def _with_ties(row: torch.Tensor, values: list[float], ids: list[int], n: int) -> tuple[list[int], list[float]]:
    """The n best ids and those that equal the n-th, best first, equal ones by id; cut-off ids never.

    `values`, `ids` are the first few of `row [V]`, largest first.
    """
    threshold = values[min(n, len(values)) - 1]
    if len(values) < len(row) and values[-1] >= threshold > MINUS_INFINITY:
        ids = (row >= threshold).nonzero().flatten().tolist()
        values = row[ids].tolist()
    pairs = sorted((-v, i) for v, i in zip(values, ids, strict=True) if v >= threshold and v > MINUS_INFINITY)
    pairs = pairs[:MAX_TOP_TOKENS]
    return [i for _, i in pairs], [-v for v, _ in pairs]


def _is_cut(state: SamplingState) -> bool:
    """True if most ids are cut off before the draw: it goes by the request alone, so the path never changes."""
    p = state.params
    return p.top_k != 0 or p.top_p < 1.0 or p.typical_p < 1.0 or state.constraint is not None


def _warps(params: Sequence[SamplingParams]) -> list[tuple[torch.Tensor, torch.Tensor, Warper]]:
    top_k = partial(apply_top_k, largest=max((p.top_k for p in params), default=0))
    steps: list[tuple[Warper, list[tuple[int, float]], torch.dtype]] = [
        (apply_temperature, [(i, p.temperature) for i, p in enumerate(params) if p.temperature != 1.0], torch.float32),
        (top_k, [(i, p.top_k) for i, p in enumerate(params) if p.top_k != 0], torch.int64),
        (apply_top_p, [(i, p.top_p) for i, p in enumerate(params) if p.top_p < 1.0], torch.float32),
        (apply_typical_p, [(i, p.typical_p) for i, p in enumerate(params) if p.typical_p < 1.0], torch.float32),
    ]
    return [
        (torch.tensor([row for row, _ in asking]), torch.tensor([value for _, value in asking], dtype=dtype), warp)
        for warp, asking, dtype in steps
        if asking
    ]


def _columns(params: Sequence[SamplingParams], rows: Sequence[int], *names: str) -> list[torch.Tensor]:
    return [torch.tensor([getattr(params[i], name) for i in rows], dtype=torch.float32) for name in names]
