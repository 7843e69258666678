"""`/livez`, `/readyz` and `/startupz` as Kubernetes' own components answer them: a status, and a line for each check.

`?verbose` shows the lines of a success too, `?exclude=NAME` leaves a check out, `/readyz/NAME` asks for one. The answer
is made from one snapshot and from nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import parse_qs

from deepseek_tgi.probes.owner import Snapshot
from deepseek_tgi.probes.state import State

CONTENT_TYPE = "text/plain; charset=utf-8"

Test = Callable[[Snapshot], bool]


@dataclass(frozen=True, slots=True)
class Answer:
    """An HTTP status and a text."""

    status: int
    text: str


def _always(snapshot: Snapshot) -> bool:
    return True


def _engine_lives(snapshot: Snapshot) -> bool:
    return snapshot.report.live


def _engine_works(snapshot: Snapshot) -> bool:
    return snapshot.report.live and snapshot.state is not State.DEGRADED


def _model_serves(snapshot: Snapshot) -> bool:
    return snapshot.state in {State.READY, State.DEGRADED, State.DRAINING} and snapshot.report.started


def _model_served(snapshot: Snapshot) -> bool:
    return snapshot.report.started


def _stays(snapshot: Snapshot) -> bool:
    return snapshot.state not in {State.DRAINING, State.STOPPED}


FACES: dict[str, dict[str, Test]] = {
    "livez": {"ping": _always, "engine": _engine_lives},
    "readyz": {"ping": _always, "engine": _engine_works, "model": _model_serves, "shutdown": _stays},
    "startupz": {"ping": _always, "model": _model_served},
}
"""What each probe asks, by the name of each check."""


def answer(path: str, query: str, snapshot: Snapshot, tells_reasons: bool = True) -> Answer | None:
    """The answer to `GET path?query`; None if the path is none of ours.

    With `tells_reasons` false a failed check says no more than the state: who may ask anybody should learn no more.
    """
    face, _, one = path.removeprefix("/").partition("/")
    checks = FACES.get(face)
    if checks is None or (one and one not in checks) or path.endswith("/"):
        return None
    options = parse_qs(query, keep_blank_values=True)
    excluded = set(options.get("exclude", ()))
    asked = {one: checks[one]} if one else checks
    failed = [name for name, test in asked.items() if name not in excluded and not test(snapshot)]
    if not failed and "verbose" not in options:
        return Answer(200, "ok")
    lines = [_line(name, name in excluded, name in failed, snapshot, tells_reasons) for name in asked]
    if unknown := sorted(excluded - set(asked)):
        named = ", ".join(f'"{name}"' for name in unknown)
        lines.append(f"warn: some health checks cannot be excluded: no matches for {named}")
    lines.append(f"{face} check {'failed' if failed else 'passed'}\n")
    return Answer(503 if failed else 200, "\n".join(lines))


def describe(snapshot: Snapshot) -> str:
    """The state in a few words, with how far it got and why it is so."""
    facts = snapshot.facts
    stage = f", {facts.stage}" if facts.stage else ""
    percent = f" {facts.percent:.0f} %" if facts.percent is not None else ""
    reason = f": {facts.reason}" if facts.reason else ""
    return f"{snapshot.state.value}{stage}{percent}{reason}"


def _line(name: str, excluded: bool, failed: bool, snapshot: Snapshot, tells_reasons: bool) -> str:
    if excluded:
        return f"[+]{name} excluded: ok"
    if failed:
        return f"[-]{name} failed: {describe(snapshot) if tells_reasons else snapshot.state.value}"
    return f"[+]{name} ok"
