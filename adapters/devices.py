"""Which device a rank computes on."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from deepseek_tgi.errors import ConfigError

WISHES = "auto, cpu, cuda or cuda:N"


def resolve_device(wish: str, rank: int = 0, world_size: int = 1) -> torch.device:
    """The device of `rank`: `auto` is a GPU where torch has one for every rank, else the CPU.

    `cuda` counts from the first GPU and `cuda:N` from that one, a rank each. Raises `ConfigError` for a wish that is
    none, or for a GPU that is not there.
    """
    if wish == "cpu":
        return torch.device("cpu")
    kind, _, number = wish.partition(":")
    if wish not in ("auto", "cuda") and not (kind == "cuda" and number.isdecimal() and len(number) <= 4):
        raise ConfigError(f"device: got {wish!r}, expected {WISHES}")
    first, found = int(number or 0), torch.cuda.device_count() if torch.cuda.is_available() else 0
    if first + world_size <= found:
        return torch.device("cuda", first + rank)
    if wish == "auto":
        return torch.device("cpu")
    ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
    raise ConfigError(f"device: got {wish} for {ranks}, and torch {torch.__version__} sees {found} CUDA devices")


def computing_on(device: torch.device) -> AbstractContextManager[object]:
    """A context in which events, streams and kernels that name no device are `device`'s, not the first GPU's."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
