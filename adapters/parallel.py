"""The ranks of one model: how they find each other, what they exchange, and what happens when one is lost.

Choice: the process group is made directly, on the address of the rendezvous alone, and every failure of an exchange is
a `DeviceError` that names the lost rank: ranks that have missed an exchange can never agree again, so the process
leaves. Prevents: a shard that waits for ever, or answers with half a model. Rejected: `init_process_group`, whose
global state outlives a failure, and whose sockets listen on every interface of the machine.

Source: `torch.distributed`, `ProcessGroupGloo` and `TCPStore`.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]  # documented there, not in its __all__

from deepseek_tgi.errors import ConfigError, DeviceError, ResourceError

logger = logging.getLogger(__name__)

TIMEOUT_S = 120.0
"""How long a rank waits for the others, at the start and in an exchange: TGI's own value."""
POLL_S = 0.02
Start = Callable[[], Any]
"""Begins an exchange; what it returns can be waited for."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where ranks meet and who is asking: `MASTER_ADDR`, `MASTER_PORT`, `RANK` and `WORLD_SIZE` of the launcher."""

    rank: int
    world_size: int
    address: str = "localhost"
    port: int = 29500
    timeout_s: float = TIMEOUT_S


@dataclass(frozen=True, slots=True)
class Process:
    """A rank's process; `machine` tells apart whose process ids mean nothing here."""

    pid: int
    machine: str

    @classmethod
    def own(cls) -> Process:
        """This one."""
        return cls(os.getpid(), _machine())

    def runs(self) -> bool:
        """False for a process of this machine that has ended; one of another machine counts as running."""
        if self.machine != _machine():
            return True
        try:
            status = Path(f"/proc/{self.pid}/stat").read_text()
        except OSError:
            return False
        return status.rpartition(")")[2].split()[0] not in {"Z", "X"}


class RankGroup:
    """The connected ranks. One thread at a time, and every rank makes the same calls in the same order.

    Raises: `DeviceError` from every exchange that fails, and from all that are tried after it.
    """

    def __init__(self, group: Any, meeting: Meeting, processes: Sequence[Process]) -> None:
        """Made by `join`. `group` is a process group of torch's, `processes` are those of all ranks."""
        self.rank = meeting.rank
        self.world_size = meeting.world_size
        self._timeout_s = meeting.timeout_s
        self._group = group
        self._processes = processes
        self._lost: str | None = None

    @property
    def first(self) -> bool:
        """True on rank 0, which adds what is to be added once."""
        return self.rank == 0

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Replace `tensor` (dense, any shape) by its sum over all ranks; the bits are the same on each."""
        self._wait("all_reduce", lambda: self._group.allreduce([tensor]))

    def gather_columns(self, own: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        """`[R, sum(widths)]` from every rank's `own [R, widths[rank]]`, in rank order."""
        rows, most = own.shape[0], max(widths)
        if own.shape[1] < most:
            own = torch.nn.functional.pad(own, (0, most - own.shape[1]))
        every = own.new_empty(self.world_size * rows, most)
        self._wait("all_gather", lambda: self._group._allgather_base(every, own))
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
        options: Any = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        self._wait("broadcast", lambda: self._group.broadcast([held], options))
        return int(held)

    def together(self) -> Together:
        """A context for work that exchanges: an error in it is fatal, since the other ranks wait for this one."""
        return Together(self)

    def break_up(self, reason: str) -> None:
        """Take part in no exchange any more: `reason` is the error of whoever tries."""
        self._lost = self._lost or reason

    def close(self) -> None:
        """Leave. The others are told by their next exchange."""
        self.break_up(f"rank {self.rank} has left the group")
        self._group.shutdown()

    def _wait(self, name: str, start: Start) -> None:
        if self._lost is not None:
            raise DeviceError(self._lost)
        try:
            start().wait()
        except RuntimeError as error:
            self._lost = self._blame(name, error)
            raise DeviceError(self._lost) from error

    def _blame(self, name: str, error: RuntimeError) -> str:
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        gone = [rank for rank in others if not self._processes[rank].runs()]
        if gone:
            told = f"rank {_numbers(gone)} is gone (process {_numbers([self._processes[rank].pid for rank in gone])})"
        elif "timed out" in str(error).lower():
            told = f"no answer from rank {_numbers(others)} within {self._timeout_s:g} s"
        else:
            told = f"the connection to rank {_numbers(others)} broke"
        return f"rank {self.rank}: {told}: {name} failed: {str(error).splitlines()[0]}"


class Together:
    """See `RankGroup.together`."""

    def __init__(self, group: RankGroup) -> None:
        self._group = group

    def __enter__(self) -> None:
        """Nothing to prepare."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Turn any error into a fatal one."""
        if error is None or isinstance(error, DeviceError):
            return
        reason = f"rank {self._group.rank}: a step failed that other ranks are in: {type(error).__name__}: {error}"
        self._group.break_up(reason)
        raise DeviceError(reason) from error


