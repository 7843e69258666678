"""Store keys and values, one token at a time."""

from __future__ import annotations

import torch

from deepseek_tgi.kernels.int8_format import HALF_MAX, quantise_rows
from deepseek_tgi.kernels.kv_write import check_kv_write
from deepseek_tgi.kernels.pages import LayerPages


def kv_write(pages: LayerPages, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
    """See the contract."""
    check_kv_write(pages, k, v, slots)
    for t in range(slots.shape[0]):
        slot = int(slots[t])
        if slot < 0:
            continue
        page, place = divmod(slot, pages.block_size)
        for x, store, scales in ((k[t], pages.k, pages.k_scale), (v[t], pages.v, pages.v_scale)):
            if scales is not None:
                store[page, :, place], scales[page, :, place] = quantise_rows(x)
            elif store.dtype == torch.float16:
                store[page, :, place] = x.clamp(-HALF_MAX, HALF_MAX).to(torch.float16)
            else:
                store[page, :, place] = x.to(store.dtype)
