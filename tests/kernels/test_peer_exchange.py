"""What ranks exchange through memory that they write for each other, emulated: processes that share a file."""

from __future__ import annotations

import mmap
import os
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from emulation.emulated import EmulatedPrograms
from gpu_walk import on_processes

from deepseek_tgi.kernels import peer_sizes
from deepseek_tgi.kernels.peer_exchange import PeerExchange, PeerPlaces
from deepseek_tgi.kernels.peer_sizes import CHUNK_FLOATS, MAX_RANKS, PACKET_FLOATS, PeerSizes, lent_bytes

CPU = torch.device("cpu")
PIECE = 1 << 18
EACH_BYTES = 160 << 20
"""Of the shared file, for each rank; what nobody writes to takes no room."""


class EmulatedRank:
    """One rank's view of the memory in `path`."""

    def __init__(self, path: Path, world: int, rank: int, timeout_s: float = 60.0) -> None:
        self.sizes = PeerSizes(world)
        assert self.sizes.num_bytes <= EACH_BYTES
        with path.open("r+b") as file:
            self._memory = torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)
        start = self._memory.data_ptr()
        self.over = torch.zeros(1, dtype=torch.int32)
        places = PeerPlaces(rank, [start + EACH_BYTES * r for r in range(world)], self.over.data_ptr())
        self.exchange = PeerExchange(EmulatedPrograms(), places, CPU, timeout_s)

    def numbered_from(self, number: int) -> None:
        """Pretend that there were so many sums."""
        self.exchange._state[0] = number


def lent(folder: Path, world: int) -> Path:
    """What the ranks share, zeros."""
    path = folder / "lent"
    with path.open("wb") as file:
        file.truncate(EACH_BYTES * world)
    return path


@contextmanager
def inboxes_of(floats: int, world: int) -> Iterator[None]:
    """Pieces of long sums are so long."""
    room = floats * 4 * 2 * (world - 1)
    with mock.patch.object(peer_sizes, "PAIR_BYTES", room), mock.patch.object(peer_sizes, "FLOATS_BYTES", room):
        yield


def brought(world: int, number: int, count: int) -> torch.Tensor:
    return torch.randn(world, count, generator=torch.Generator().manual_seed(number))


def sums(path: Path, world: int, counts: list[int], start: int, rank: int) -> list[torch.Tensor]:
    """One after another, those of `counts` floats; `start` sums are said to have been before."""
    with inboxes_of(PIECE, world):
        own = EmulatedRank(path, world, rank)
        own.numbered_from(start)
        pauses = random.Random(rank)
        results = []
        for number, count in enumerate(counts):
            x = brought(world, number, count)[rank].clone()
            own.exchange.add_up(x)
            results.append(x)
            if pauses.random() < 0.2:
                time.sleep(0.003)  # one rank is ahead, then another
    assert own.over.item() == 0
    return results


@pytest.mark.parametrize(("world", "start"), [(2, 0), (2, -4), (3, 0), pytest.param(8, 5, marks=pytest.mark.slow)])
def test_sums_are_right_and_the_same_bits_on_every_rank(tmp_path: Path, world: int, start: int) -> None:
    """Whatever their lengths, one after another; also where the numbers of sums begin anew."""
    short = PeerSizes(world).packets * PACKET_FLOATS
    counts = [1, 2, 3, 255, 256, 257, 1000, short, short + 1, 5, 0, CHUNK_FLOATS * 3, short + 4, short + 7, 6, 6, 6]
    if world == 2:
        counts += [PIECE + 5, PIECE - 1, 2 * PIECE + 7, 4]
    results = on_processes(world, partial(sums, lent(tmp_path, world), world, counts, start))
    for number, count in enumerate(counts):
        parts = brought(world, number, count)
        own = [result[number] for result in results]
        assert all(torch.equal(other, own[0]) for other in own), count
        assert torch.allclose(own[0].double(), parts.double().sum(0), rtol=1e-6, atol=2e-6), count
        in_order = parts[0].clone()
        for part in parts[1:]:
            in_order += part
        assert torch.equal(own[0], in_order), count


def in_another_order(path: Path, rank: int) -> list[torch.Tensor]:
    """Long sums and columns, the second rank's blocks starting from the last one: nothing promises their order."""
    if rank:
        os.environ["EMULATED_BLOCKS_BACKWARDS"] = "1"
    with inboxes_of(PIECE, 2):
        own = EmulatedRank(path, 2, rank, timeout_s=10.0)
        count = own.sizes.packets * PACKET_FLOATS + CHUNK_FLOATS + 3
        x, columns = brought(2, 1, count)[rank].clone(), torch.empty(1, 5 * CHUNK_FLOATS)
        own.exchange.add_up(x)
        widths = (2 * CHUNK_FLOATS, 3 * CHUNK_FLOATS)
        own.exchange.gather(brought(2, 2, widths[rank])[rank : rank + 1], widths, columns)
    assert own.over.item() == 0
    return [x, columns]


def test_blocks_that_start_in_another_order_wait_for_nothing_that_has_no_room(tmp_path: Path) -> None:
    """One block is resident at a time here."""
    for x, columns in on_processes(2, partial(in_another_order, lent(tmp_path, 2))):
        parts = brought(2, 1, x.shape[0])
        assert torch.equal(x, parts[0] + parts[1])
        assert torch.equal(columns[0], torch.cat([brought(2, 2, (2 + r) * CHUNK_FLOATS)[r] for r in range(2)]))


