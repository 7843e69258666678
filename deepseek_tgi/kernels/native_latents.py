"""`LatentPages` as the C++ library takes them."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from deepseek_tgi.kernels import library
from deepseek_tgi.kernels.pages import LatentPages

_MODES = {"float32": 0, "bfloat16": 1, "float16": 2, "int8": 3, "int4": 4, "fp8_e4m3fn": 5}


@dataclass(frozen=True, slots=True)
class NativeLatents:
    """The C struct and its address; lives as long as the view it was made from."""

    struct: library.LatentPages
    address: int


def native_latents(pages: LatentPages) -> NativeLatents:
    """The struct of a layer's pages, made once for each view."""
    if not pages.native:
        scale = None if pages.scale is None else pages.scale.data_ptr()
        struct = library.LatentPages(
            _MODES[pages.mode], pages.latent.shape[0], pages.block_size, pages.rank, pages.rope_dim, pages.group,
            pages.latent.stride(0) * pages.latent.element_size(), pages.latent.data_ptr(), pages.rope.data_ptr(), scale,
        )  # fmt: skip
        pages.native.append(NativeLatents(struct, ctypes.addressof(struct)))
    made: NativeLatents = pages.native[0]
    return made
