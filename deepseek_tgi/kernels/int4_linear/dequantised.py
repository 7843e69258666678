"""INT4 linear for any number of rows: the weight dequantised into a scratch matrix, then torch's own product.

Right for every shape the layout holds, and what the other kernels must not be slower than.
"""

from __future__ import annotations

import torch

from deepseek_tgi.kernels.common import finish_linear
from deepseek_tgi.kernels.cuda.program import KernelSpec, Programs, spec
from deepseek_tgi.kernels.int4_linear.layout import CHUNK, CudaInt4
from deepseek_tgi.kernels.wide_product import wide_product

SOURCE = "int4_dequantise"
SIGNATURE = "pppiiii"
_THREADS = 256
_EACH = 1


def dequantise(programs: Programs, w: CudaInt4, dtype: torch.dtype) -> torch.Tensor:
    """The weight as `[N, K]`, bfloat16 (rounded once) or float32."""
    out = torch.empty(w.out_features, w.in_features, dtype=dtype, device=w.codes.device)
    grid = (-(-w.chunks // (_THREADS // 32 * _EACH)), w.codes.shape[0], 1)
    groups = w.chunks * CHUNK // w.group
    arguments = (w.codes, w.metas, out, w.out_features, w.in_features, w.chunks, groups)
    kernel = programs.kernel(dequantise_spec(w.group, w.scale_kind, dtype == torch.bfloat16))
    kernel(grid, _THREADS, arguments)
    return out


def dequantise_spec(group: int, scale_kind: int, out_bf16: bool) -> KernelSpec:
    """The kernel for a weight of that group size and kind of scales."""
    return spec(
        SOURCE,
        SOURCE,
        SIGNATURE,
        GROUP=group,
        SCALE_KIND=scale_kind,
        OUT_BF16=int(out_bf16),
        THREADS=_THREADS,
        EACH=_EACH,
    )


def multiply(programs: Programs, x: torch.Tensor, w: CudaInt4) -> torch.Tensor:
    """`x [M, K]` times the weight in x's precision, float32."""
    return wide_product(x, dequantise(programs, w, x.dtype))


def write(
    programs: Programs,
    x: torch.Tensor,
    w: CudaInt4,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> None:
    """`out = x w^T + bias + residual`; what torch's product can add and round as it writes takes no pass of its own."""
    weight = dequantise(programs, w, x.dtype)
    if bias is not None or not x.is_cuda or out.dtype not in (x.dtype, torch.float32):
        finish_linear(wide_product(x, weight), bias, residual, out)
    elif residual is None and out.dtype == x.dtype:
        torch.mm(x, weight.t(), out=out)
    elif residual is None:
        torch.mm(x, weight.t(), out_dtype=torch.float32, out=out)
    elif residual.dtype == out.dtype == torch.float32:
        torch.addmm(residual, x, weight.t(), out_dtype=torch.float32, out=out)
    else:
        finish_linear(wide_product(x, weight), bias, residual, out)
