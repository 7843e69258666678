"""`LayerPages` as the C++ library takes them."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from deepseek_tgi.kernels.library import Pages
from deepseek_tgi.kernels.pages import LayerPages

_MODES = ("float32", "bfloat16", "float16", "int8", "fp8_e4m3fn", "int4")


@dataclass(frozen=True, slots=True)
class NativePages:
    """The C struct and its address; lives as long as the view it was made from."""

    struct: Pages
    address: int


def native_pages(pages: LayerPages) -> NativePages:
    """The struct of a layer's pages, made once for each view."""
    if not pages.native:
        scales = [None if t is None else t.data_ptr() for t in (pages.k_scale, pages.v_scale)]
        struct = Pages(
            _MODES.index(pages.mode), pages.k.shape[0], pages.num_heads, pages.block_size, pages.k_dim, pages.v_dim,
            pages.k.stride(0) * pages.k.element_size(), pages.k.data_ptr(), pages.v.data_ptr(), *scales,
        )  # fmt: skip
        pages.native.append(NativePages(struct, ctypes.addressof(struct)))
    made: NativePages = pages.native[0]
    return made
