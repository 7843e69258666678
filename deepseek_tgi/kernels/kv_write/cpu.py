"""Store keys and values, vectorised over tokens."""

from __future__ import annotations

import torch

from deepseek_tgi.kernels.common import ACTIVATIONS
from deepseek_tgi.kernels.frame import PlacedFrame
from deepseek_tgi.kernels.kv_write import check_kv_write
from deepseek_tgi.kernels.pages import LayerPages
from deepseek_tgi.kernels.vector_store import stored_keys, stored_values


def kv_write(
    pages: LayerPages, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor, placed: PlacedFrame | None = None
) -> None:
    """See the contract."""
    check_kv_write(pages, k, v, slots, placed, dtypes=ACTIVATIONS)
    k, v = k.float(), v.float()
    positions = slots if placed is None else placed.positions
    kept = slots >= 0
    if not bool(kept.all()):
        k, v, slots, positions = k[kept], v[kept], slots[kept], positions[kept]
        if not slots.numel():
            return
    page, place = slots // pages.block_size, slots % pages.block_size
    for (rows, scales), store, places in (
        (stored_keys(pages, k, placed, positions), pages.k, pages.k_scale),
        (stored_values(pages, v, placed), pages.v, pages.v_scale),
    ):
        store[page, :, place] = rows
        if places is not None and scales is not None:
            places[page, :, place] = scales
