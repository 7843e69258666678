"""Store keys and values, one token at a time."""

from __future__ import annotations

import torch

from deepseek_tgi.kernels.frame import PlacedFrame
from deepseek_tgi.kernels.kv_write import check_kv_write
from deepseek_tgi.kernels.pages import LayerPages
from deepseek_tgi.kernels.vector_store import stored_keys, stored_values


def kv_write(
    pages: LayerPages, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor, placed: PlacedFrame | None = None
) -> None:
    """See the contract."""
    check_kv_write(pages, k, v, slots, placed)
    for t in range(slots.shape[0]):
        slot = int(slots[t])
        if slot < 0:
            continue
        page, place = divmod(slot, pages.block_size)
        positions = slots[t : t + 1] if placed is None else placed.positions[t : t + 1]
        for (rows, scales), store, places in (
            (stored_keys(pages, k[t : t + 1], placed, positions), pages.k, pages.k_scale),
            (stored_values(pages, v[t : t + 1], placed), pages.v, pages.v_scale),
        ):
            store[page, :, place] = rows[0]
            if places is not None and scales is not None:
                places[page, :, place] = scales[0]
