"""What the ranks of one model exchange, and what happens when one is lost.

Ranks of one machine exchange through memory that they share where they can, else through torch's process group. What
lies on GPUs is exchanged through their memory (`peers`) or by NCCL, in order with the step's own work and without the
host waiting for it, so that CUDA graphs hold it.

Choice: torch's process group is used directly, and every failure of an exchange is a `DeviceError` that names the lost
rank: ranks that have missed an exchange can never agree again, so the process leaves. Prevents: a shard that waits for
ever, or answers with half a model. Rejected: `init_process_group`, whose global state outlives a failure.

Source: `torch.distributed`, `ProcessGroupGloo`, `ProcessGroupNCCL`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from deepseek_tgi.adapters.peers import Peers, connect
from deepseek_tgi.adapters.rank_mapping import mapped_by_all
from deepseek_tgi.adapters.rank_processes import Process, ended, listed
from deepseek_tgi.adapters.rank_watch import RankWatch
from deepseek_tgi.adapters.together import Together
from deepseek_tgi.errors import DeviceError
from deepseek_tgi.kernels.library import NativeLibrary
from deepseek_tgi.kernels.rank_memory import SLOT_FLOATS, RankMemory

EXIT_S = 0.5
SWAP_TAG = 1
LEAVE_S = 2.0
"""How long who leaves waits for the others to do so."""
TOLD_BYTES = 128
"""Of what ranks tell each other in one piece, its length before it."""
SWAPPED_FLOATS = 1 << 16
"""Up to here a swap takes less time than gloo's all-reduce (80 us to 205 for one row, 170 to 270 at the bound)."""
Start = Callable[[], Any]
"""Begins an exchange; what it returns can be waited for."""


