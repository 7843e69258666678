"""The native library as Python sees it: loaded once a process, every function declared to ctypes.

Two handles to the same code: `quick` keeps the interpreter lock and is for calls of microseconds (releasing the lock
would hand it to another thread at every op of a decode step); `slow` releases it, so that Health and Info are answered
during a long prefill.
"""

from __future__ import annotations

import ctypes
from ctypes import Structure, c_double, c_float, c_int64, c_uint64, c_void_p
from functools import lru_cache
from pathlib import Path
from typing import Any

from deepseek_tgi.kernels.compiler import BuildError, build, discard_private

__all__ = [
    "AttentionCall",
    "BuildError",
    "DenseWeight",
    "ExpertWeights",
    "FrameStruct",
    "LatentCall",
    "LatentPages",
    "LatentRows",
    "LayerExperts",
    "NativeLibrary",
    "Pages",
    "QuantWeight",
    "RankRound",
    "RouteCall",
    "UpWeight",
    "load",
]

QUICK_PRODUCTS = 1 << 26
"""Multiply-adds up to which a call is quick: some 0.3 ms on one core."""
QUICK_ELEMENTS = 1 << 18
"""Elements read and written once, up to which a call is quick; what a decode step of 64 rows of 4096 has."""
QUANTISED_COST = 16
"""What storing an element in a low-bit format takes, in elements read and written."""


class QuantWeight(Structure):
    """`QuantWeight` of native/api.h."""

    _fields_ = [
        *((name, c_int64) for name in ("n", "k", "group_size", "blocks_per_group", "blocks", "width")),
        *((name, c_int64) for name in ("bits", "scale_kind", "digits", "num_threads")),
        *((name, c_void_p) for name in ("codes", "scales", "zeros")),
    ]


class DenseWeight(Structure):
    """`DenseWeight` of native/api.h."""

    _fields_ = [
        *((name, c_int64) for name in ("n", "k", "kind", "num_threads", "block")),
        *((name, c_void_p) for name in ("data", "scales")),
    ]


class Pages(Structure):
    """`Pages` of native/api.h."""

    _fields_ = [
        *((name, c_int64) for name in ("mode", "num_pages", "heads", "block_size", "k_dim", "v_dim", "page_stride")),
        *((name, c_void_p) for name in ("k", "v", "k_scale", "v_scale")),
    ]


class FrameStruct(Structure):
    """`Frame` of native/api.h."""

    _fields_ = [
        *((name, c_void_p) for name in ("centre", "aim", "weight", "pairs")),
        ("pair_stride", c_int64),
        *((name, c_float) for name in ("k_scale", "v_scale")),
    ]


class LatentPages(Structure):
    """`LatentPages` of native/api.h."""

    _fields_ = [
        *((name, c_int64) for name in ("mode", "num_pages", "block_size", "rank", "rope_dim", "group", "page_stride")),
        *((name, c_void_p) for name in ("latent", "rope", "scale")),
    ]


class UpWeight(Structure):
    """`UpWeight` of native/api.h."""

    _fields_ = [
        *((name, c_int64) for name in ("heads", "nope", "v_dim", "v_pad", "rank", "kind")),
        *((name, c_void_p) for name in ("keys", "values")),
    ]


class LatentCall(Structure):
    """`LatentCall` of native/api.h."""

    _fields_ = [
        *((name, c_void_p) for name in ("q", "out", "cu_seqlens", "block_tables", "cache_lens", "expanded")),
        *((name, c_int64) for name in ("requests", "table_stride", "q_row", "num_threads")),
        ("scale", c_double),
    ]


class LatentRows(Structure):
    """`LatentRows` of native/api.h."""

    _fields_ = [
        *((name, c_void_p) for name in ("q", "latent", "rope", "cos_sin", "positions", "slots")),
        *((name, c_int64) for name in ("tokens", "heads", "q_dim", "q_row", "latent_row", "rope_row")),
        *((name, c_int64) for name in ("rotary", "num_threads")),
    ]


class AttentionCall(Structure):
    """`AttentionCall` of native/api.h."""

    _fields_ = [
        *((name, c_void_p) for name in ("q", "k", "v", "out", "cos_sin", "positions", "slots")),
        *((name, c_void_p) for name in ("cu_seqlens", "block_tables", "cache_lens")),
        *((name, c_int64) for name in ("tokens", "requests", "table_stride", "heads", "q_row", "k_row", "v_row")),
        *((name, c_int64) for name in ("rotary", "num_threads")),
        ("scale", c_double),
    ]


