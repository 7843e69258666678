"""Decode attention: pages come in 16-byte loads into registers and are multiplied where they lie."""

from __future__ import annotations

from dataclasses import replace

import torch
from compiled.kernels import (
    ADA,
    AMPERE,
    HOPPER,
    MATRIX_BF16,
    MOST_SHARED,
    WARPGROUP_MATRIX,
    WIDE_LOAD,
    CudaKernel,
    TritonKernel,
)

from deepseek_tgi.kernels.paged_attention.cuda import DecodeShape
from deepseek_tgi.kernels.paged_attention.triton import tile_constants, tile_shape
from deepseek_tgi.kv.layout import KVLayout, KVMode
from deepseek_tgi.kv.pool import KVPool

BF16 = torch.bfloat16
MATRIX_HALF = r"HMMA\.16816\.F32"
EIGHT_BYTES = r"LDG\.E\.(.*\.)?64.*"
TURN = r"MOVM\.16\.MT88"


def kernel(
    mode: str, width: int, ratio: int, archs: tuple[str, ...] = (HOPPER, AMPERE), *, centred: bool = False,
    fused: bool = False, cluster: int = 1,
) -> CudaKernel:  # fmt: skip
    """The kernel of heads of `width` elements, with as many registers as its blocks leave a thread."""
    shape = DecodeShape(mode, width, width, 16, ratio, BF16, BF16, centred, fused)
    tiling = replace(shape.tiling(fused or cluster > 1, cluster == 8), cluster=cluster)
    matrix = MATRIX_BF16 if mode == "bfloat16" else MATRIX_HALF
    registers = min(255, 65536 // (tiling.warps * 32 * tiling.blocks) // 8 * 8)
    load = EIGHT_BYTES if mode == "int4" and width == 64 else WIDE_LOAD  # a key's row is four loads of a lane or fewer
    return CudaKernel(shape.spec(tiling, 1024), registers, (load, matrix, TURN), archs)


CUDA = [
    kernel("bfloat16", 128, 4),
    kernel("bfloat16", 64, 7, (HOPPER,)),
    kernel("float16", 128, 4, (HOPPER,)),
    kernel("int8", 128, 4, (HOPPER,)),
    kernel("int8", 128, 16, (HOPPER,)),
    kernel("fp8_e4m3fn", 128, 4),
    kernel("int4", 128, 4, (HOPPER,)),
    kernel("int4", 128, 4, (HOPPER,), centred=True),
    kernel("int4", 128, 7, (HOPPER,), centred=True),
    kernel("int4", 64, 7, (HOPPER,), centred=True),
    kernel("fp8_e4m3fn", 128, 16, (HOPPER,), centred=True),
    kernel("int8", 128, 7, (HOPPER,), centred=True),
    kernel("int4", 128, 7, (HOPPER,), centred=True, cluster=8),
    kernel("int4", 128, 4, (HOPPER,), centred=True, cluster=8),
    kernel("int8", 128, 7, (HOPPER,), centred=True, fused=True, cluster=2),
    kernel("bfloat16", 128, 4, (HOPPER,), fused=True, cluster=8),
    kernel("int8", 128, 4, (HOPPER,), fused=True, cluster=8),
    kernel("int8", 128, 7, (HOPPER,), centred=True, fused=True, cluster=8),
    kernel("fp8_e4m3fn", 128, 4, (HOPPER,), fused=True, cluster=2),
    kernel("int4", 128, 4, (HOPPER,), cluster=8),
]


def tile(
    mode: str, width: int, ratio: int, rows: int | None, rotary: int = 0, must: tuple[str, ...] = (), parts: int = 1,
    arch: str = HOPPER,
) -> TritonKernel:  # fmt: skip
    """The Triton kernel for requests of `rows` rows over such a cache, its tile cut for `arch`."""
    pages = KVPool(KVLayout(1, 1, width, width, KVMode(mode)), 1).view(0)
    cut = tile_shape(pages, rows, centred=rotary > 0, parts=parts, most_shared=MOST_SHARED[arch])
    return TritonKernel(
        "deepseek_tgi.kernels.paged_attention.tile_kernel:paged_tile",
        {
            **dict.fromkeys(("q", "out"), "*bf16"),
            **dict.fromkeys(("k", "k_rest", "v", "k_scale", "v_scale"), "*u8"),
            **dict.fromkeys(("tables", "starts", "cached"), "*i32"),
            **dict.fromkeys(("centre", "cos_sin"), "*fp32"),
            **dict.fromkeys(("q_stride", "page_bytes", "columns", "batch"), "i32"),
            "scale": "fp32",
        },
        {**tile_constants(pages, ratio, rotary), "BM": cut["BM"], "BN": cut["BN"], "REST": parts > 1, "UPCAST": False},
        255,
        must,
        divisible=("q", "k", "k_rest", "v", "k_scale", "v_scale", "out", "q_stride", "page_bytes"),
        num_warps=cut["num_warps"],
        num_stages=cut["num_stages"],
        archs=(arch,),
        tuned=arch == HOPPER,
    )


TRITON = [
    tile("bfloat16", 128, 4, None, must=(WARPGROUP_MATRIX,)),
    tile("int8", 128, 7, None, must=(WARPGROUP_MATRIX,)),
    tile("bfloat16", 128, 7, None, must=(WARPGROUP_MATRIX,), parts=2),
    tile("fp8_e4m3fn", 128, 4, None, must=(WARPGROUP_MATRIX,)),
    tile("int4", 128, 4, None),
    tile("int8", 128, 7, 7, rotary=128),
    tile("int4", 64, 4, 4, rotary=64),
    *(tile("bfloat16", 128, 4, None, must=(MATRIX_BF16,), arch=arch) for arch in (AMPERE, ADA)),
    *(tile("int8", 128, 7, None, rotary=128, arch=arch) for arch in (AMPERE, ADA)),
    tile("bfloat16", 128, 7, None, must=(MATRIX_BF16,), parts=2, arch=ADA),
    tile("bfloat16", 256, 4, None, must=(MATRIX_BF16,), arch=ADA),
    tile("int4", 128, 4, None, rotary=128, arch=ADA),
    tile("int8", 128, 7, 7, rotary=128, arch=ADA),
]
