"""One owner: facts, journal, late subscribers, and threads that all apply at once."""

from __future__ import annotations

import logging
import threading

import pytest

from deepseek_tgi.errors import NotReadyError
from deepseek_tgi.probes.owner import Owner
from deepseek_tgi.probes.state import Event, State

E, S = Event, State


class Clock:
    """A clock moved by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def ready_owner(kept: int = 256) -> Owner:
    owner = Owner(Clock(), kept)
    for event in (E.LOAD, E.LOADED, E.WARMED):
        assert owner.apply(event)
    return owner


def test_a_refused_event_changes_nothing() -> None:
    owner = ready_owner()
    before = owner.current
    assert not owner.apply(E.WARMED, reason="again")
    assert owner.current is before
    assert [increment.seq for increment in owner.history()] == [1, 2, 3]


def test_facts_follow_the_state() -> None:
    clock = Clock()
    owner = Owner(clock)
    owner.apply(E.LOAD, model="a", generation=1, stage="reading", percent=0.0)
    clock.now = 105.0
    owner.apply(E.PROGRESS, percent=40.0)
    loading = owner.current
    assert (loading.state, loading.since, loading.seq) == (S.LOADING, 100.0, 2)
    assert (loading.facts.stage, loading.facts.percent, loading.facts.model) == ("reading", 40.0, "a")
    owner.apply(E.LOADED)
    assert (owner.current.since, owner.current.facts.stage, owner.current.facts.percent) == (105.0, None, None)
    owner.apply(E.WARMED)
    owner.apply(E.DEGRADE, reason="a step failed")
    assert owner.current.facts.reason == "a step failed"
    owner.apply(E.RECOVER)
    well = owner.current.facts
    assert (well.reason, well.model, well.generation) == (None, "a", 1)
    owner.apply(E.SWAPPED, model="b", generation=2)
    assert (owner.state, owner.current.facts.model, owner.current.facts.generation) == (S.READY, "b", 2)
    owner.apply(E.UNLOAD)
    owner.apply(E.UNLOADED)
    assert (owner.current.facts.model, owner.current.facts.generation) == (None, None)


def test_a_fall_back_forgets_how_far_the_failed_load_was() -> None:
    owner = ready_owner()
    owner.apply(E.LOAD, stage="reading", percent=80.0, model="new")
    owner.apply(E.FALL_BACK, model="old", reason="new is truncated")
    facts = owner.current.facts
    assert (facts.stage, facts.percent, facts.model, facts.reason) == (None, None, "old", "new is truncated")


def test_it_has_started_once_it_was_ready() -> None:
    owner = Owner()
    assert not owner.current.report.started
    for event in (E.LOAD, E.LOADED, E.WARMED, E.LOAD):
        owner.apply(event)
    assert owner.state is S.LOADING
    assert owner.current.report.started


def test_a_call_that_does_not_suit_the_state_is_refused_by_name() -> None:
    owner = Owner()
    owner.apply(E.LOAD)
    with pytest.raises(NotReadyError, match="the shard is loading; this call needs it to be warming or ready"):
        owner.require(S.WARMING, S.READY)
    owner.require(S.LOADING)
    owner.apply(E.FAIL, reason="the disk is full")
    with pytest.raises(NotReadyError, match="the shard is failed: the disk is full; this call needs it to be ready"):
        owner.require_admission()


def test_a_subscriber_gets_a_snapshot_and_then_every_change() -> None:
    owner = Owner(Clock())
    woken: list[int] = []
    subscription = owner.subscribe(lambda: woken.append(owner.current.seq))
    first = subscription.take()
    assert first.snapshot is not None
    assert (first.snapshot.state, first.increments) == (S.STARTING, ())
    owner.apply(E.LOAD)
    owner.apply(E.LOADED)
    assert woken == [1, 2]
    later = subscription.take()
    assert later.snapshot is None
    assert [(i.seq, i.before, i.event, i.after.state) for i in later.increments] == [
        (1, S.STARTING, E.LOAD, S.LOADING),
        (2, S.LOADING, E.LOADED, S.WARMING),
    ]
    assert subscription.take().increments == ()
    subscription.close()
    owner.apply(E.WARMED)
    assert woken == [1, 2]


@pytest.mark.parametrize(("from_seq", "seqs"), [(0, [1, 2, 3]), (1, [2, 3]), (3, [])])
def test_a_late_subscriber_catches_up_from_where_it_was(from_seq: int, seqs: list[int]) -> None:
    missed = ready_owner().subscribe(lambda: None, from_seq).take()
    assert missed.snapshot is None
    assert [increment.seq for increment in missed.increments] == seqs


@pytest.mark.parametrize("from_seq", [0, 99])
def test_one_that_is_too_late_or_from_another_life_gets_a_snapshot(from_seq: int) -> None:
    owner = ready_owner(kept=2)
    missed = owner.subscribe(lambda: None, from_seq).take()
    assert missed.snapshot is owner.current
    assert missed.increments == ()


def test_changes_are_told_in_order_whichever_thread_makes_them() -> None:
    owner = ready_owner(kept=100_000)
    subscription = owner.subscribe(lambda: None, owner.current.seq)
    taken: list[bool] = []

    def flap(event: Event) -> None:
        for _ in range(2000):
            taken.append(owner.apply(event))

    logging.disable(logging.CRITICAL)
    try:
        threads = [threading.Thread(target=flap, args=(event,)) for event in (E.DEGRADE, E.RECOVER) * 2]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        logging.disable(logging.NOTSET)
    increments = subscription.take().increments
    assert len(increments) == taken.count(True)
    assert [increment.seq for increment in increments] == list(range(4, 4 + len(increments)))
    states = [increment.after.state for increment in increments]
    assert states == [(S.DEGRADED, S.READY)[i % 2] for i in range(len(states))]
    assert owner.admits