WIDTHS = {2: ((64, 64), (7, 9), (300, 4), (1, 2052)), 3: ((5, 1, 6), (8, 4, 12), (1000, 1000, 24))}
ROWS = (1, 3, 40)


def gathered(path: Path, world: int, floats: int, rank: int) -> list[torch.Tensor]:
    """Columns of shapes in turn, sums between them; `floats` is the length of a piece."""
    with inboxes_of(floats, world):
        own = EmulatedRank(path, world, rank)
        results = []
        for number, widths in enumerate(WIDTHS[world]):
            for rows in ROWS:
                x = brought(world, number, rows * widths[rank])[rank].clone().view(rows, widths[rank])
                out = torch.full((rows, sum(widths)), float("nan"))
                own.exchange.gather(x, widths, out)
                own.exchange.add_up(torch.ones(3))
                results.append(out)
    assert own.over.item() == 0
    return results


@pytest.mark.parametrize(("world", "chunks"), [(2, 1), (2, 256), pytest.param(3, 2, marks=pytest.mark.slow)])
def test_columns_stand_side_by_side_in_rank_order(tmp_path: Path, world: int, chunks: int) -> None:
    """In one piece and in several, of which a rank with few columns has fewer."""
    results = on_processes(world, partial(gathered, lent(tmp_path, world), world, chunks * CHUNK_FLOATS))
    wanted = [
        torch.cat(
            [brought(world, number, rows * width)[rank].view(rows, width) for rank, width in enumerate(widths)], 1
        )
        for number, widths in enumerate(WIDTHS[world])
        for rows in ROWS
    ]
    for result in results:
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(result, wanted, strict=True))


def added_to_a_stream(path: Path, rank: int) -> list[torch.Tensor]:
    """A stream that all have, to which each adds parts, three times: on rank 1 they are made apart."""
    own = EmulatedRank(path, 2, rank)
    streams = []
    for count in (300, 9, 301):
        stream = brought(2, 7, count)[0].clone()
        for turn in range(3):
            parts = stream if rank == 0 else own.exchange.parts_of(stream)
            assert parts is not None
            parts += brought(2, turn, count)[rank]
            own.exchange.add_up(stream, None if rank == 0 else parts)
        streams.append(stream)
    assert own.exchange.parts_of(torch.empty(own.sizes.packets * PACKET_FLOATS + 1)) is None
    return streams


def test_parts_that_are_made_apart_are_forgotten_once_they_are_added(tmp_path: Path) -> None:
    first, second = on_processes(2, partial(added_to_a_stream, lent(tmp_path, 2)))
    for ours, theirs, count in zip(first, second, (300, 9, 301), strict=True):
        assert torch.equal(ours, theirs)
        wanted = brought(2, 7, count)[0].double() + sum(brought(2, turn, count).double().sum(0) for turn in range(3))
        assert torch.allclose(ours.double(), wanted, atol=1e-5)


@pytest.mark.parametrize("short", [True, False])
def test_a_rank_that_does_not_come_is_waited_for_so_long_and_named(tmp_path: Path, short: bool) -> None:
    alone = EmulatedRank(lent(tmp_path, 3), 3, 0, timeout_s=0.3)
    count = 300 if short else alone.sizes.packets * PACKET_FLOATS + 1
    x = torch.ones(count)
    started = time.monotonic()
    alone.exchange.add_up(x)
    assert 0.3 <= time.monotonic() - started < 20
    assert x.isnan().all()
    assert alone.over.item() - 2 in (1, 2)
    alone.exchange.timeout_s = 60.0
    y, columns = torch.ones(5), torch.empty(1, 9)
    alone.exchange.add_up(y)  # nobody is waited for any more
    alone.exchange.gather(torch.ones(1, 3), (3, 2, 4), columns)
    assert y.isnan().all()
    assert columns.isnan().all()


def test_the_host_ends_a_wait(tmp_path: Path) -> None:
    alone = EmulatedRank(lent(tmp_path, 2), 2, 1)
    timer = threading.Timer(0.2, lambda: alone.over.fill_(1))
    timer.start()
    x = torch.ones(2, 40)
    alone.exchange.add_up(x)
    timer.join()
    assert x.isnan().all()
    assert alone.over.item() == 1


@pytest.mark.parametrize("world", range(2, 9))
def test_inboxes_fit_what_is_said_of_them(world: int) -> None:
    sizes = PeerSizes(world)
    assert sizes.num_bytes <= (131 if world == 2 else 11) << 20
    assert lent_bytes(world, True) == sizes.num_bytes
    assert lent_bytes(world, False) == lent_bytes(1, True) == lent_bytes(MAX_RANKS + 1, True) == 0
    assert sizes.floats % CHUNK_FLOATS == 0
    assert sizes.floats >= sizes.packets * PACKET_FLOATS
    op = PeerExchange(EmulatedPrograms(), PeerPlaces(0, [0] * world, 0), CPU, 1.0)
    assert op.adds_up(torch.empty(sizes.floats, device="meta"))
    assert op.adds_up(torch.empty(sizes.floats + 1, device="meta")) == (world == 2)
    assert not op.adds_up(torch.empty(4, dtype=torch.bfloat16, device="meta"))
    assert op.gathers(4096, [1 << 16] * 2)
    assert not op.gathers(1 << 15, [1 << 16] * 2)  # elements are counted in 32 bits
    assert not op.gathers(0, [4, 4])
