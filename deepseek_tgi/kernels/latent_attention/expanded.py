"""A prompt's attention over keys and values made from its context's latents.

Choice: one kernel brings the context out of its pages, one product expands it for all heads, and one kernel attends;
rotary keys stay shared. Prevents: a dozen operators a layer, which left short prompts bound by the host, and keys that
are copied to be joined. Rejected: torch's attention. On a prompt with nothing before it that is cuDNN's, a fifth
faster, but it takes 40 ms to prepare for every length it has not met and 0.6 s for its first; behind a cached prefix it
is another one, half as fast as this.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import pad, scaled_dot_product_attention

from deepseek_tgi.kernels.cuda.program import Kernel, KernelSpec, Programs, spec
from deepseek_tgi.kernels.latent_attention.decode import GROUPS, HOPPER, MODES, RANK, ROPE, page_bytes, unfit
from deepseek_tgi.kernels.latent_attention.plain import read_context
from deepseek_tgi.kernels.pages import LatentPages
from deepseek_tgi.kernels.triton_launch import TritonLaunches

if TYPE_CHECKING:
    from deepseek_tgi.kernels.latent_attention.cuda import CudaUp

ELEMENTS_AT_ONCE = 1 << 26
"""Expanded keys and values that are held at a time, about: heads beyond take their turn."""
TILE = {"BM": 64, "BN": 32, "num_warps": 4, "num_stages": 2}
HOPPER_TILE = {"BM": 128, "BN": 64, "num_warps": 8, "num_stages": 3}
LARGEST = 128
"""Elements of a head's own key or value that the kernel takes."""
_WARPS = 4
_SIGNATURE = "ppplpipp"


def unpack_spec(mode: str, block_size: int) -> KernelSpec:
    """The kernel that brings a context out of its pages."""
    return spec(
        "latent_unpack", "latent_unpack", _SIGNATURE, MODE=MODES[mode], RANK=RANK, ROPE=ROPE,
        GROUP=GROUPS.get(mode, RANK), BLOCK=block_size,
    )  # fmt: skip


def tile_constants(rope_dim: int, nope_dim: int, v_dim: int) -> dict[str, int]:
    """Constants of the kernel that attends."""
    widths = {"R": rope_dim, "N": nope_dim, "V": v_dim}
    return {f"D{key}": width for key, width in widths.items()} | {
        f"P{key}": max(16, 1 << (width - 1).bit_length()) for key, width in widths.items()
    }


@dataclass(frozen=True, slots=True)
class Keys:
    """Some heads' keys and values: `rope [L, Dr]` of all, `made [L, h, nope + Dv]`, its own key before its value."""

    rope: torch.Tensor
    made: torch.Tensor
    nope: int


class ExpandedAttention:
    """The last tokens of one request over all of its context, causal."""

    def __init__(
        self, programs: Programs, capability: int = 0, *, interpreted: bool = False, tiled: bool = True
    ) -> None:
        """`tiled` False: torch's attention instead of the kernel, which is Triton's."""
        self._programs = programs
        self._shape = HOPPER_TILE if capability == HOPPER else TILE
        self._interpreted = interpreted
        self._tiled = tiled
        self._unpacking: dict[tuple[str, int], Kernel] = {}
        self._tiles: dict[tuple[int, int, int], tuple[TritonLaunches, dict[str, Any], dict[str, int]]] = {}

    def __call__(
        self,
        q: torch.Tensor,
        pages: LatentPages,
        table: torch.Tensor,
        length: int,
        up: CudaUp,
        *,
        scale: float,
        out: torch.Tensor,
    ) -> None:
        """`q [n, H, Dr + Dn]` and `out [n, H, Dv]` in bfloat16, the last tokens of a context of `length` in the pages
        that `table [P] int32` names.
        """
        latent, rope = self._context(pages, table, length)
        width = up.nope_dim + up.v_dim
        step = max(1, ELEMENTS_AT_ONCE // (length * width))
        attend = self._tile if self._tiled and max(up.nope_dim, up.v_dim) <= LARGEST else _whole
        if step >= up.num_heads:
            made = torch.mm(latent, up.rows.flatten(0, 1).t()).view(length, up.num_heads, width)
            attend(q, Keys(rope, made, up.nope_dim), scale, out)
            return
        for first in range(0, up.num_heads, step):
            rows = up.rows[first : first + step]
            made = torch.mm(latent, rows.flatten(0, 1).t()).view(length, -1, width)
            heads = slice(first, first + made.shape[1])
            attend(q[:, heads], Keys(rope, made, up.nope_dim), scale, out[:, heads])

    def _context(self, pages: LatentPages, table: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Latents `[L, R]` and rotary keys `[L, Dr]` in bfloat16."""
        if pages.kept(unfit) is not None:
            latent, rope = read_context(pages, table, length, torch.bfloat16)
            return latent, rope.contiguous()
        latent = torch.empty(length, RANK, dtype=torch.bfloat16, device=pages.latent.device)
        rope = torch.empty(length, ROPE, dtype=torch.bfloat16, device=pages.latent.device)
        key = pages.mode, pages.block_size
        kernel = self._unpacking.get(key)
        if kernel is None:
            kernel = self._unpacking[key] = self._programs.kernel(unpack_spec(*key))
        kernel(
            (-(-length // _WARPS), 1, 1), 32 * _WARPS,
            (pages.latent, pages.rope, pages.scale, pages.kept(page_bytes), table, length, latent, rope), overlap=True,
        )  # fmt: skip
        return latent, rope

    def _tile(self, q: torch.Tensor, keys: Keys, scale: float, out: torch.Tensor) -> None:
        tokens, (length, heads, _) = q.shape[0], keys.made.shape
        key = keys.rope.shape[1], keys.nope, out.shape[2]
        found = self._tiles.get(key)
        if found is None:
            found = self._tiles[key] = self._compiled(key)
        launches, constants, options = found
        launches(
            (-(-tokens // self._shape["BM"]), heads, 1),
            (
                q, q.stride(0), keys.rope, keys.made, keys.made.stride(0), out, out.stride(0), tokens, length - tokens,
                scale,
            ),
            constants, options, None,
        )  # fmt: skip

    def _compiled(self, key: tuple[int, int, int]) -> tuple[TritonLaunches, dict[str, Any], dict[str, int]]:
        """The kernel that attends for heads of such widths, its constants and Triton's options."""
        from deepseek_tgi.kernels.latent_attention.expanded_kernel import expanded_tile

        shape, cut = self._shape, {name: self._shape[name] for name in ("BM", "BN")}
        constants = tile_constants(*key) | cut | {"UPCAST": self._interpreted}
        return TritonLaunches(expanded_tile), constants, {name: shape[name] for name in shape if name not in cut}


def _whole(q: torch.Tensor, keys: Keys, scale: float, out: torch.Tensor) -> None:
    """As `_tile`, by torch's attention over keys that are put together."""
    whole = torch.cat((keys.rope.unsqueeze(1).expand(-1, keys.made.shape[1], -1), keys.made[..., : keys.nope]), 2)
    width, v_dim = whole.shape[2], out.shape[2]
    padded = max(width, v_dim)  # torch's faster attention wants values as wide as keys

    def prepared(x: torch.Tensor) -> torch.Tensor:
        return pad(x, (0, padded - x.shape[2])).transpose(0, 1).unsqueeze(0)

    mask = causal_lower_right(len(q), len(whole))
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        values = prepared(keys.made[..., keys.nope :])
        y = scaled_dot_product_attention(prepared(q), prepared(whole), values, attn_mask=mask, scale=scale)
    out.copy_(y[0, ..., :v_dim].transpose(0, 1))
