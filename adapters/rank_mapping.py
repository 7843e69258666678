"""How the ranks of one machine come to memory that all of them map."""

from __future__ import annotations

import secrets
from contextlib import suppress
from mmap import mmap
from typing import TYPE_CHECKING

from deepseek_tgi.kernels.rank_memory import attach, create, forget

if TYPE_CHECKING:
    from deepseek_tgi.adapters.parallel import RankGroup


def mapped_by_all(group: RankGroup, able: bool) -> mmap | None:
    """Memory that every rank has mapped, and nobody else will; None on all if one is not `able`, or finds no way."""
    name = f"deepseek-tgi-{group.first_says(secrets.randbits(62)):016x}"
    mapped: mmap | None = None
    try:
        with suppress(OSError):
            mapped = create(name, group.world_size) if group.first and able else None
        if not group.smallest(int(mapped is not None or not group.first)):
            return None
        with suppress(OSError):
            mapped = attach(name, group.world_size) if not group.first and able else mapped
        return mapped if group.smallest(int(mapped is not None)) else None
    finally:
        if group.first:
            forget(name)
