"""Experts: weights come in 16-byte loads past L1, products are matrix instructions in bfloat16."""

from __future__ import annotations

from compiled.kernels import MATRIX_BF16, CudaKernel

from deepseek_tgi.kernels.moe.cuda import LayerShape
from deepseek_tgi.kernels.moe.cuda_experts import Way

MUST = (MATRIX_BF16, r"LDG\.E\.NA\..*128.*")


def kernels(way: Way, registers: dict[str, int]) -> list[CudaKernel]:
    """Those that a layer of DeepSeek-V2-Lite's size runs."""
    shape = LayerShape(128, False, experts=64, top_k=6, pieces=2, hidden=2048, inner=1408, way=way)
    return [CudaKernel(shape.spec(name), most, MUST) for name, most in registers.items()]


CUDA = [
    *kernels(Way(8, wide=False, warps=8, depth=2), {"moe_gate_up_one": 96, "moe_down_one": 128, "moe_gate_up": 96}),
    *kernels(Way(8, wide=True, warps=4, depth=2), {"moe_gate_up_wide": 104, "moe_down_wide": 104}),
    *kernels(Way(32, wide=True, warps=4, depth=2), {"moe_gate_up_wide": 168, "moe_down_wide": 168}),
]
