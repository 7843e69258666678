"""`LayerPages` as the C++ library takes them."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from deepseek_tgi.kernels.library import Pages
from deepseek_tgi.kernels.pages import LayerPages

_MODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.uint8: 3}


@dataclass(frozen=True, slots=True)
class NativePages:
    """The C struct and its address; lives as long as the view it was made from."""

    struct: Pages
    address: int


def native_pages(pages: LayerPages) -> NativePages:
    """The struct of a layer's pages, made once for each view."""
    if not pages.native:
        num_pages, heads, size, k_dim = pages.k.shape
        scales = [None if t is None else t.data_ptr() for t in (pages.k_scale, pages.v_scale)]
        struct = Pages(
            _MODES[pages.k.dtype], num_pages, heads, size, k_dim, pages.v.shape[3],
            pages.k.stride(0) * pages.k.element_size(), pages.k.data_ptr(), pages.v.data_ptr(), *scales,
        )  # fmt: skip
        pages.native.append(NativePages(struct, ctypes.addressof(struct)))
    made: NativePages = pages.native[0]
    return made
