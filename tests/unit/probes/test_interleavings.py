"""Loader, prober and dispatcher around one owner, in every order in which their steps can come.

The owner is the real one; the three who use it are the plainest that keep its rules: a dispatcher that decides by *one*
snapshot, a loader that unloads a model only when nothing runs on it. A dispatcher that reads twice is shown to be
caught. States already explored are not explored again, so the orders are all covered although few are walked.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from deepseek_tgi.probes.owner import Owner
from deepseek_tgi.probes.report import Admission
from deepseek_tgi.probes.state import Event, State

TOKENS = 2
"""Steps of a request; each is answered by the model that took it."""


@dataclass
class Wish:
    """A request from arrival to its one end."""

    state: str = "arriving"  # then held or running, then answered or refused
    generation: int | None = None
    answered_by: list[int] = field(default_factory=list)
    ends: int = 0
    admitted_by_first_read: bool = False

    def key(self) -> object:
        return self.state, self.generation, tuple(self.answered_by), self.ends, self.admitted_by_first_read


class World:
    """What the three share. `steps()` are those that can come next, each atomic as `apply` and one read are."""

    def __init__(self, script: list[str], wishes: int, reads_twice: bool) -> None:
        self.owner = Owner(lambda: 0.0)
        self.loaded: set[int] = {1}
        self.script = script
        self.done = 0
        self.wishes = [Wish() for _ in range(wishes)]
        self.probes = 2
        self.reads_twice = reads_twice
        for event in (Event.LOAD, Event.LOADED, Event.WARMED):
            self.owner.apply(event, generation=1)

    def running(self, generation: int) -> int:
        return sum(wish.state == "running" and wish.generation == generation for wish in self.wishes)

    def key(self) -> object:
        now = self.owner.current
        wishes = tuple(wish.key() for wish in self.wishes)
        return now.state, now.facts.generation, frozenset(self.loaded), self.done, self.probes, wishes

    def steps(self) -> Iterator[Callable[[], None]]:
        if self.done < len(self.script) and self._loader_may(self.script[self.done]):
            yield self._load
        for wish in self.wishes:
            if wish.state == "arriving" or (wish.state == "held" and self._admission() is not Admission.HOLD):
                yield lambda w=wish: self._dispatch(w)  # type: ignore[misc]
            elif wish.state == "held":
                yield lambda w=wish: self._end(w, "refused")  # type: ignore[misc]  # its time is over
            elif wish.state == "running":
                yield lambda w=wish: self._token(w)  # type: ignore[misc]
        if self.probes:
            yield self._probe

    def check(self) -> None:
        now = self.owner.current
        assert not (now.report.ready and now.state in {State.LOADING, State.WARMING}), "ready while loading"
        assert self.owner.admits == now.report.admits == (now.state in {State.READY, State.DEGRADED})
        if now.report.admits:
            assert now.facts.generation in self.loaded, "work is admitted for a model that is not there"
        for wish in self.wishes:
            assert len(set(wish.answered_by)) <= 1, "two models answered one request"
            assert wish.ends <= 1, "a request ended twice"
            if wish.state == "running":
                assert wish.generation in self.loaded, "a request runs on a model that is gone"

    def check_end(self) -> None:
        assert [wish.ends for wish in self.wishes] == [1] * len(self.wishes), "a request never ended"
        assert all(len(w.answered_by) == (TOKENS if w.state == "answered" else 0) for w in self.wishes)

    # --- the three --------------------------------------------------------------------------------------------------

    def _loader_may(self, step: str) -> bool:
        return not (step.startswith("drop ") and self.running(int(step.split()[1])))

    def _load(self) -> None:
        word, _, number = self.script[self.done].partition(" ")
        self.done += 1
        if word == "drop":
            self.loaded.discard(int(number))
        elif word == "make":
            self.loaded.add(int(number))
        else:
            assert self.owner.apply(Event(word), generation=int(number) if number else None), word

    def _probe(self) -> None:
        """What a probe answers must hold when it answers."""
        self.probes -= 1
        now = self.owner.current
        assert not now.report.ready or now.facts.generation in self.loaded

    def _admission(self) -> Admission:
        return self.owner.current.report.admission

    def _dispatch(self, wish: Wish) -> None:
        if self.reads_twice and not wish.admitted_by_first_read:
            wish.admitted_by_first_read = self.owner.admits
            if wish.admitted_by_first_read:
                return  # the second read comes in a step of its own
        now = self.owner.current
        admission = Admission.ADMIT if wish.admitted_by_first_read else now.report.admission
        if admission is Admission.HOLD:
            wish.state = "held"
        elif admission is Admission.REFUSE:
            self._end(wish, "refused")
        else:
            wish.state, wish.generation = "running", now.facts.generation

    def _token(self, wish: Wish) -> None:
        assert wish.generation is not None
        wish.answered_by.append(wish.generation)
        if len(wish.answered_by) == TOKENS:
            self._end(wish, "answered")

    def _end(self, wish: Wish, state: str) -> None:
        wish.state = state
        wish.ends += 1


SCRIPTS = {
    "beside": ["make 2", "swapped 2", "drop 1"],
    "in place": ["load 2", "drop 1", "progress", "make 2", "loaded", "warmed"],
    "in place, failing, and back": [
        *("load 2", "drop 1", "progress", "fall_back 1", "make 1", "loaded", "warmed"),
    ],
    "in place, failing for good": ["load 2", "drop 1", "load_failed"],
    "unloaded, and another loaded": ["unload", "drop 1", "unloaded", "load 2", "make 2", "loaded", "warmed"],
    "asleep and awake": ["unload", "drop 1", "slept", "wake", "make 1", "loaded", "warmed"],
    "degraded meanwhile": ["degrade", "make 2", "swapped 2", "drop 1", "recover"],
    "stopped in the middle": ["load 2", "drop 1", "stop", "stopped"],
    "twice": ["make 2", "swapped 2", "drop 1", "load 3", "drop 2", "make 3", "loaded", "warmed"],
}


def explore(script: list[str], wishes: int, reads_twice: bool = False) -> int:
    """Walk every order once for each state it leads through; how many states there are."""
    seen: set[object] = set()
    frontier: list[tuple[int, ...]] = [()]
    while frontier:
        path = frontier.pop()
        world = World(script, wishes, reads_twice)
        for choice in path:
            list(world.steps())[choice]()
        world.check()
        if world.key() in seen:
            continue
        seen.add(world.key())
        choices = len(list(world.steps()))
        if not choices:
            assert world.done == len(script), "the loader waits for ever"
            world.check_end()
        frontier += [(*path, choice) for choice in range(choices)]
    return len(seen)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_in_every_order_each_request_has_one_model_and_one_end(script: list[str]) -> None:
    assert explore(script, wishes=3) > 100


@pytest.mark.parametrize("name", ["in place", "unloaded, and another loaded"])
def test_a_dispatcher_that_reads_twice_is_caught(name: str) -> None:
    with pytest.raises(AssertionError, match=r"a model that is (gone|not there)"):
        explore(SCRIPTS[name], wishes=1, reads_twice=True)
