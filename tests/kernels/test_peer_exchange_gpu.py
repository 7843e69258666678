"""What two ranks, processes on a GPU each, exchange through each other's memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from functools import partial

import pytest
import torch
from gpu_walk import on_processes
from ranks import unused_port

from deepseek_tgi.adapters.decode_graphs import CudaCapture
from deepseek_tgi.adapters.parallel import RankGroup
from deepseek_tgi.adapters.rendezvous import Meeting, join
from deepseek_tgi.errors import DeviceError
from deepseek_tgi.kernels.peer_sizes import PACKET_FLOATS, PeerSizes

WORLD = 2
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < WORLD, reason="needs two GPUs")]

SHORT = PeerSizes(WORLD).packets * PACKET_FLOATS
LONG = PeerSizes(WORLD).floats
COUNTS = (1, 2, 3, 77, 4096, 4097, SHORT - 1, SHORT, SHORT + 1, 16 * 4096, LONG - 3, LONG, LONG + 1, 3 * LONG + 5)
REPLAYS = 400


def joined(rank: int, port: int, with_nccl: bool = True) -> tuple[RankGroup, torch.device]:
    """A group that exchanges through peers' memory, and its rank's GPU."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    group = join(Meeting(rank, WORLD, "localhost", port, 30.0), device if with_nccl else None)
    assert group.share_gpus(device)
    return group, device


def brought(seed: int, count: int, device: torch.device) -> torch.Tensor:
    gen = torch.Generator(device=device).manual_seed(seed)
    return torch.randn(WORLD, count, generator=gen, device=device)


def wrong_sums(port: int, rank: int) -> list[tuple[str, int]]:
    """Sums that are not torch's own of the same parts, bit for bit; as they come and in graphs."""
    group, device = joined(rank, port)
    wrong = []
    for number in range(5 * len(COUNTS)):
        count = COUNTS[number * 5 % len(COUNTS)]
        parts = brought(number, count, device)
        x = parts[rank].clone()
        group.all_reduce(x)
        if not torch.equal(x, parts[0] + parts[1]):
            wrong.append(("launched", count))
    for counts in ((4096,), (5, SHORT, 4096, LONG + 1, 16 * 4096, 3)):
        bringing = [torch.empty(WORLD, count, device=device) for count in counts]
        sums = [torch.empty(count, device=device) for count in counts]
        replay = CudaCapture(device)(partial(add_all, group, rank, bringing, sums))
        for number in range(REPLAYS if len(counts) == 1 else REPLAYS // 10):
            for part, total in zip(bringing, sums, strict=True):
                part.copy_(brought(number, part.shape[1], device))
                total.fill_(float("nan"))
            replay()
            for part, total in zip(bringing, sums, strict=True):
                first = part[0] + part[1]
                if not torch.equal(total, first + first):
                    wrong.append(("recorded", part.shape[1]))
    for rows, widths in ((1, (64128, 64128)), (16, (64128, 64128)), (3, (1001, 1000)), (1, (4, 8)), (33, (1, 2))):
        columns = [torch.randn(rows, width, device=device, generator=same(width)) for width in widths]
        out = torch.full((rows, sum(widths)), float("nan"), device=device)
        made = group.gather_columns(columns[rank], widths, out)
        if made is not out or not torch.equal(out, torch.cat(columns, 1)):
            wrong.append(("gathered", rows * sum(widths)))
    group.close()
    return wrong


def same(seed: int) -> torch.Generator:
    """On the current device."""
    return torch.Generator(device="cuda").manual_seed(seed)


def add_all(group: RankGroup, rank: int, parts: list[torch.Tensor], sums: list[torch.Tensor]) -> None:
    """Each sum twice over, one right after the other."""
    for part, total in zip(parts, sums, strict=True):
        total.copy_(part[rank])
        group.all_reduce(total)
        group.all_reduce(total)


def test_sums_are_torchs_whatever_their_lengths_in_graphs_too() -> None:
    assert on_processes(WORLD, partial(wrong_sums, unused_port())) == [[], []]


PEER = """
import sys, torch
from kernels.test_peer_exchange_gpu import joined
group, device = joined(1, int(sys.argv[1]))
x = torch.ones(4096, device=device)
group.all_reduce(x)
torch.cuda.synchronize()
sys.stdout.write("summed\\n")
sys.stdout.flush()
sys.stdin.read()
"""


@pytest.mark.parametrize("count", [4096, SHORT + 1])
def test_a_peer_that_was_killed_ends_the_wait_and_is_named(count: int) -> None:
    """While its sum is under way: the GPU waits, and the host for the GPU."""
    port = unused_port()
    command = [sys.executable, "-c", PEER, str(port)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as peer:
        group, device = joined(0, port)
        group.all_reduce(torch.ones(4096, device=device))
        assert peer.stdout is not None
        assert peer.stdout.readline() == "summed\n"
        x = torch.ones(count, device=device)
        for _ in range(50):
            group.all_reduce(x)
        time.sleep(0.2)
        peer.send_signal(signal.SIGKILL)
        killed = time.monotonic()
        torch.cuda.synchronize()
        assert time.monotonic() - killed < 10
        assert x.isnan().all()
        with pytest.raises(DeviceError, match=rf"rank 0: rank 1 is gone \(process {peer.pid}\)"):
            group.check()
        with pytest.raises(DeviceError, match="rank 1 is gone"):
            group.all_reduce(x)
    group.close()


def kept_bytes(ports: list[int], rank: int) -> int:
    """What a GPU has less of after groups have come and gone; NCCL would keep memory of its own."""
    joined(rank, ports[3], with_nccl=False)[0].close()
    waiting = join(Meeting(rank, WORLD, "localhost", ports[4], 30.0))
    free = []
    for turn in range(3):
        waiting.smallest(0)
        free.append(torch.cuda.mem_get_info()[0])
        waiting.smallest(0)
        group, device = joined(rank, ports[turn], with_nccl=False)
        group.all_reduce(torch.ones(5, device=device))
        group.close()
    waiting.close()
    return free[0] - free[-1]


def test_groups_that_have_left_keep_no_memory() -> None:
    ports = [unused_port() for _ in range(5)]
    assert max(on_processes(WORLD, partial(kept_bytes, ports))) < PeerSizes(WORLD).num_bytes
