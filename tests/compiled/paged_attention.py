"""Decode attention: pages come in 16-byte loads into registers and are multiplied where they lie."""

from __future__ import annotations

import torch
from compiled.kernels import AMPERE, HOPPER, MATRIX_BF16, WIDE_LOAD, CudaKernel

from deepseek_tgi.kernels.paged_attention.cuda import DecodeShape

BF16 = torch.bfloat16
MATRIX_HALF = r"HMMA\.16816\.F32"
TURN = r"MOVM\.16\.MT88"


def kernel(mode: str, width: int, ratio: int, archs: tuple[str, ...] = (HOPPER, AMPERE)) -> CudaKernel:
    """The kernel of heads of `width` elements, with as many registers as its blocks leave a thread."""
    shape = DecodeShape(mode, width, width, 16, ratio, BF16, BF16)
    tiling = shape.tiling
    matrix = MATRIX_BF16 if mode == "bfloat16" else MATRIX_HALF
    registers = 65536 // (tiling.warps * 32 * tiling.blocks) // 8 * 8
    return CudaKernel(shape.spec(tiling), registers, (WIDE_LOAD, matrix, TURN), archs)


CUDA = [
    kernel("bfloat16", 128, 4),
    kernel("bfloat16", 64, 7, (HOPPER,)),
    kernel("float16", 128, 4, (HOPPER,)),
    kernel("int8", 128, 4, (HOPPER,)),
    kernel("int8", 128, 16, (HOPPER,)),
    kernel("fp8_e4m3fn", 128, 4),
]
