"""When a shard takes the end of stdin for its launcher's death, and when not."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

from deepseek_tgi.server import lifeline


async def test_the_end_of_an_open_pipe_asks_to_stop() -> None:
    stop = lifeline.StopRequest()
    read_end, write_end = os.pipe()
    lifeline.watch_stdin(stop, read_end)
    os.write(write_end, b"what the launcher's own stdin says")
    await asyncio.sleep(0)
    os.close(write_end)
    await asyncio.wait_for(stop.wait(), 5)
    assert stop.hurried
    os.close(read_end)


def test_a_pipe_closed_from_the_start_is_no_lifeline() -> None:
    read_end, write_end = os.pipe()
    assert lifeline.is_lifeline(read_end)
    os.close(write_end)
    assert not lifeline.is_lifeline(read_end)
    os.close(read_end)
    assert not lifeline.is_lifeline(read_end)


def test_a_socket_is_a_lifeline_as_long_as_it_is_open() -> None:
    ours, theirs = socket.socketpair()
    with ours:
        assert lifeline.is_lifeline(ours.fileno())
        theirs.close()
        assert not lifeline.is_lifeline(ours.fileno())


def test_files_and_devices_are_no_lifeline(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    for path in (tmp_path / "empty", Path(os.devnull)):
        with path.open("rb") as file:
            assert not lifeline.is_lifeline(file.fileno())


async def test_the_first_reason_stands() -> None:
    stop = lifeline.StopRequest()
    stop.ask("the device failed", exit_code=1)
    stop.ask("got SIGTERM")
    assert stop.exit_code == 1