class RankGroup:
    """The connected ranks. One thread at a time, and every rank makes the same calls in the same order.

    Raises: `DeviceError` from every exchange that fails, and from all that are tried after it.
    """

    def __init__(
        self, group: Any, rank: int, processes: Sequence[Process], timeout_s: float, on_gpus: Any = None
    ) -> None:
        """Made by `rendezvous.join`. `group` and `on_gpus`, for what lies there, are process groups of torch's,
        `processes` are those of all ranks.
        """
        self.rank = rank
        self.world_size = len(processes)
        self._timeout_s = timeout_s
        self._group = group
        self._on_gpus = on_gpus
        self._processes = processes
        self._lost: str | None = None
        self._memory: RankMemory | None = None
        self._peers: Peers | None = None
        self._watch = None if on_gpus is None else RankWatch(processes, rank, self._lose)
        self._ending = threading.Lock()
        self._aborted = False
        self._theirs = torch.empty(SWAPPED_FLOATS)

    def share_memory(self, library: NativeLibrary | None) -> bool:
        """Exchange through memory from now on, if all ranks are on one machine and all can; says whether they do.

        `library` None: this rank cannot. Every rank must call it.
        """
        if not self.on_one_machine:
            return False
        mapped = mapped_by_all(self, library is not None)
        if library is None or mapped is None:
            return False
        self._memory = RankMemory(library, mapped, self.rank, self.world_size)
        return True

    def share_gpus(self, device: torch.device) -> bool:
        """Exchange through the memory of each other's GPUs from now on, this rank's being `device`, where that can be.

        Says whether they do. Every rank must call it.
        """
        self._peers = connect(self, device, self._timeout_s)
        if self._watch is None and self._peers is not None:
            self._watch = RankWatch(self._processes, self.rank, self._lose)
        return self._peers is not None

    @property
    def on_one_machine(self) -> bool:
        """True if all ranks are."""
        return len({process.machine for process in self._processes}) == 1

    @property
    def first(self) -> bool:
        """True on rank 0, which adds what is to be added once."""
        return self.rank == 0

    def parts_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """What this rank's parts of a sum are added to, so that `all_reduce` makes `tensor` the old one with all ranks'
        parts added: itself on the first rank, else zeros.
        """
        if self.first:
            return tensor
        held = self._peers.exchange.parts_of(tensor) if self._peers is not None and on_gpu(tensor) else None
        return tensor.zero_() if held is None else held

    def all_reduce(self, tensor: torch.Tensor, parts: torch.Tensor | None = None) -> None:
        """Replace `tensor` (dense, any shape) by its sum over all ranks; the bits are the same on each.

        What this rank brings are the `parts` of `parts_of`, if they are given.

        Two ranks simply swap what is short, which halves the messages that follow one another: a token's sums are
        bound by their time. a + b and b + a are the same bits.
        """
        if self._peers is not None and on_gpu(tensor) and self._peers.exchange.adds_up(tensor):
            self.check()
            self._peers.exchange.add_up(tensor, None if parts is tensor else parts)
        elif on_gpu(tensor):
            self._wait("all_reduce", lambda: self._on_gpus.allreduce([tensor]))
        elif self._memory is not None:
            self.check()
            self._memory.add_up(tensor, self._late)
        elif self.world_size == 2 and tensor.numel() <= SWAPPED_FLOATS:
            tensor += self._swap(tensor)
        else:
            self._wait("all_reduce", lambda: self._group.allreduce([tensor]))

    def gather_columns(self, own: torch.Tensor, widths: Sequence[int], out: torch.Tensor | None = None) -> torch.Tensor:
        """`[R, sum(widths)]` from every rank's `own [R, widths[rank]]`, in rank order; `out` (dense) where that is
        written by one kernel.
        """
        rows, most = own.shape[0], max(widths)
        if self._peers is not None and on_gpu(own) and self._peers.exchange.gathers(rows, widths):
            self.check()
            out = own.new_empty(rows, sum(widths)) if out is None else out
            self._peers.exchange.gather(own, widths, out)
            return out
        if own.shape[1] < most:
            own = torch.nn.functional.pad(own, (0, most - own.shape[1]))
        if self._memory is not None and own.numel() <= SLOT_FLOATS and not on_gpu(own):
            self.check()
            parts = [part.view(rows, most) for part in self._memory.of_all(own.view(-1), self._late)]
            return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], 1)
        every = own.new_empty(self.world_size * rows, most)
        group = self._on_gpus if on_gpu(own) else self._group
        self._wait("all_gather", lambda: group._allgather_base(every, own))
        parts = [every[r * rows : (r + 1) * rows, :width] for r, width in enumerate(widths)]
        return every.view(1, -1) if rows == 1 and min(widths) == most else torch.cat(parts, 1)

    def smallest(self, number: int) -> int:
        """The smallest `number` of any rank."""
        held = torch.tensor([number], dtype=torch.int64)
        options: Any = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MIN
        self._wait("all_reduce", lambda: self._group.allreduce([held], options))
        return int(held)

    def first_says(self, number: int) -> int:
        """The `number` of rank 0."""
        held = torch.tensor([number], dtype=torch.int64)
        if self._memory is not None:
            self.check()
            return int(self._memory.of_all(held.view(torch.float32), self._late)[0].view(torch.int64))
        options: Any = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        self._wait("broadcast", lambda: self._group.broadcast([held], options))
        return int(held)

    def tell_all(self, own: bytes) -> list[bytes]:
        """What every rank tells, in rank order: less than `TOLD_BYTES`."""
        assert len(own) < TOLD_BYTES, f"{len(own)} bytes"
        told = torch.frombuffer(bytearray([len(own), *own.ljust(TOLD_BYTES - 1)]), dtype=torch.uint8)
        every = torch.empty(self.world_size * TOLD_BYTES, dtype=torch.uint8)
        self._wait("all_gather", lambda: self._group._allgather_base(every, told))
        return [bytes(row[1 : 1 + row[0]]) for row in every.view(-1, TOLD_BYTES).tolist()]

    def together(self) -> Together:
        """A context for work that exchanges: an error in it is fatal, since the other ranks wait for this one."""
        return Together(self)

    def break_up(self, reason: str) -> None:
        """Take part in no exchange any more, and let the others find out; `reason` is the error of who tries."""
        self._lost = self._lost or reason
        if self._watch is not None:
            self._watch.stop()
        if self._memory is not None:
            self._memory.leave()
        self._end_waits()
        self._group = self._on_gpus = None  # the last reference: only its destructor closes the connections

    def close(self) -> None:
        """Leave; nothing runs that exchanges. What GPUs share goes with the process if a rank was lost or is late: it
        may have this rank's memory open.
        """
        peers, left_together = self._peers, False
        try:
            if peers is not None and self.lost is None:
                peers.let_go()
                left_together = self._left_together()
        finally:
            self.break_up(f"rank {self.rank} has left the group")
        if peers is not None and left_together:
            peers.close()

    @property
    def lost(self) -> str | None:
        """Why nothing can be exchanged any more, a rank that a GPU waited for in vain included; None if it can."""
        late = None if self._lost is not None or self._peers is None else self._peers.late_rank
        if late is not None:
            self._lost = f"rank {self.rank}: no answer from rank {late} within {self._timeout_s:g} s"
        return self._lost

    def check(self) -> None:
        """Raise if a rank is known to be lost."""
        lost = self.lost
        if lost is not None:
            raise DeviceError(lost)

    def _lose(self, ranks: Sequence[int]) -> None:
        """Their processes have ended: let no GPU wait for them. Called from a thread of its own."""
        pids = listed([self._processes[rank].pid for rank in ranks])
        self._lost = self._lost or f"rank {self.rank}: rank {listed(ranks)} is gone (process {pids})"
        self._end_waits()

    def _end_waits(self) -> None:
        with self._ending:
            if self._peers is not None:
                self._peers.end()
            if self._on_gpus is not None and not self._aborted:
                self._aborted = True
                self._on_gpus.abort()  # or a kernel that waits for the others would never end

    def _left_together(self) -> bool:
        """True once every rank has let go of the others' memory; False if one does not say so in time."""
        options: Any = dist.AllreduceOptions()
        options.timeout = timedelta(seconds=LEAVE_S)
        try:
            self._group.allreduce([torch.zeros(1)], options).wait()
        except RuntimeError:
            return False
        return True

    def _swap(self, tensor: torch.Tensor) -> torch.Tensor:
        """The other rank's tensor, in memory that the next swap takes again."""
        other = 1 - self.rank
        theirs = self._theirs[: tensor.numel()].view(tensor.shape)

        def start() -> Any:
            sent = self._group.send([tensor], other, SWAP_TAG)
            self._group.recv([theirs], other, SWAP_TAG).wait()
            return sent

        self._wait("all_reduce", start)
        return theirs

    def _wait(self, name: str, start: Start) -> None:
        self.check()
        try:
            start().wait()
        except RuntimeError as error:
            self._lost = self._blame(name, error)
            raise DeviceError(self._lost) from error

    def _late(self, rank: int, left: bool, waited_s: float) -> None:
        """Raise for a rank that will not come."""
        gone = ended(self._processes, [rank], EXIT_S if left else 0.0)
        if gone:
            told = f"rank {rank} is gone (process {self._processes[rank].pid})"
        elif left:
            told = f"rank {rank} has left"
        elif waited_s > self._timeout_s:
            told = f"no answer from rank {rank} within {self._timeout_s:g} s"
        else:
            return
        self._lost = f"rank {self.rank}: {told}"
        raise DeviceError(self._lost)

    def _blame(self, name: str, error: RuntimeError) -> str:
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        timed_out = "timed out" in str(error).lower()
        gone = ended(self._processes, others, 0.0 if timed_out else EXIT_S)
        if gone:
            told = f"rank {listed(gone)} is gone (process {listed([self._processes[rank].pid for rank in gone])})"
        elif timed_out:
            told = f"no answer from rank {listed(others)} within {self._timeout_s:g} s"
        else:
            told = f"the connection to rank {listed(others)} broke"
        return f"rank {self.rank}: {told}: {name} failed: {str(error).splitlines()[0]}"


def on_gpu(tensor: torch.Tensor) -> bool:
    """True for what the host does not see."""
    return tensor.device.type != "cpu"