class RouteCall(Structure):
    """`RouteCall` of native/api.h."""

    _fields_ = [
        *((name, c_int64) for name in ("experts", "top_k", "groups", "top_groups", "counted")),
        *((name, c_int64) for name in ("sigmoid", "normalise", "num_threads")),
        ("scale", c_double),
    ]


class ExpertWeights(Structure):
    """`Expert` of native/api.h."""

    _fields_ = [
        *((name, c_int64) for name in ("gate_up_dense", "down_dense")),
        *((name, c_void_p) for name in ("gate_up", "down", "order")),
        ("layout", c_int64),
    ]


class LayerExperts(Structure):
    """`Experts` of native/api.h."""

    _fields_ = [
        *((name, c_int64) for name in ("count", "shared", "hidden", "num_layouts", "num_threads")),
        *((name, c_void_p) for name in ("experts", "layouts")),
    ]


class RankRound(Structure):
    """`RankRound` of native/api.h."""

    _fields_ = [*((name, c_int64) for name in ("rank", "world", "slot_floats")), ("round", c_uint64)]


_P, _I, _F = c_void_p, c_int64, c_float
_SIGNATURES: dict[str, list[Any]] = {
    "dstgi_quant_linear": [_P, _P, _I, _I, _P, _P, _P, _I, _P, _F],
    "dstgi_pack_codes": [_P, _P],
    "dstgi_quant_rows": [_P, _P, _I, _P],
    "dstgi_dense_linear": [_P, _P, _I, _I, _P, _P, _P],
    "dstgi_dense_rows": [_P, _P, _I, _P],
    "dstgi_rms_norm": [_P, _P, _P, *[_I] * 7, _F, _I],
    "dstgi_silu_mul": [_P, _P, _I, _I, _I],
    "dstgi_rope": [_P, _P, _P, _P, *[_I] * 9],
    "dstgi_kv_write": [_P, _P, _P, _P, *[_I] * 6, _P, _P, _P, _I],
    "dstgi_route": [_P, _P, _P, _I, _P, _P],
    "dstgi_moe": [_P, _P, _P, _P, _I, _I, _P, _P],
    "dstgi_meet": [_P, _P, _P, _I, _I, _I, _P],
    "dstgi_leave": [_P, _I],
    "dstgi_scratch_bytes": [_P],
    "dstgi_latent_write": [_P, _P, _P, _P, *[_I] * 4],
    "dstgi_latent_prepare": [_P, _P, _P, _F],
    "dstgi_latent_attention": [_P, _P, _P],
    "dstgi_qkv_attention": [_P, _P, _P, _P, _F, _P, _P],
    "dstgi_paged_attention": [_P, _P, _P, _P, _P, _P, *[_I] * 4, _F, _I, _P, _P, _I],
}


class NativeLibrary:
    """The loaded library at `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.quick = _declare(ctypes.PyDLL(str(path)))
        self.slow = _declare(ctypes.CDLL(str(path)))

    def handle(self, products: int) -> Any:
        """The handle for a call of so many multiply-adds."""
        return self.quick if products <= QUICK_PRODUCTS else self.slow

    def pass_handle(self, elements: int) -> Any:
        """The handle for a call that goes over so many elements once."""
        return self.quick if elements <= QUICK_ELEMENTS else self.slow

    def scratch_bytes(self) -> int:
        """Bytes that the library keeps between calls, in all threads."""
        held = c_int64()
        self.quick.dstgi_scratch_bytes(ctypes.addressof(held))
        return held.value


def _declare(handle: Any) -> Any:
    for name, arguments in _SIGNATURES.items():
        function = getattr(handle, name)
        function.argtypes = arguments
        function.restype = None
    return handle


@lru_cache(maxsize=4)
def load(extra_flags: tuple[str, ...] = ()) -> NativeLibrary:
    """Build if needed and load. Raises `BuildError`; `extra_flags` serve tests (the portable build)."""
    try:
        library = NativeLibrary(build(extra_flags))
    except (OSError, AttributeError) as error:
        raise BuildError(f"loading the native library failed: {error}") from error
    discard_private(library.path)
    return library
