"""How the ranks of one model find each other at the address and port that the launcher gives them.

Choice: every wait is bounded and made here, so that its error can say which rank is missing, and the sockets are bound
to the rendezvous address alone. Rejected: leaving both to torch's store, which says neither and listens on every
interface of the machine.
"""

from __future__ import annotations

import errno
import logging
import socket
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # documented there, not in its __all__

from deepseek_tgi.adapters.parallel import RankGroup
from deepseek_tgi.adapters.rank_processes import Process, listed
from deepseek_tgi.errors import ConfigError, ResourceError

logger = logging.getLogger(__name__)

TIMEOUT_S = 120.0
"""How long a rank waits for the others, at the start and in an exchange: TGI's own value."""
POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where ranks meet and who is asking: `MASTER_ADDR`, `MASTER_PORT`, `RANK` and `WORLD_SIZE` of the launcher."""

    rank: int
    world_size: int
    address: str = "localhost"
    port: int = 29500
    timeout_s: float = TIMEOUT_S


def join(meeting: Meeting, device: torch.device | None = None) -> RankGroup:
    """Meet the other ranks; what lies on `device`, a GPU, can be exchanged as well.

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
    on_gpus = None if device is None or device.type == "cpu" else _nccl(store, meeting, device)
    logger.info(
        "rank %d of %d met the others at %s:%d in %.2f s (%s)",
        meeting.rank, meeting.world_size, meeting.address, meeting.port, time.monotonic() - started,
        "gloo" if on_gpus is None else "gloo and NCCL",
    )  # fmt: skip
    processes = [Process(int(pid), machine) for pid, _, machine in told]
    return RankGroup(group, meeting.rank, processes, meeting.timeout_s, on_gpus)


def _process_group(store: Store, meeting: Meeting) -> Any:
    """What ranks agree through, and exchange through what lies in host memory: gloo."""
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


def _nccl(store: Store, meeting: Meeting, device: torch.device) -> Any:
    """What ranks exchange through what lies on GPUs; they have met in a first sum when this returns."""
    if not dist.is_nccl_available():
        raise ConfigError("num_shard: this build of torch has no NCCL, which ranks on GPUs talk through; expected 1")
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = timedelta(seconds=meeting.timeout_s)
    try:
        with torch.cuda.device(device):
            group = nccl(PrefixStore("nccl", store), meeting.rank, meeting.world_size, options)
            group.allreduce([torch.ones(1, device=device)]).wait()
            torch.cuda.synchronize(device)
    except RuntimeError as error:
        raise ResourceError(f"rank {meeting.rank}: NCCL cannot connect: {str(error).splitlines()[0]}") from error
    return group


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
                f"rank {meeting.rank}: rank {listed(missing)} did not come to {meeting.address}:{meeting.port} "
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