def join(meeting: Meeting) -> RankGroup:
    """Meet the other ranks.

    Raises: `ResourceError` for a port that is taken or an address that is none of ours, and naming ranks that do not
    come in time.
    """
    started = time.monotonic()
    deadline = started + meeting.timeout_s
    store = _open_store(meeting, deadline)
    own = Process.own()
    store.set(f"rank/{meeting.rank}", f"{own.pid} {own.machine}")
    _await_all(store, meeting, deadline)
    told = [store.get(f"rank/{rank}").decode().partition(" ") for rank in range(meeting.world_size)]
    group = _process_group(store, meeting)
    logger.info(
        "rank %d of %d met the others at %s:%d in %.2f s (gloo)",
        meeting.rank, meeting.world_size, meeting.address, meeting.port, time.monotonic() - started,
    )  # fmt: skip
    return RankGroup(group, meeting, [Process(int(pid), machine) for pid, _, machine in told])


def _process_group(store: Store, meeting: Meeting) -> Any:
    """The one place that knows what ranks talk through: gloo, since there are CPU kernels only."""
    if not dist.is_gloo_available():
        raise ConfigError("num_shard: this build of torch has no gloo, which ranks on CPUs talk through; expected 1")
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timedelta(seconds=meeting.timeout_s)
    options._devices = [gloo.create_device(hostname=_own_address(meeting))]
    try:
        return gloo(store, meeting.rank, meeting.world_size, options)
    except RuntimeError as error:
        raise ResourceError(
            f"rank {meeting.rank}: cannot connect to the other ranks: {str(error).splitlines()[0]}"
        ) from error


def _open_store(meeting: Meeting, deadline: float) -> Store:
    where = f"{meeting.address}:{meeting.port}"
    if meeting.rank == 0:
        listener = _listener(meeting)
    elif not _answers(meeting, deadline):
        raise ResourceError(
            f"rank {meeting.rank}: rank 0 is not at {where} after {meeting.timeout_s:g} s: did it start? It needs the "
            "same --master-addr and --master-port"
        )
    try:
        store: Store = TCPStore(
            meeting.address,
            meeting.port,
            meeting.world_size,
            meeting.rank == 0,
            timedelta(seconds=max(1.0, deadline - time.monotonic())),
            wait_for_workers=False,
            master_listen_fd=listener.detach() if meeting.rank == 0 else None,
        )
        return store
    except RuntimeError as error:
        raise ResourceError(f"rank {meeting.rank}: no rendezvous at {where}: {str(error).splitlines()[0]}") from error


def _listener(meeting: Meeting) -> socket.socket:
    """Rank 0's socket, bound to the rendezvous address alone."""
    family, address = _resolved(meeting)
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(meeting.world_size)
    except OSError as error:
        listener.close()
        taken = error.errno == errno.EADDRINUSE
        reason = "is in use by another program" if taken else f"cannot be bound ({error.strerror})"
        raise ResourceError(
            f"--master-port {meeting.port}: {meeting.address}:{meeting.port} {reason}; choose another --master-port"
        ) from error
    return listener


def _answers(meeting: Meeting, deadline: float) -> bool:
    """Wait until somebody listens at the rendezvous; asked here, since the store's own client logs every attempt."""
    while True:
        try:
            socket.create_connection((meeting.address, meeting.port), 1.0).close()
        except OSError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(POLL_S)
        else:
            return True


def _await_all(store: Store, meeting: Meeting, deadline: float) -> None:
    """Wait until every rank has said that it is here."""
    missing = list(range(meeting.world_size))
    while missing := [rank for rank in missing if not store.check([f"rank/{rank}"])]:
        if time.monotonic() >= deadline:
            raise ResourceError(
                f"rank {meeting.rank}: rank {_numbers(missing)} did not come to {meeting.address}:{meeting.port} "
                f"within {meeting.timeout_s:g} s: did it fail to start?"
            )
        time.sleep(POLL_S)


def _own_address(meeting: Meeting) -> str:
    """The address of ours that faces the rendezvous: loopback for ranks of one machine."""
    family, address = _resolved(meeting)
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends nothing: it only asks which way a packet would go
        return str(probe.getsockname()[0])


def _resolved(meeting: Meeting) -> tuple[socket.AddressFamily, tuple[Any, ...]]:
    try:
        found = socket.getaddrinfo(meeting.address, meeting.port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError(f"--master-addr {meeting.address}: no such host ({error.strerror})") from error
    return found[0], found[4]


def _machine() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def _numbers(numbers: Sequence[int]) -> str:
    return ", ".join(str(number) for number in numbers)
