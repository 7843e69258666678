"""What ranks exchange, and what they say when one of them is missing, late, gone or in another step."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from ranks import on_ranks, unused_port

from deepseek_tgi.adapters.parallel import SWAPPED_FLOATS, RankGroup
from deepseek_tgi.adapters.rank_processes import Process
from deepseek_tgi.adapters.rendezvous import Meeting, join
from deepseek_tgi.errors import CheckpointError, ConfigError, DeviceError, ResourceError
from deepseek_tgi.kernels import rank_memory
from deepseek_tgi.kernels.library import load
from deepseek_tgi.kernels.rank_memory import SLOT_FLOATS

T = TypeVar("T")


@pytest.fixture(params=["sockets", "memory"])
def shared(request: pytest.FixtureRequest) -> bool:
    """Ranks exchange through memory that they share, or not."""
    return bool(request.param == "memory")


def in_groups(
    world_size: int, work: Callable[[RankGroup], T], timeout_s: float = 20.0, shared: bool = False
) -> list[T]:
    """`work(group)` on every rank of a group of its own."""
    port = unused_port()
    library = load() if shared else None

    def run(rank: int) -> T:
        group = join(Meeting(rank, world_size, "localhost", port, timeout_s))
        assert group.share_memory(library) == shared
        try:
            return work(group)
        finally:
            group.close()

    return on_ranks(world_size, run)


@pytest.mark.parametrize("width", [1, 77, SWAPPED_FLOATS // 5, SWAPPED_FLOATS // 5 + 1, SLOT_FLOATS // 3])
@pytest.mark.parametrize("world_size", [2, 3])
def test_sums_are_right_and_the_same_bits_on_every_rank(world_size: int, width: int, shared: bool) -> None:
    parts = torch.randn(world_size, 5, width, generator=torch.Generator().manual_seed(0))

    def summed(group: RankGroup) -> torch.Tensor:
        own = parts[group.rank].clone()
        group.all_reduce(own)
        group.all_reduce(own)
        return own

    results = in_groups(world_size, summed, shared=shared)
    assert all(torch.equal(result, results[0]) for result in results)
    assert torch.allclose(results[0], world_size * parts.double().sum(0).float(), atol=1e-5)


@pytest.mark.parametrize("widths", [(4, 4), (5, 2), (1, 3, 2)], ids=str)
@pytest.mark.parametrize("rows", [1, 3])
def test_columns_are_gathered_in_rank_order_whatever_their_widths(
    rows: int, widths: tuple[int, ...], shared: bool
) -> None:
    whole = torch.arange(rows * sum(widths), dtype=torch.float32).view(rows, -1)
    parts = whole.split(widths, 1)

    def gathered(group: RankGroup) -> torch.Tensor:
        return group.gather_columns(parts[group.rank].contiguous(), widths)

    results = in_groups(len(widths), gathered, shared=shared)
    assert all(torch.equal(result, whole) for result in results)


def test_ranks_agree_on_the_smallest_number_and_on_what_the_first_says(shared: bool) -> None:
    big = 2**62
    assert in_groups(3, lambda group: group.smallest(big + group.rank - 1), shared=shared) == [big - 1] * 3
    assert in_groups(3, lambda group: group.first_says(big + 7 * group.rank), shared=shared) == [big] * 3


def test_ranks_that_do_not_come_are_named() -> None:
    port = unused_port()
    started = time.monotonic()
    with pytest.raises(ResourceError, match=rf"rank 0: rank 1, 2 did not come to localhost:{port} within 0.3 s"):
        join(Meeting(0, 3, "localhost", port, 0.3))
    with pytest.raises(ResourceError, match=rf"rank 1: rank 0 is not at localhost:{port} after 0.3 s"):
        join(Meeting(1, 3, "localhost", port, 0.3))
    assert time.monotonic() - started < 10


def test_a_port_in_use_and_an_address_that_is_none_are_refused() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ResourceError, match=rf"--master-port {port}: 127.0.0.1:{port} is in use.*choose another"):
            join(Meeting(0, 2, "127.0.0.1", port, 1.0))
    with pytest.raises(ConfigError, match=r"--master-addr no\.such.host.invalid: no such host"):
        join(Meeting(0, 2, "no.such.host.invalid", port, 1.0))


def listening_addresses() -> set[str]:
    """Addresses at which this process listens, as /proc has them: hexadecimal, IPv4 and IPv6."""
    own = {link.readlink().name for link in Path("/proc/self/fd").iterdir() if link.is_symlink()}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/self/net", table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
                found.add(fields[1].partition(":")[0])
    return found


def test_ranks_of_one_machine_listen_on_its_loopback_alone() -> None:
    loopback = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}
    before = listening_addresses()
    assert set().union(*in_groups(2, lambda _: listening_addresses())) - before <= loopback


def test_an_error_in_a_common_step_is_fatal_and_ends_the_others_wait(shared: bool) -> None:
    def work(group: RankGroup) -> str:
        def step() -> None:
            with group.together():
                if group.rank == 1:
                    raise CheckpointError("no such page")
                group.all_reduce(torch.ones(3))

        with pytest.raises(DeviceError) as caught:
            step()
        with pytest.raises(DeviceError):
            group.smallest(1)
        return str(caught.value)

    started = time.monotonic()
    waited, failed = in_groups(2, work, shared=shared)
    assert time.monotonic() - started < 10, "nobody waits for a time-out"
    assert failed == "rank 1: a step failed that other ranks are in: CheckpointError: no such page"
    assert waited.startswith(f"rank 0: {'rank 1 has left' if shared else 'the connection to rank 1 broke'}")


def test_a_rank_that_says_nothing_is_named_in_bounded_time(shared: bool) -> None:
    left = threading.Event()

    def work(group: RankGroup) -> str:
        if group.rank == 1:
            left.wait(20)
            return ""
        with pytest.raises(DeviceError) as caught:
            group.all_reduce(torch.ones(3))
        left.set()
        return str(caught.value)

    waited, _ = in_groups(2, work, timeout_s=1.0, shared=shared)
    assert waited.startswith("rank 0: no answer from rank 1 within 1 s")


PEER = """
import sys, torch
from deepseek_tgi.adapters.rendezvous import Meeting, join
from deepseek_tgi.kernels.library import load
group = join(Meeting(1, 2, "localhost", int(sys.argv[1]), 20.0))
group.share_memory(load() if sys.argv[2] == "True" else None)
group.all_reduce(torch.ones(3))
sys.stdout.write("summed\\n")
sys.stdout.flush()
sys.stdin.read()
"""


def test_a_rank_that_was_killed_is_named_with_its_process(shared: bool) -> None:
    port = unused_port()
    command = [sys.executable, "-c", PEER, str(port), str(shared)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as peer:
        group = join(Meeting(0, 2, "localhost", port, 20.0))
        assert group.share_memory(load() if shared else None) == shared
        group.all_reduce(torch.ones(3))
        assert peer.stdout is not None
        assert peer.stdout.readline() == "summed\n"
        peer.send_signal(signal.SIGKILL)
        with pytest.raises(DeviceError, match=rf"rank 0: rank 1 is gone \(process {peer.pid}\)"):
            group.all_reduce(torch.ones(3))
    group.close()


def test_shared_memory_leaves_no_name_and_is_refused_by_one_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(rank_memory.FOLDER.iterdir())
    library = load()
    port = unused_port()

    def work(rank: int) -> list[bool]:
        group = join(Meeting(rank, 3, "localhost", port, 20.0))
        found = [group.share_memory(None if rank == lame else library) for lame in (0, 2)]
        total = torch.ones(2)
        group.all_reduce(total)
        assert total.tolist() == [3, 3]
        found.append(group.share_memory(library))
        group.close()
        return found

    assert on_ranks(3, work) == [[False, False, True]] * 3
    assert set(rank_memory.FOLDER.iterdir()) == before
    monkeypatch.setattr(rank_memory, "FOLDER", Path("/no/such/folder"))
    with pytest.raises(OSError, match="No such file"):
        rank_memory.create("name", 2)


class StandIn:
    """A process group for what lies on GPUs: notes what it is asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def allreduce(self, tensors: list[torch.Tensor]) -> StandIn:
        self.asked.append(f"sum {list(tensors[0].shape)}")
        return self

    def _allgather_base(self, every: torch.Tensor, own: torch.Tensor) -> StandIn:
        self.asked.append(f"gather {list(own.shape)} into {list(every.shape)}")
        return self

    def wait(self) -> None: ...

    def abort(self) -> None:
        self.asked.append("abort")


def test_what_lies_on_gpus_goes_its_own_way() -> None:
    on_gpus = StandIn()
    group = RankGroup(None, 0, [Process.own()] * 2, 1.0, on_gpus)
    group.all_reduce(torch.empty(3, 8, device="meta"))
    assert group.gather_columns(torch.empty(3, 4, device="meta"), [4, 3]).shape == (3, 7)
    group.close()
    assert on_gpus.asked == ["sum [3, 8]", "gather [3, 4] into [6, 4]", "abort"]
