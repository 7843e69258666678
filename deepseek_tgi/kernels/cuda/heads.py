"""What the kernels of per-head caches share: how they see pages, and the launch that brings heads into them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deepseek_tgi.kernels.common import describe, refuse
from deepseek_tgi.kernels.cuda.program import Kernel, KernelSpec, Programs, spec
from deepseek_tgi.kernels.frame import Frame
from deepseek_tgi.kernels.pages import LayerPages

MODES = {"bfloat16": 0, "float16": 1, "int8": 2, "fp8_e4m3fn": 3, "int4": 4}
"""Formats of pages that attention reads, as `heads.cuh` numbers them."""
STORED_MODES = {**MODES, "float32": 5}
"""Formats that `kv_write.cu` writes."""
_SIGNATURE = "pli" + "plpli" + "ppf" + "piipp" + "ppppl" + "pffpp"
_WARPS = 4


@dataclass(frozen=True, slots=True)
class Norms:
    """Weights of the norms of query and key heads, `[D] float32`."""

    q: torch.Tensor
    k: torch.Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class Turns:
    """Where tokens stand and what rotates them: `positions [T] int32`, `cos_sin [P, R] float32`.

    `rotates` is false for keys that are rotated already: then the table serves the centre of a frame alone.
    """

    positions: torch.Tensor
    cos_sin: torch.Tensor
    rotates: bool


class HeadWriter:
    """Norm, rotation and the write into pages, one launch."""

    def __init__(self, programs: Programs) -> None:
        self._programs = programs
        self._kernels: dict[tuple[object, ...], Kernel] = {}

    def __call__(
        self,
        q: torch.Tensor | None,
        k: torch.Tensor,
        v: torch.Tensor,
        pages: LayerPages,
        slots: torch.Tensor,
        *,
        turns: Turns | None = None,
        norms: Norms | None = None,
        frame: Frame | None = None,
    ) -> None:
        """Write `k [T, G, Dk]` and `v [T, G, Dv]`; with `turns` that rotate, `q [T, H, Dk]` and k change in place."""
        tokens = k.shape[0]
        if tokens == 0:
            return
        heads = 0 if q is None else q.shape[1]
        centre = frame.centre if frame is not None and pages.quantised else None
        aim, weight = (None, None) if frame is None or pages.mode != "int4" else (frame.aim, frame.weight)
        k_scale, v_scale = (None, None) if frame is None else (frame.k_scale, frame.v_scale)
        self._kernel(pages, k.dtype)(
            (-(-(heads + 2 * pages.num_heads) // _WARPS), tokens, 1),
            _WARPS * 32,
            (
                q, 0 if q is None else q.stride(0), heads, k, k.stride(0), v, v.stride(0), pages.num_heads,
                None if norms is None else norms.q, None if norms is None else norms.k,
                0.0 if norms is None else norms.eps,
                None if turns is None else turns.cos_sin, 0 if turns is None else turns.cos_sin.shape[1],
                int(turns is not None and turns.rotates), None if turns is None else turns.positions, slots,
                pages.k, pages.v, pages.k_scale, pages.v_scale, pages.kept(page_bytes), centre,
                -1.0 if k_scale is None else k_scale, -1.0 if v_scale is None else v_scale,
                aim, weight,
            ),
            overlap=True,
        )  # fmt: skip

    def _kernel(self, pages: LayerPages, dtype: torch.dtype) -> Kernel:
        key = pages.kept(_shape), dtype
        found = self._kernels.get(key)
        if found is None:
            found = self._kernels[key] = self._programs.kernel(
                write_spec(pages.mode, pages.k_dim, pages.v_dim, pages.block_size, x_bf16=dtype == torch.bfloat16)
            )
        return found


def _shape(pages: LayerPages) -> tuple[str, int, int, int]:
    """What of pages decides the kernel."""
    return pages.mode, pages.k_dim, pages.v_dim, pages.block_size


def write_spec(mode: str, k_dim: int, v_dim: int, block_size: int, *, x_bf16: bool) -> KernelSpec:
    """The kernel of a cache's shape."""
    return spec(
        "kv_write", "kv_write", _SIGNATURE, MODE=STORED_MODES[mode], DK=k_dim, DV=v_dim, BLOCK=block_size,
        X_BF16=int(x_bf16),
    )  # fmt: skip


def page_bytes(pages: LayerPages) -> int:
    """Bytes from a page to the next. Raises `GenerationError` for parts that do not lie as kernels read them."""
    stores = [x for x in (pages.k, pages.v, pages.k_scale, pages.v_scale) if x is not None]
    step = pages.k.stride(0) * pages.k.element_size()
    for store in stores:
        if store.stride(0) * store.element_size() != step or store.data_ptr() % 16 or step % 16:
            refuse(
                f"attention: got {describe('pages', store)} {store.stride(0) * store.element_size()} bytes apart at "
                f"address {store.data_ptr():#x}, expected all parts {step} apart, at multiples of 16"
            )
    return step
