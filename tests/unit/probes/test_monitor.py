"""The monitor on a clock moved by hand: what is held against a thread, and what is not."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from deepseek_tgi.probes.checks import Check
from deepseek_tgi.probes.monitor import Monitor, MonitorLimits
from deepseek_tgi.probes.owner import Owner
from deepseek_tgi.probes.progress import Progress
from deepseek_tgi.probes.state import Event
from deepseek_tgi.probes.thread_watch import ThreadWatch
from deepseek_tgi.probes.threshold import Threshold

LIMITS = MonitorLimits(stall_limit_s=30.0)


class ByHand(Progress):
    """A thread's signs, made by the test; `cpu` None is a clock that cannot be read."""

    def __init__(self, bench: Bench) -> None:
        super().__init__(lambda: bench.now)
        self.cpu: float | None = 0.0

    def adopt(self) -> None:
        return

    def cpu_seconds(self) -> float | None:
        return self.cpu


class Bench:
    """A monitor and the thread it watches. `answers` says whether the idle thread answers no-ops."""

    def __init__(self, *checks: Check, started: bool = True) -> None:
        self.now = 1000.0
        self.progress = ByHand(self)
        self.answers = True
        self.owner = Owner(lambda: self.now)
        for event in (Event.LOAD, Event.LOADED, *((Event.WARMED,) if started else ())):
            self.owner.apply(event)
        watch = ThreadWatch("engine", self.progress, self.noop)
        self.monitor = Monitor(self.owner, (watch,), checks, LIMITS, lambda: self.now)
        self.monitor.tick()

    def noop(self) -> Future[None]:
        answer: Future[None] = Future()
        if self.answers:
            self.progress.begin("")
            self.progress.end()
            answer.set_result(None)
        return answer

    def wait(self, seconds: float, cpu: float = 0.0, stamps: bool = False) -> None:
        """Time goes by, a look each tenth of a second; `cpu` is what share of it the thread computes."""
        for _ in range(round(seconds * 10)):
            self.now += 0.1
            if self.progress.cpu is not None:
                self.progress.cpu += 0.1 * cpu
            if stamps:
                self.progress.step()
            self.monitor.tick()

    @property
    def state(self) -> str:
        return self.owner.state.value


def test_an_idle_thread_that_answers_is_well_for_ever() -> None:
    bench = Bench()
    bench.wait(100)
    assert bench.state == "ready"
    assert len(bench.owner.history()) == 3


def test_a_step_that_stands_still_is_seen_within_a_second_and_killed_at_the_limit() -> None:
    bench = Bench()
    bench.progress.begin("Decode")
    bench.wait(0.5)
    assert bench.state == "ready"
    bench.wait(0.4)
    assert bench.state == "degraded"
    assert "the engine thread, in Decode, has stood still for" in str(bench.owner.current.facts.reason)
    bench.wait(28.5)
    assert bench.state == "degraded"
    bench.wait(1)
    assert bench.state == "failed"
    assert bench.owner.current.facts.reason == "the engine thread, in Decode, made no progress for 30 s"


def test_a_step_that_comes_back_before_the_limit_recovers() -> None:
    bench = Bench()
    bench.progress.begin("Decode")
    bench.wait(10)
    assert bench.state == "degraded"
    bench.progress.end()
    bench.wait(0.1)
    assert bench.state == "ready"


def test_a_long_prefill_that_computes_is_work() -> None:
    bench = Bench()
    bench.progress.begin("Prefill")
    bench.wait(29, cpu=1.0)
    bench.progress.step()
    bench.wait(29, cpu=0.05)
    assert bench.state == "ready"
    bench.wait(600, cpu=1.0, stamps=True)
    assert bench.state == "ready"


def test_a_thread_that_computes_and_gets_nowhere_is_stuck() -> None:
    bench = Bench()
    bench.progress.begin("Prefill")
    bench.wait(29.8, cpu=1.0)
    assert bench.state == "ready"
    bench.wait(0.5, cpu=1.0)
    assert bench.state == "failed"


def test_a_thread_that_only_polls_stands_still() -> None:
    bench = Bench()
    bench.progress.begin("Decode")
    bench.wait(2, cpu=0.0005)
    assert bench.state == "degraded"


def test_an_idle_thread_that_does_not_answer_is_seen() -> None:
    bench = Bench()
    bench.wait(2)
    bench.answers = False
    bench.wait(1.2)
    assert bench.state == "degraded"
    bench.wait(31)
    assert bench.state == "failed"


def test_a_dead_threads_clock_is_no_excuse_and_an_unreadable_one_is() -> None:
    bench = Bench()
    bench.progress.begin("Decode")
    bench.wait(0.2, cpu=1.0)
    bench.progress.cpu = None
    bench.wait(1)
    assert bench.state == "degraded"
    blind = Bench()
    blind.progress.cpu = None
    blind.owner.apply(Event.WARM)
    blind.monitor.tick()
    blind.owner.apply(Event.WARMED)
    blind.progress.begin("Decode")
    blind.wait(29)
    assert blind.state == "ready"


