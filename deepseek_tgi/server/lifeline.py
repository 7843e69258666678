"""Why a shard leaves: a signal, or the end of stdin, which the launcher holds open as long as it lives."""

from __future__ import annotations

import asyncio
import logging
import os
import select
import signal
import stat
from collections.abc import Callable

logger = logging.getLogger(__name__)


ECHO_S = 0.2
"""A signal again this soon is one request heard twice: `timeout` signals its child and then its own group."""


class StopRequest:
    """Set once; the first reason and exit code stand. Used from the event loop only."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self.exit_code = 0
        self.hurried = False

    def ask(self, reason: str, exit_code: int = 0, hurried: bool = False) -> None:
        """Stop because of `reason`; `hurried` if nobody is left to wait for a running call."""
        if not self._event.is_set():
            self.exit_code, self.hurried = exit_code, hurried
            logger.info("stopping: %s", reason)
            self._event.set()

    async def wait(self) -> None:
        """Until asked."""
        await self._event.wait()


def watch_signals(stop: StopRequest, leave_at_once: Callable[[int], None]) -> None:
    """SIGTERM and SIGINT ask to stop; a second one, and not the echo of the first, means at once."""
    loop = asyncio.get_running_loop()
    asked_at: list[float] = []

    def note(number: signal.Signals) -> None:
        now = loop.time()
        if asked_at and now - asked_at[0] >= ECHO_S:
            leave_at_once(number)
        asked_at.append(now)
        stop.ask(f"got {number.name}")

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, note, number)


def is_lifeline(descriptor: int) -> bool:
    """True for a pipe or socket that somebody holds open; closed, absent, a file or a terminal is none."""
    try:
        mode = os.fstat(descriptor).st_mode
    except OSError:
        return False
    if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
        return False
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    events = dict(poll.poll(0)).get(descriptor, 0)
    return not events & (select.POLLHUP | select.POLLERR) or bool(events & select.POLLIN and _holds_data(descriptor))


def _holds_data(descriptor: int) -> bool:
    """True if bytes wait to be read; a closed socket is readable without any."""
    import array
    import fcntl
    import termios

    waiting = array.array("i", [0])
    fcntl.ioctl(descriptor, termios.FIONREAD, waiting)
    return waiting[0] > 0


def watch_stdin(stop: StopRequest, descriptor: int = 0) -> None:
    """Ask to stop at the end of stdin, if it was an open pipe to begin with. What comes through it is dropped."""
    if not is_lifeline(descriptor):
        return
    loop = asyncio.get_running_loop()

    def readable() -> None:
        try:
            data = os.read(descriptor, 65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            loop.remove_reader(descriptor)
            stop.ask("stdin ended: the launcher is gone", hurried=True)

    loop.add_reader(descriptor, readable)
