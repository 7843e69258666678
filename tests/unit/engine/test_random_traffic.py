"""Random Prefill, Decode, FilterBatch and ClearCache calls against the definition of greedy decoding."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine_driver import Driver
from scripted import ScriptedAdapter

from deepseek_tgi.core import CachedBatch, Request

TEXTS = ["Hello world", "the stop is", "one two " * 9, "x", "Par" * 30, "é😀 the"]


class Traffic:
    """Plays a router that mixes every call it may make; `live` are its batches, `held` each request's own blocks."""

    def __init__(self, driver: Driver, seed: int) -> None:
        self.driver = driver
        self.rng = random.Random(seed)
        self.live: dict[int, CachedBatch] = {}
        self.requests: dict[int, Request] = {}
        self.stored: list[tuple[str, list[int]]] = []
        self.next_batch = 0

    def step(self) -> None:
        choice = self.rng.random()
        if not self.live or (choice < 0.3 and len(self.driver.free) > 40):
            self.prefill()
        elif choice < 0.75:
            self.decode()
        elif choice < 0.9:
            self.filter()
        else:
            self.clear()

    def request(self) -> Request:
        text = self.rng.choice(TEXTS)
        request = self.driver.request(text, self.rng.randrange(1, 12))
        changes: dict[str, Any] = {}
        prompt = len(self.driver.adapter.tokenizer.encode(text))
        if self.stored and self.rng.random() < 0.4:
            # A claim that may be true, partly true or plainly false.
            _, blocks = self.rng.choice(self.stored)
            whole = min(len(blocks), (prompt - 1) // 16)
            if whole and set(blocks[:whole]) <= set(self.driver.free):
                mine = [*blocks[:whole], *request.blocks[whole:]]
                self.driver.free = [b for b in self.driver.free if b not in mine] + list(request.blocks[:whole])
                slots = tuple(mine[p // 16] * 16 + p % 16 for p in range(len(request.slots)))
                changes = {"blocks": tuple(mine), "slots": slots, "cache_len": 16 * whole}
        if self.rng.random() < 0.3 and prompt - changes.get("cache_len", 0) > 2:
            changes["chunk_len"] = self.rng.randrange(1, prompt - changes.get("cache_len", 0))
        request = replace(request, **changes)
        self.requests[request.id] = request
        return request

    def prefill(self) -> None:
        cached = self.live.pop(self.rng.choice(list(self.live))) if self.live and self.rng.random() < 0.6 else None
        news = [self.request() for _ in range(self.rng.randrange(1, 4))]
        batch_id, self.next_batch = self.next_batch, self.next_batch + 1
        before = {i for b in [cached] if b for i in b.request_ids} | {r.id for r in news}
        self.after(self.driver.prefill(batch_id, *news, cached=cached).batch, before)

    def decode(self) -> None:
        ids = self.rng.sample(list(self.live), min(len(self.live), self.rng.choice([1, 1, 1, 2])))
        before = {i for batch_id in ids for i in self.live.pop(batch_id).request_ids}
        self.after(self.driver.decode(*ids).batch, before)

    def after(self, batch: CachedBatch | None, before: set[int]) -> None:
        left = set(batch.request_ids) if batch else set()
        assert left == {i for i in before if not (i in self.driver.results and self.driver.results[i].done)}
        for request_id in before - left:
            self.release(request_id)
        if batch:
            assert batch.size == len(batch.request_ids) > 0
            self.live[batch.id] = batch

    def filter(self) -> None:
        batch = self.live[self.rng.choice(list(self.live))]
        keep = self.rng.sample(batch.request_ids, self.rng.randrange(1, batch.size + 1))
        self.live[batch.id] = self.driver.engine.filter(batch.id, keep)
        assert self.live[batch.id].request_ids == tuple(keep)
        for request_id in set(batch.request_ids) - set(keep):
            self.release(request_id)

    def clear(self) -> None:
        batch = self.live.pop(self.rng.choice(list(self.live)))
        self.driver.engine.clear(batch.id)
        for request_id in batch.request_ids:
            self.release(request_id)

    def release(self, request_id: int) -> None:
        """Blocks are free at once for others, and may be claimed as a prefix later."""
        request = self.requests[request_id]
        self.stored = [*self.stored[-5:], (request.text, list(request.blocks))]
        self.driver.free += request.blocks
        self.rng.shuffle(self.driver.free)


@pytest.mark.parametrize("ahead", ["as asked", "a step ahead", "tokens unread"])
@pytest.mark.parametrize("seed", range(6))
def test_random_calls_give_every_request_its_text_and_leak_nothing(tmp_path: Path, seed: int, ahead: str) -> None:
    adapter = ScriptedAdapter.in_folder(tmp_path)
    adapter.takes_unread = ahead == "tokens unread"
    driver = Driver(adapter)
    runner = driver.engine._runner
    assert runner is not None
    runner._runs_ahead = ahead != "as asked"
    traffic = Traffic(driver, seed)
    for _ in range(200):
        traffic.step()
        assert len(driver.engine._store) == len(traffic.live)
    checked = 0
    for request_id, found in driver.results.items():
        wanted = driver.adapter.greedy(traffic.requests[request_id].text, len(found.ids))
        assert found.ids == wanted
        checked += len(wanted)
    assert checked > 300
    driver.engine.clear(None)
    assert len(driver.engine._store) == 0
