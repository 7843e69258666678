"""Steps for a router that knows one model only, across a change of it.

TGI's router goes on filling one running batch for ever, so there is no moment at which all of it could change model.
Choice: a batch may have parts, each with the model that its requests began with; a call steps every part and answers as
one. New requests begin with the published model. Prevents: a request whose tokens come from two models, and a change
that waits for a pause which load never gives. Rejected: running the old batch to its end first, during which the router
would see no new request admitted.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from deepseek_tgi.core import CachedBatch, Request, StepResult, StepTimings
from deepseek_tgi.server.engine_api import EngineApi
from deepseek_tgi.server.models import Models

Part = tuple[EngineApi, int]
"""A model, and its own id of the requests it has in a batch."""


class Mixture:
    """The engine's calls over all models that are held. Runs in the engine's thread."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._parts: dict[int, list[Part]] = {}

    def prefill(self, batch_id: int, requests: list[Request], cached: CachedBatch | None) -> StepResult:
        """See `Engine.prefill`."""
        newest = self._newest()
        if cached is None:
            self._forget(batch_id)
            return newest.prefill(batch_id, requests, None)
        parts = self._parts_of(cached.id)
        self._parts.pop(cached.id, None)
        joined = next((part for part in parts if part[0] is newest), None)
        others = [part for part in parts if part is not joined]
        if not others:
            return newest.prefill(batch_id, requests, cached)
        own = None if joined is None else CachedBatch(joined[1], (), 0, 0)
        with _all_or_none([*parts, (newest, batch_id)]):
            results = [(engine, engine.decode([inner])) for engine, inner in others]
            results.append((newest, newest.prefill(batch_id, requests, own)))
        return self._joined(cached.id, results)

    def decode(self, batch_ids: list[int]) -> StepResult:
        """See `Engine.decode`."""
        if not batch_ids:
            return self._newest().decode(batch_ids)
        by_engine: dict[int, tuple[EngineApi, list[int]]] = {}
        for batch_id in batch_ids:
            for engine, inner in self._parts_of(batch_id):
                by_engine.setdefault(id(engine), (engine, []))[1].append(inner)
            self._parts.pop(batch_id, None)
        with _all_or_none([(engine, one) for engine, inner in by_engine.values() for one in inner]):
            results = [(engine, engine.decode(inner)) for engine, inner in by_engine.values()]
        return results[0][1] if len(results) == 1 else self._joined(batch_ids[0], results)

    def filter(self, batch_id: int, request_ids: list[int]) -> CachedBatch:
        """See `Engine.filter`."""
        parts = self._parts_of(batch_id)
        if len(parts) == 1 and parts[0][1] == batch_id:
            return parts[0][0].filter(batch_id, request_ids)
        kept: list[tuple[Part, CachedBatch]] = []
        for engine, inner in parts:
            mine = [request for request in request_ids if request in engine.requests_of(inner)]
            if mine:
                kept.append(((engine, inner), engine.filter(inner, mine)))
            else:
                engine.clear(inner)
        self._parts[batch_id] = [part for part, _ in kept]
        return _one(batch_id, [batch for _, batch in kept], tuple(request_ids))

    def clear(self, batch_id: int | None) -> None:
        """See `Engine.clear`."""
        if batch_id is None:
            self._parts.clear()
            for held in self._models.all():
                if held.engine is not None:
                    held.engine.clear(None)
        else:
            self._forget(batch_id)

    def _newest(self) -> EngineApi:
        return self._models.of(None).awake

    def _parts_of(self, batch_id: int) -> list[Part]:
        # If nobody has it, the published model says so in its own words.
        return self._holders(batch_id) or [(self._newest(), batch_id)]

    def _holders(self, batch_id: int) -> list[Part]:
        if batch_id in self._parts:
            return self._parts[batch_id]
        engines = [held.engine for held in self._models.all() if held.engine is not None]
        return [(engine, batch_id) for engine in engines if engine.holds(batch_id)]

    def _forget(self, batch_id: int) -> None:
        for engine, inner in self._holders(batch_id):
            engine.clear(inner)
        self._parts.pop(batch_id, None)

    def _joined(self, batch_id: int, results: list[tuple[EngineApi, StepResult]]) -> StepResult:
        going_on = [(engine, result.batch) for engine, result in results if result.batch is not None]
        if going_on:
            self._parts[batch_id] = [(engine, batch.id) for engine, batch in going_on]
        timings = [result.timings for _, result in results]
        concat = [timing.concat_ns for timing in timings if timing.concat_ns is not None]
        batches = [batch for _, batch in going_on]
        return StepResult(
            [generation for _, result in results for generation in result.generations],
            _one(batch_id, batches, tuple(i for batch in batches for i in batch.request_ids)) if batches else None,
            StepTimings(
                sum(timing.forward_ns for timing in timings),
                sum(timing.decode_ns for timing in timings),
                sum(timing.total_ns for timing in timings),
                sum(concat) if concat else None,
            ),
        )


@contextmanager
def _all_or_none(parts: list[Part]) -> Iterator[None]:
    """Where one part of a call fails the router counts all of it as gone, and so must the others."""
    try:
        yield
    except BaseException:
        for engine, inner in parts:
            engine.clear(inner)
        raise


def _one(batch_id: int, batches: list[CachedBatch], request_ids: tuple[int, ...]) -> CachedBatch:
    return CachedBatch(
        batch_id,
        request_ids,
        sum(batch.max_tokens for batch in batches),
        sum(batch.current_tokens for batch in batches),
    )