@pytest.mark.parametrize("gone_s", [2.0, 3600.0, 1e9])
def test_time_in_which_we_were_stopped_ourselves_is_held_against_nobody(gone_s: float) -> None:
    bench = Bench()
    bench.progress.begin("Decode")
    bench.now += gone_s
    bench.wait(0.5)
    assert bench.state == "ready"
    bench.wait(0.5)
    assert bench.state == "degraded", "but from then on its silence counts"


def test_nothing_is_owed_while_a_model_loads_or_warms_up() -> None:
    bench = Bench(started=False)
    bench.progress.begin("Warmup")
    bench.wait(600)
    assert bench.state == "warming"
    bench.progress.end()
    bench.owner.apply(Event.WARMED)
    bench.wait(5)
    assert bench.state == "ready"


class Asked:
    """A check whose answers the test gives."""

    def __init__(self) -> None:
        self.pending: list[Future[None]] = []

    def start(self) -> Future[None]:
        self.pending.append(Future())
        return self.pending[-1]

    def answer(self, error: Exception | None = None) -> None:
        future = self.pending.pop()
        future.set_exception(error) if error is not None else future.set_result(None)


def test_a_check_counts_after_its_threshold_in_a_row() -> None:
    asked = Asked()
    bench = Bench(Check("device", asked.start, 1.0, 5.0, failures=2))
    for error in (OSError("lost"), None, OSError("lost")):
        bench.wait(1)
        asked.answer(error)
    bench.wait(0.1)
    assert bench.state == "ready"
    bench.wait(1)
    asked.answer(OSError("lost again"))
    bench.wait(0.1)
    assert bench.state == "degraded"
    assert bench.owner.current.facts.reason == "device: lost again"
    bench.wait(1)
    asked.answer()
    bench.wait(0.1)
    assert bench.state == "ready"


def test_a_check_that_could_not_run_is_no_result() -> None:
    asked = Asked()
    bench = Bench(Check("device", asked.start, 1.0, 5.0), Check("none", lambda: None, 1.0, 5.0))
    bench.wait(30)
    assert bench.state == "ready"
    assert 5 <= len(asked.pending) <= 6, "asked again after each deadline"
    asked.pending[-1].cancel()
    bench.wait(0.2)
    assert bench.state == "ready"


def test_a_failed_step_counts_at_once_and_a_good_one_proves_recovery() -> None:
    asked = Asked()
    bench = Bench(Check("generation", asked.start, 0.5, 5.0, only_when_bad=True))
    bench.wait(2)
    assert asked.pending == [], "nobody asks a server that is well"
    bench.monitor.complain("generation", "a step failed: boom")
    assert bench.state == "degraded"
    bench.monitor.content("generation")
    assert bench.state == "ready"
    bench.monitor.complain("generation", "a step failed: boom")
    bench.wait(0.3)
    assert asked.pending == [], "for half a second it stands as it was seen"
    bench.wait(0.3)
    asked.answer(ValueError("boom again"))
    bench.wait(0.6)
    assert bench.state == "degraded"
    asked.answer()
    bench.wait(0.1)
    assert bench.state == "ready"


def test_a_proof_begun_before_the_failure_proves_nothing() -> None:
    asked = Asked()
    bench = Bench(Check("generation", asked.start, 0.5, 5.0, only_when_bad=True))
    bench.monitor.complain("generation", "first")
    bench.wait(0.6)
    early = asked.pending[-1]
    bench.monitor.complain("generation", "second")
    early.set_result(None)
    bench.wait(0.1)
    assert bench.state == "degraded"


def test_a_suspicion_is_looked_into_before_it_counts() -> None:
    asked = Asked()
    bench = Bench(Check("generation", asked.start, 0.5, 5.0, only_when_bad=True))
    bench.monitor.suspect("generation")
    bench.wait(0.6)
    assert (bench.state, len(asked.pending)) == ("ready", 1)
    asked.answer(ValueError("it does not generate"))
    bench.wait(0.1)
    assert bench.state == "degraded"


def test_a_complaint_after_a_stop_of_the_whole_process_is_not_taken_for_a_stall() -> None:
    asked = Asked()
    bench = Bench(Check("generation", asked.start, 0.5, 5.0, only_when_bad=True))
    bench.progress.begin("Prefill")
    bench.now += 500
    bench.monitor.complain("generation", "a step failed")
    assert bench.state == "degraded"


def test_thresholds_count_in_a_row() -> None:
    threshold = Threshold(failures=3, successes=2)
    turns = [threshold.note(good) for good in (False, False, True, False, False, False, True, False, True, True)]
    assert turns == [False, False, False, False, False, True, False, False, False, True]
    assert threshold.good
