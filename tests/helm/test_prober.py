"""The prober that stands in for a kubelet, held to what Kubernetes documents and its own worker does."""

from __future__ import annotations

from dataclasses import replace

import pytest
from kubelet_prober import Container, Probe, Result, Worker

OK, NO = Result.SUCCESS, Result.FAILURE


def worker(kind: str, **spec: int) -> Worker:
    return Worker(kind, Probe(spec, {}, {}))


def results(tested: Worker, container: Container, answers: list[Result | None]) -> list[Result]:
    """What stands after each answer."""
    found = []
    for answer in answers:
        assert tested.step(container, [answer].pop)
        found.append(tested.result)
    return found


@pytest.mark.parametrize(
    ("kind", "started", "spec", "answers", "expected"),
    [
        # Readiness starts as a failure, liveness as a success.
        ("readiness", True, {}, [None, OK], [NO, OK]),
        ("liveness", True, {}, [None, OK], [OK, OK]),
        # Only a run of failures counts, three by default; an error is no answer and breaks no run.
        ("liveness", True, {}, [NO, NO, OK, NO, NO, NO], [OK, OK, OK, OK, OK, NO]),
        ("liveness", True, {"failureThreshold": 2}, [NO, None, NO], [OK, OK, NO]),
        ("readiness", True, {"successThreshold": 2}, [OK, OK, NO, NO, NO], [NO, OK, OK, OK, NO]),
        # After a failure of liveness it asks no more: the container is about to be killed.
        ("liveness", True, {"failureThreshold": 1}, [NO, OK, OK], [NO, NO, NO]),
        # Nobody but the startup probe asks before it has succeeded, and it never asks afterwards.
        ("readiness", False, {}, [OK, OK], [NO, NO]),
        ("liveness", False, {"failureThreshold": 1}, [NO, NO], [OK, OK]),
        ("startup", False, {"failureThreshold": 2}, [NO, NO], [Result.UNKNOWN, NO]),
        ("startup", True, {"failureThreshold": 1}, [NO, NO], [Result.UNKNOWN, Result.UNKNOWN]),
    ],
)
def test_runs_of_answers(
    kind: str, started: bool, spec: dict[str, int], answers: list[Result | None], expected: list[Result]
) -> None:
    container = Container(number=1, running=True, started=started)
    assert results(worker(kind, **spec), container, answers) == expected


def test_a_new_container_is_judged_anew() -> None:
    container = Container(number=1, running=True, started=True)
    tested = worker("liveness", failureThreshold=1)
    assert results(tested, container, [NO]) == [NO]
    assert results(tested, replace(container, number=2), [None, OK, NO]) == [OK, OK, NO]


def test_a_container_that_has_ended_is_not_ready() -> None:
    container = Container(number=1, running=True, started=True)
    tested = worker("readiness")
    assert results(tested, container, [OK]) == [OK]
    assert results(tested, replace(container, running=False), [OK]) == [NO]


def test_a_pod_that_leaves_is_asked_for_readiness_alone() -> None:
    container = Container(number=1, running=True, started=True, deleted=True)
    liveness, readiness = worker("liveness", failureThreshold=1), worker("readiness", failureThreshold=1)
    assert not liveness.step(container, lambda: NO)
    assert liveness.result is OK
    assert results(readiness, container, [OK, NO]) == [OK, NO]
