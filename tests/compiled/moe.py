"""Experts: weights come in 16-byte loads past L1 or background copies, products are matrix instructions in bfloat16."""

from __future__ import annotations

from compiled.kernels import HOPPER, MATRIX_BF16, WARPGROUP_MATRIX, WIDE_COPY, CudaKernel

from deepseek_tgi.kernels.moe.shape import FEW, ONE, PANEL, STREAM, LayerShape, SortedWay

SHAPE = LayerShape(128, False, experts=64, top_k=6, pieces=2, hidden=2048, inner=1408)
"""DeepSeek-V2-Lite's."""
MULTIPROCESSORS = 132
STREAMED = (MATRIX_BF16, WIDE_COPY)
LOADED = (MATRIX_BF16, r"LDG\.E\.NA\..*128.*")
UP, DOWN = "moe_gate_up", "moe_down"

CUDA = [
    *(CudaKernel(spec, 80, STREAMED) for spec in SHAPE.one_specs(ONE, MULTIPROCESSORS)),
    *(CudaKernel(spec, 128, STREAMED) for spec in SHAPE.stream_specs(STREAM, MULTIPROCESSORS)),
    *(CudaKernel(SHAPE.product(name, FEW)[0], 96, LOADED) for name in (UP, DOWN)),
    *(CudaKernel(SHAPE.product(name, SortedWay(rows))[0], 168, LOADED) for rows in (8, 32) for name in (UP, DOWN)),
    *(CudaKernel(SHAPE.product(name, PANEL)[0], 128, (WARPGROUP_MATRIX, WIDE_COPY), (HOPPER,)) for name in (UP, DOWN)),
]
