"""How ranks come to add up through each other's memory, or do not; the memory of GPUs is a file of each rank's here."""

from __future__ import annotations

import logging
import mmap
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from emulation.emulated import EmulatedPrograms
from gpu_walk import on_processes
from ranks import unused_port

from deepseek_tgi.adapters import parallel, peers, rank_processes
from deepseek_tgi.adapters.parallel import RankGroup
from deepseek_tgi.adapters.peers import Peers
from deepseek_tgi.adapters.rank_processes import Process
from deepseek_tgi.adapters.rank_watch import RankWatch
from deepseek_tgi.adapters.rendezvous import Meeting, join
from deepseek_tgi.errors import DeviceError, GenerationError
from deepseek_tgi.kernels import peer_sizes
from deepseek_tgi.kernels.compiler import BuildError
from deepseek_tgi.kernels.cuda.machine import Machine
from deepseek_tgi.kernels.cuda.peer_memory import PeerMemory
from deepseek_tgi.kernels.peer_exchange import PeerExchange
from deepseek_tgi.kernels.peer_sizes import PeerSizes

CPU = torch.device("cpu")
COUNTS = (5, 5000, 1)


class FileMemory:
    """A `PeerMemory` that is a file. `fault` is what is wrong with it."""

    def __init__(self, folder: Path, rank: int, fault: str, device: torch.device, num_bytes: int) -> None:
        if fault == "none to lend":
            raise DeviceError("cpu: the driver gives no memory")
        if fault == "torch fails":
            raise RuntimeError("CUDA error: out of memory")
        self._path = folder / f"rank {rank}"
        with self._path.open("wb") as file:
            file.truncate(num_bytes)
        self._fault = fault
        self._word = torch.zeros(1, dtype=torch.int32)
        self.over_address = self._word.data_ptr()
        self.mapped: list[torch.Tensor] = []

    @property
    def over(self) -> int:
        return int(self._word)

    def told(self) -> bytes:
        return str(self._path).encode()

    def reach(self, all_told: Sequence[bytes], own: int) -> list[int]:
        if self._fault == "no way":
            raise DeviceError("cpu: the driver gives no way to the memory of rank 0")
        for rank, told in enumerate(all_told):
            with Path(told.decode()).open("r+b") as file:
                lost = self._fault == "lost writes" and rank != own
                kind = mmap.ACCESS_COPY if lost else mmap.ACCESS_WRITE
                self.mapped.append(torch.frombuffer(mmap.mmap(file.fileno(), 0, access=kind), dtype=torch.uint8))
        return [memory.data_ptr() for memory in self.mapped]

    def end(self) -> None:
        self._word.fill_(1)

    def let_go(self) -> None:
        self.mapped.clear()

    def close(self) -> None:
        assert not self.mapped
        self._path.unlink()


