"""Long random runs of an owner against a plain model of it, written from the documentation and not from the table."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from deepseek_tgi.probes.owner import Owner, Subscription
from deepseek_tgi.probes.state import Event

STEPS = 200
EXAMPLES = 150
"""Some 16,000 events together, and as many looks at them."""

# What the documentation says in words: from where each event counts, and where it leads ("=": it stays where it is).
ALIVE = {"starting", "loading", "warming", "ready", "degraded", "unloading", "sleeping", "unloaded"}
SERVING = {"ready", "degraded"}
WORDS: dict[str, tuple[set[str], str]] = {
    "load": ({"starting", "unloaded", "sleeping"} | SERVING, "loading"),
    "progress": ({"starting", "loading", "warming", "unloading", "draining"}, "="),
    "loaded": ({"loading"}, "warming"),
    "warm": ({"warming"} | SERVING, "warming"),
    "warmed": ({"warming"}, "ready"),
    "fall_back": ({"loading", "warming"}, "loading"),
    "load_failed": ({"loading", "warming"}, "unloaded"),
    "degrade": ({"ready"}, "degraded"),
    "recover": ({"degraded"}, "ready"),
    "swapped": (SERVING, "="),
    "unload": (SERVING, "unloading"),
    "keep": ({"unloading"}, "ready"),
    "unloaded": ({"unloading", "sleeping"}, "unloaded"),
    "slept": ({"unloading"}, "sleeping"),
    "wake": ({"sleeping"}, "loading"),
    "stop": (ALIVE, "draining"),
    "stopped": ({"draining", "failed"}, "stopped"),
    "fail": (ALIVE | {"draining"}, "failed"),
}
# Which events a run draws: ends are rare, else nearly every run would be short.
ORDINARY = sorted(set(WORDS) - {"stop", "stopped", "fail"})


class OwnerRuns(RuleBasedStateMachine):
    """One owner, followed by a subscriber that reads now and then, and one that joins late."""

    @initialize(kept=st.sampled_from([1, 2, 5, 256]))
    def start(self, kept: int) -> None:
        self.now = 0.0
        self.owner = Owner(lambda: self.now, kept)
        self.kept = kept
        self.state = "starting"
        self.since = 0.0
        self.started = False
        self.taken: list[tuple[str, str]] = []
        self.follower = self.owner.subscribe(lambda: None)
        self.followed: list[tuple[int, str]] = []
        self._follow(self.follower)

    @rule(name=st.sampled_from(ORDINARY), after_s=st.floats(0, 10))
    def happens(self, name: str, after_s: float) -> None:
        self._apply(name, after_s)

    @rule(name=st.sampled_from(["stop", "stopped", "fail"]), luck=st.integers(0, 49))
    def ends(self, name: str, luck: int) -> None:
        if not luck:
            self._apply(name, 0.0)

    @rule()
    def comes_up(self) -> None:
        """The usual way, so that runs do not spend their time before the first model."""
        for name in ("load", "loaded", "warmed"):
            self._apply(name, 1.0)

    @rule()
    def follower_reads(self) -> None:
        self._follow(self.follower)

    @rule(back=st.integers(0, 8))
    def late_subscriber_catches_up(self, back: int) -> None:
        seq = max(0, len(self.taken) - back)
        missed = self.owner.subscribe(lambda: None, seq).take()
        if len(self.taken) - seq <= self.kept:
            assert missed.snapshot is None
            assert [(i.event.value, i.after.state.value) for i in missed.increments] == self.taken[seq:]
        else:
            assert missed.snapshot is self.owner.current

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "owner"):
            return
        now = self.owner.current
        assert (now.state.value, now.seq, now.since, now.started) == (
            self.state, len(self.taken), self.since, self.started,
        )  # fmt: skip
        assert now.report.ready == (self.state == "ready")
        assert now.report.live == (self.state not in {"failed", "stopped"})
        assert now.report.started == self.started
        assert self.owner.admits == now.report.admits == (self.state in {"ready", "degraded"})
        assert not (now.report.ready and self.state in {"loading", "warming"})

    def _apply(self, name: str, after_s: float) -> None:
        self.now += after_s
        sources, target = WORDS[name]
        counts = self.state in sources
        assert self.owner.apply(Event(name)) == counts
        if not counts:
            return
        after = self.state if target == "=" else target
        if after != self.state or name == "fall_back":
            self.since = self.now
        self.state = after
        self.started = self.started or after == "ready"
        self.taken.append((name, after))

    def _follow(self, subscription: Subscription) -> None:
        missed = subscription.take()
        if missed.snapshot is not None:
            self.followed.append((missed.snapshot.seq, missed.snapshot.state.value))
        for increment in missed.increments:
            assert increment.seq == self.followed[-1][0] + 1
            assert increment.before.value == self.followed[-1][1]
            self.followed.append((increment.seq, increment.after.state.value))
        assert self.followed[-1] == (len(self.taken), self.state)


OwnerRuns.TestCase.settings = settings(
    max_examples=EXAMPLES, stateful_step_count=STEPS, deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)  # fmt: skip
TestOwnerRuns = OwnerRuns.TestCase
