"""The whole product of states: what the table allows happens, everything else is refused and changes nothing."""

from __future__ import annotations

import pytest

from deepseek_tgi.errors import NotReadyError
from deepseek_tgi.probes.state import State, StateOwner, may_move

S = State
# Restated by hand: a process goes forward, may leave at any time, and never comes back from the end.
ALLOWED = {
    *((S.STARTING, S.LOADING), (S.LOADING, S.WARMING), (S.WARMING, S.READY), (S.READY, S.WARMING)),
    *((s, S.DRAINING) for s in (S.STARTING, S.LOADING, S.WARMING, S.READY)),
    *((s, S.FAILED) for s in (S.STARTING, S.LOADING, S.WARMING, S.READY, S.DRAINING)),
    *((S.DRAINING, S.STOPPED), (S.FAILED, S.STOPPED)),
}


@pytest.mark.parametrize("current", State)
@pytest.mark.parametrize("target", State)
def test_every_pair_is_allowed_or_refused(current: State, target: State) -> None:
    assert may_move(current, target) == ((current, target) in ALLOWED)


def owner_at(state: State, seen: list[State]) -> StateOwner:
    owner = StateOwner(seen.append)
    owner.state = state
    return owner


@pytest.mark.parametrize("current", State)
@pytest.mark.parametrize("target", State)
def test_only_changes_are_told(current: State, target: State) -> None:
    seen: list[State] = []
    moved = owner_at(current, seen).move(target)
    assert moved == (current is target or (current, target) in ALLOWED)
    assert seen == ([target] if moved and current is not target else [])


def test_a_call_that_does_not_suit_the_state_is_refused_by_name() -> None:
    owner = owner_at(State.LOADING, [])
    with pytest.raises(NotReadyError, match="the shard is loading; this call needs it to be warming or ready"):
        owner.require(State.WARMING, State.READY)
    owner.require(State.LOADING)
