"""Store keys and values, vectorised over tokens."""

from __future__ import annotations

import torch

from deepseek_tgi.kernels.int8_format import HALF_MAX, quantise_rows
from deepseek_tgi.kernels.kv_write import check_kv_write
from deepseek_tgi.kernels.pages import LayerPages


def kv_write(pages: LayerPages, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
    """See the contract."""
    check_kv_write(pages, k, v, slots)
    kept = slots >= 0
    if not bool(kept.all()):
        k, v, slots = k[kept], v[kept], slots[kept]
    page, place = slots // pages.block_size, slots % pages.block_size
    for x, store, scales in ((k, pages.k, pages.k_scale), (v, pages.v, pages.v_scale)):
        if scales is not None:
            store[page, :, place], scales[page, :, place] = quantise_rows(x)
        elif store.dtype == torch.float16:
            store[page, :, place] = x.clamp(-HALF_MAX, HALF_MAX).to(torch.float16)
        else:
            store[page, :, place] = x.to(store.dtype)