def connected(folder: Path, port: int, faults: Sequence[str], rank: int) -> tuple[list[float] | None, list[str]]:
    """Sums of what ranks bring, `rank + 1` each, and what was said of the way."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    peers.logger.addHandler(handler)
    peers.logger.setLevel(logging.INFO)
    group = join(Meeting(rank, len(faults), "localhost", port, 30.0))
    machine = Machine(EmulatedPrograms(), 1, 90)
    no_compiler = BuildError("CUDA C++ cannot be compiled here")
    machine_of = mock.Mock(side_effect=no_compiler) if faults[rank] == "no compiler" else lambda device: machine
    adds_up, gathers = peers._adds_up, peers._gathers

    def tried(*args: Any) -> bool:
        time.sleep(3.0 if faults[rank] == "comes late" else 0.0)
        if faults[rank] == "torch fails in a sum":
            raise RuntimeError("CUDA error: out of memory\nmore")
        return adds_up(*args)

    def gathered(exchange: PeerExchange, *args: Any) -> bool:
        true = exchange.gather
        wrong = mock.patch.object(exchange, "gather", lambda own, widths, out: (true(own, widths, out), out.zero_()))
        with wrong if faults[rank] == "wrong columns" else nullcontext():
            return gathers(exchange, *args)

    with (
        mock.patch.object(peers, "_adds_up", tried),
        mock.patch.object(peers, "_gathers", gathered),
        mock.patch.object(peers, "machine_of", machine_of),
        mock.patch.object(peers, "PeerMemory", partial(FileMemory, folder, rank, faults[rank])),
        mock.patch.object(peers, "TRIAL_S", 1.0),
        mock.patch.object(peer_sizes, "PAIR_BYTES", 8 << 20),
        mock.patch.object(parallel, "on_gpu", return_value=True),
    ):
        if not group.share_gpus(CPU):
            group.close()
            return None, said
        sums = []
        for count in COUNTS:
            x = torch.full((count,), rank + 1.0)
            group.all_reduce(x)
            sums.append(float(x.sum()))
        columns = group.gather_columns(torch.full((2, 3), rank + 1.0), [3] * len(faults))
        assert columns.tolist() == [[r + 1.0 for r in range(len(faults)) for _ in range(3)]] * 2
        group.close()
    with pytest.raises(DeviceError, match="has left the group"):
        group.check()
    return sums, said


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_ranks_add_up_through_memory_that_they_lend_each_other(tmp_path: Path, world: int) -> None:
    found = on_processes(world, partial(connected, tmp_path, unused_port(), [""] * world))
    each = world * (world + 1) // 2
    said = "ranks exchange through each other's memory"
    if world > 2:
        said += f", and through NCCL what has more than {PeerSizes(world).floats} numbers to add up"
    assert found == [([each * c for c in COUNTS], [said])] * world
    assert not list(tmp_path.iterdir()), "all was given back"


@pytest.mark.parametrize(
    ("fault", "own", "others"),
    [
        ("no compiler", "CUDA C++ cannot be compiled here", "rank 1 has no memory for it"),
        ("none to lend", "cpu: the driver gives no memory", "rank 1 has no memory for it"),
        ("torch fails", "CUDA error: out of memory", "rank 1 has no memory for it"),
        (
            "no way",
            "cpu: the driver gives no way to the memory of rank 0",
            "another rank does not reach the memory of all",
        ),
        ("wrong columns", "their first sums came out wrong", "another rank's first sums came out wrong"),
    ],
)
def test_what_one_rank_cannot_none_does_and_each_says_why(tmp_path: Path, fault: str, own: str, others: str) -> None:
    found = on_processes(2, partial(connected, tmp_path, unused_port(), ["", fault]))
    start = "ranks exchange through NCCL alone, which is slower for few tokens: "
    assert found == [(None, [start + others]), (None, [start + own])]
    assert not list(tmp_path.iterdir()), "all was given back"


@pytest.mark.parametrize("fault", ["comes late", "lost writes", "torch fails in a sum"])
def test_a_rank_of_which_nothing_comes_in_the_first_sums_is_named(tmp_path: Path, fault: str) -> None:
    """And no sum is said to be wrong; an error of its own is the reason on the rank that has it."""
    (first, said), (second, own) = on_processes(2, partial(connected, tmp_path, unused_port(), ["", fault]))
    assert (first, second) == (None, None)
    start = "ranks exchange through NCCL alone, which is slower for few tokens: "
    assert said == [f"{start}nothing came from rank 1 within 1 s in their first sums"]
    if fault == "torch fails in a sum":
        assert own == [f"{start}CUDA error: out of memory"]
    assert not list(tmp_path.iterdir()), "all was given back"


@pytest.mark.parametrize("world", range(2, 9))
def test_numbers_that_are_tried_add_up_exactly(world: int) -> None:
    count = 1 << 25  # of the longest sums, and more than there are whole numbers in float32
    numbers = peers._numbers(count, CPU)
    assert int(numbers.max()) * world + world * (world - 1) // 2 < 1 << 24
    assert torch.equal(numbers.int(), torch.arange(count, dtype=torch.int32) % int(numbers.max() + 1))


def test_memory_that_was_begun_is_given_back_whatever_fails() -> None:
    driver = mock.MagicMock()
    driver.cuMemAlloc.return_value = (0, 77)
    driver.cuMemsetD8.side_effect = RuntimeError("CUDA error: unknown")
    with (
        mock.patch.dict(sys.modules, {"cuda": mock.Mock(), "cuda.bindings": mock.Mock(driver=driver)}),
        mock.patch.object(torch.cuda, "device"),
        mock.patch.object(torch, "zeros"),
        pytest.raises(RuntimeError, match="unknown"),
    ):
        PeerMemory(CPU, 5)
    driver.cuMemFree.assert_called_once_with(77)


def test_ranks_of_several_machines_or_too_many_do_not_try() -> None:
    for processes, why in (
        ([Process(1, "here"), Process(2, "there")], "they are on several machines or in several containers"),
        ([Process.own()] * 9, "there are more than 8 of them"),
    ):
        group = RankGroup(None, 0, processes, 1.0)
        with mock.patch.object(peers.logger, "info") as info:
            assert not group.share_gpus(CPU)
        assert info.call_args.args[1] == why


def test_a_rank_that_a_gpu_waited_for_in_vain_is_named() -> None:
    memory = mock.Mock(over=0)
    group = RankGroup(None, 0, [Process.own()] * 3, 7.0)
    with mock.patch.object(parallel, "connect", return_value=Peers(memory, mock.Mock())):
        assert group.share_gpus(CPU)
    group.check()
    memory.over = 1  # ended by the host, who knows why
    group.check()
    memory.over = 4
    for ask in (group.check, lambda: group.all_reduce(torch.ones(3))):
        with pytest.raises(DeviceError, match=r"^rank 0: no answer from rank 2 within 7 s$"):
            ask()
    group.close()
    memory.close.assert_not_called()  # kernels may still look at it


def left(port: int, rank: int) -> list[str]:
    """What a rank does with the memory it lends, as the other one leaves too late."""
    group = join(Meeting(rank, 2, "localhost", port, 30.0))
    memory = mock.Mock(over=0)
    with (
        mock.patch.object(parallel, "connect", return_value=Peers(memory, mock.Mock())),
        mock.patch.object(parallel, "LEAVE_S", 0.5),
    ):
        assert group.share_gpus(CPU)
        time.sleep(2.0 * rank)
        group.close()
    with pytest.raises(DeviceError, match="has left the group"):
        group.check()
    return [call[0] for call in memory.method_calls]


def test_what_a_late_rank_may_have_open_is_not_taken_back() -> None:
    assert on_processes(2, partial(left, unused_port())) == [["let_go", "end"]] * 2


def test_a_rank_whose_process_ends_is_noticed_while_nobody_asks() -> None:
    command = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    aborted = threading.Event()
    on_gpus = mock.Mock(abort=aborted.set)
    memory = mock.Mock(over=0)
    with subprocess.Popen(command, stdin=subprocess.PIPE) as peer:
        group = RankGroup(None, 0, [Process.own(), Process(peer.pid, Process.own().machine)], 60.0, on_gpus)
        with mock.patch.object(parallel, "connect", return_value=Peers(memory, mock.Mock())):
            group.share_gpus(CPU)
        assert not aborted.wait(0.3)
        group.check()
        peer.kill()
        assert aborted.wait(5), "NCCL waits on"
        memory.end.assert_called()
        with pytest.raises(DeviceError, match=rf"^rank 0: rank 1 is gone \(process {peer.pid}\)$"):
            group.check()
        group.close()


class Ended:
    """Who is told of ranks that have ended."""

    def __init__(self) -> None:
        self.ranks: list[int] = []

    def tell(self, ranks: Sequence[int]) -> None:
        self.ranks.extend(ranks)


def test_a_watch_that_was_stopped_says_nothing() -> None:
    ended = Ended()
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE) as peer:
        watch = RankWatch([Process.own(), Process(peer.pid, Process.own().machine)], 0, ended.tell)
        watch.stop()
        peer.kill()
        peer.wait()
    watch.stop()
    assert not ended.ranks


def test_a_watch_keeps_nobody_and_ends_with_who_is_told() -> None:
    on_gpus = mock.Mock()
    group = RankGroup(None, 0, [Process.own()] * 2, 60.0, on_gpus)
    assert group._watch is not None
    thread, kept = group._watch._thread, weakref.ref(group)
    del group
    assert kept() is None
    thread.join(5)
    assert not thread.is_alive()


def test_a_rank_that_was_lost_is_blamed_and_not_the_model_whose_numbers_it_left_out() -> None:
    memory = mock.Mock(over=0)
    group = RankGroup(None, 0, [Process.own()] * 2, 7.0)

    def warmed_up() -> None:
        with group.together():
            memory.over = 3
            raise GenerationError("the model's logits are not finite")

    with mock.patch.object(parallel, "connect", return_value=Peers(memory, mock.Mock())):
        group.share_gpus(CPU)
    with pytest.raises(DeviceError, match=r"^rank 0: no answer from rank 1 within 7 s$"):
        warmed_up()


def test_processes_of_another_container_count_as_running(tmp_path: Path) -> None:
    """Their numbers are those of others here, or of none."""
    here = Process.own()
    (tmp_path / "pid").symlink_to("pid:[1]")
    with mock.patch.object(rank_processes, "PROCESSES", tmp_path / "pid"):
        there = Process(1 << 30, Process.own().machine)
    assert not Process(1 << 30, here.machine).runs()
    assert there.runs()
    assert not RankGroup(None, 0, [here, there], 1.0).on_one_machine
