"""Causal attention of one request over keys and values expanded from its latents, in Triton.

A program takes BM rows of one head. A key is the rotary part, which all heads share, and a part of its own; both are
multiplied where they lie, so no key is ever put together. Loads are checked only where a tile's rows see different
keys. UPCAST is for the interpreter, which multiplies bfloat16 wrongly.
"""

import triton
import triton.language as tl

from deepseek_tgi.kernels.paged_attention.tile_kernel import LOG2_E, product


@triton.jit
def _read(start, lines, seen, D: tl.constexpr, P: tl.constexpr, MASKED: tl.constexpr):
    """`[BN, P]` of rows that begin at `start + lines`, D wide; zeros beyond, and where not seen."""
    d = tl.arange(0, P)
    at = start + lines[:, None] + d[None, :]
    if MASKED:
        return tl.load(at, mask=seen[:, None] & (d < D)[None, :], other=0.0)
    if P != D:
        return tl.load(at, mask=(d < D)[None, :], other=0.0)
    return tl.load(at)


@triton.jit
def _piece(
    n, most, total, sums, rotary, rest, position, length, grow, rope, own, stride,
    DR: tl.constexpr, DN: tl.constexpr, DV: tl.constexpr, PR: tl.constexpr, PN: tl.constexpr, PV: tl.constexpr,
    BN: tl.constexpr, MASKED: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """The online softmax over the keys from `n` on: largest score so far, sum of weights, weighted values."""
    at = n + tl.arange(0, BN)
    seen = at < length
    lines = at.to(tl.int64) * stride
    scores = product(rest, tl.trans(_read(own, lines, seen, DN, PN, MASKED)), UPCAST)
    scores += product(rotary, tl.trans(_read(rope, at * DR, seen, DR, PR, MASKED)), UPCAST)
    scores *= grow
    if MASKED:
        scores = tl.where(at[None, :] <= position[:, None], scores, float("-inf"))
    now = tl.maximum(most, tl.max(scores, 1))
    weights = tl.exp2(scores - now[:, None])
    factor = tl.exp2(most - now)
    total = total * factor + tl.sum(weights, 1)
    values = _read(own + DN, lines, seen, DV, PV, MASKED)
    sums = sums * factor[:, None] + product(weights.to(tl.bfloat16), values, UPCAST)
    return now, total, sums


@triton.jit(do_not_specialize=["tokens", "ahead"])
def expanded_tile(
    q, q_stride, rope, made, made_stride, out, out_stride, tokens, ahead, scale,
    DR: tl.constexpr, DN: tl.constexpr, DV: tl.constexpr, PR: tl.constexpr, PN: tl.constexpr, PV: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """`out[t, h] = softmax(scale q[t, h] K[:, h]') V[:, h]` for one tile; the grid is (tiles of tokens, heads).

    `q [tokens, H, DR + DN]`, rotary part first; `rope [L, DR]`; `made [L, H, DN + DV]`; `out [tokens, H, DV]`. The
    strides are of rows; L is `ahead + tokens`.
    """
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest contexts first
    head = tl.program_id(1)
    rows = tile * BM + tl.arange(0, BM)
    real = rows < tokens
    position = ahead + rows
    length = ahead + tokens
    lines = rows.to(tl.int64) * q_stride + head * (DR + DN)
    rotary = _read(q, lines, real, DR, PR, True)
    rest = _read(q + DR, lines, real, DN, PN, True)
    own = made + head * (DN + DV)
    most = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    sums = tl.zeros((BM, PV), tl.float32)
    grow = scale * LOG2_E
    whole = (ahead + tile * BM + 1) // BN * BN  # keys that every row sees
    for n in range(0, whole, BN):
        most, total, sums = _piece(
            n, most, total, sums, rotary, rest, position, length, grow, rope, own, made_stride,
            DR, DN, DV, PR, PN, PV, BN, False, UPCAST,
        )  # fmt: skip
    for n in range(whole, tl.minimum(ahead + tile * BM + BM, length), BN):
        most, total, sums = _piece(
            n, most, total, sums, rotary, rest, position, length, grow, rope, own, made_stride,
            DR, DN, DV, PR, PN, PV, BN, True, UPCAST,
        )  # fmt: skip
    sums /= total[:, None]
    e = tl.arange(0, PV)
    to = out + (rows.to(tl.int64) * out_stride + head * DV)[:, None] + e[None, :]
    tl.store(to, sums.to(out.dtype.element_ty), mask=real[:, None] & (e < DV)[None, :])
