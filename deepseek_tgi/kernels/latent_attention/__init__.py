"""Causal attention over cached latents (MLA); prefill, chunks and decode are the same call.

`pack_up(weight [H * (Dn + Dv), R] f32, num_heads, nope_dim) -> PackedUp`: the up-projection `kv_b_proj`, rows of a head
being its Dn key rows, then its Dv value rows.
`latent_attention(q [T, H, Dr + Dn], pages: LatentPages, up, inputs, scale, out [T, H, Dv]) -> out`, q and out
activations. A query head is its rotary part, already rotated, then the part without position. Query `i` of request `b`
stands at position `cache_lens[b] + i` and sees positions 0 to its own, read from the pages only (so `latent_write` of
the step comes first). The key of head h at position p is `(rope[p], up_k[h] latent[p])`, its value `up_v[h] latent[p]`;
the score is their product with q times `scale`; softmax and sums are float32.

Two forms give the same numbers up to rounding. Absorbed: queries go into latent space (`up_k[h]^T q`) and attention
runs over the latents themselves, reading each once for all heads. Expanded: keys and values of the context are made
first, which costs R * (Dn + Dv) a position and head once, and Dr + Dn + Dv instead of Dr + 2R for each pair. `form`
`auto` takes the cheaper one for each request by its own token counts, so that a row never depends on its neighbours;
`absorbed` keeps a row's bits the same however a prompt is cut into chunks as well (both on the native kernels).
A request with one token in the step is always absorbed.
Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1 and appendix C.
"""

from __future__ import annotations

from typing import Protocol

import torch

from deepseek_tgi.core import ForwardInputs
from deepseek_tgi.kernels.common import FLOAT32, Dtypes, describe, named, refuse
from deepseek_tgi.kernels.pages import LatentPages

__all__ = [
    "FORMS",
    "LatentAttention",
    "PackUp",
    "PackedUp",
    "check_latent_attention",
    "prefers_expanded",
    "takes_expanded",
]

FORMS = ("auto", "absorbed", "expanded")


class PackedUp:
    """The up-projection in the form one implementation wants; only that implementation reads inside."""

    __slots__ = ("nbytes", "nope_dim", "num_heads", "rank", "v_dim")

    def __init__(self, num_heads: int, nope_dim: int, v_dim: int, rank: int, nbytes: int) -> None:
        self.num_heads = num_heads
        self.nope_dim = nope_dim
        self.v_dim = v_dim
        self.rank = rank
        self.nbytes = nbytes


class PackUp(Protocol):
    """See the module's docstring."""

    def __call__(self, weight: torch.Tensor, num_heads: int, nope_dim: int) -> PackedUp: ...


class LatentAttention(Protocol):
    """See the module's docstring."""

    def __call__(
        self,
        q: torch.Tensor,
        pages: LatentPages,
        up: PackedUp,
        inputs: ForwardInputs,
        *,
        scale: float,
        out: torch.Tensor,
        form: str = "auto",
    ) -> torch.Tensor: ...


def prefers_expanded(tokens: int, cached: int, up: PackedUp, rope_dim: int) -> bool:
    """True if making keys and values costs less than attending in latent space, counted in multiply-adds a head.

    On the native kernels both forms run at 5 to 7 billion vector operations a second and core (Zen 5, 4 to 128 heads,
    rank 128 and 512), so their counts compare. Positions are made by sixteen, and reading the weights to make them
    costs as much as 8 positions more.
    """
    pairs = tokens * cached + tokens * (tokens + 1) // 2
    rows = up.nope_dim + up.v_dim
    made = -(-(cached + tokens) // 16) * 16 + 8
    absorbed = pairs * (rope_dim + 2 * up.rank) + tokens * up.rank * rows
    expanded = pairs * (rope_dim + rows) + made * up.rank * rows
    return expanded < absorbed


def takes_expanded(form: str, tokens: int, cached: int, up: PackedUp, rope_dim: int) -> bool:
    """The form a request of `tokens` new tokens after `cached` is computed in: true if expanded."""
    if tokens < 2 or form == "absorbed":
        return False
    return form == "expanded" or prefers_expanded(tokens, cached, up, rope_dim)


def check_latent_attention(
    q: torch.Tensor,
    pages: LatentPages,
    up: PackedUp,
    inputs: ForwardInputs,
    *,
    out: torch.Tensor,
    form: str,
    dtypes: Dtypes = FLOAT32,
) -> None:
    """Raise `GenerationError` for operands that do not fit. The values in `inputs` are the engine's promise."""
    width = pages.rope_dim + up.nope_dim
    if form not in FORMS:
        refuse(f"latent_attention: got form {form!r}, expected one of {', '.join(FORMS)}")
    if up.rank != pages.rank:
        refuse(f"latent_attention: got an up-projection of rank {up.rank}, expected {pages.rank}")
    if not (q.dtype in dtypes and q.dim() == 3 and tuple(q.shape[1:]) == (up.num_heads, width)):
        refuse(f"latent_attention: got {describe('q', q)}, expected [T, {up.num_heads}, {width}] {named(dtypes)}")
    for name in ("cu_seqlens", "block_tables", "cache_lens"):
        tensor: torch.Tensor = getattr(inputs, name)
        if tensor.dtype != torch.int32:
            refuse(f"latent_attention: got {describe(name, tensor)}, expected int32")
    needed = -(-inputs.max_context // pages.block_size)
    if not (inputs.block_tables.shape[1] >= needed or q.shape[0] == 0):
        refuse(
            f"latent_attention: got {describe('block_tables', inputs.block_tables)}, expected {needed} columns or more "
            f"for a context of {inputs.max_context}"
        )
    shape = (q.shape[0], up.num_heads, up.v_dim)
    if not (tuple(out.shape) == shape and out.dtype in dtypes and out.is_contiguous()):
        refuse(f"latent_attention: got {describe('out', out)}, expected {list(shape)} {named(dtypes)}, contiguous")
