"""The draw: arg-max of p / e, with exponential noise e that is a pure function of (seed, position, token id).

Choice: noise is a counter-based hash. Prevents: a generator whose state depends on who shares the batch, and noise for
a whole vocabulary when a cut left forty candidates. Rejected: a `torch.Generator` per request, which makes 0.7 ms of
noise a row whatever is needed of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from deepseek_tgi.logits.hash64 import mix, signed

_SPREAD, _MIX_1, _MIX_2 = -1640531527, 2146121005, -2073254261
"""32-bit multipliers (as int32): CPUs multiply 32-bit numbers by the vector and 64-bit ones one by one.

Source: 2^32 over the golden ratio; Wellons, "Prospecting for hash functions" (2018), lowbias32.
"""


def noise_keys(seeds: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
    """Two int32 keys `[n, 2]` for each request's next token; `positions` count from the start of its prompt."""
    keys = [mix(mix(s) ^ p) for s, p in zip(seeds, positions, strict=True)]
    return torch.tensor([signed(key) for key in keys], dtype=torch.int64).view(torch.int32).view(-1, 2)


def exponential_noise(ids: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Standard exponential noise, float32, for `ids` under a pair of keys (all int32; the shapes broadcast)."""
    bits = (ids * _SPREAD) ^ first
    bits ^= (bits >> 16) & 0xFFFF
    bits *= _MIX_1
    bits ^= (bits >> 15) & 0x1FFFF
    bits ^= second
    bits *= _MIX_2
    bits ^= (bits >> 16) & 0xFFFF
    # 31 bits: exact near zero, where noise decides for rare tokens.
    uniform = (bits & 0x7FFFFFFF).float().add_(0.5).mul_(2.0**-31)
    return uniform.neg_().log1p_().neg_()


def sample_dense(logprobs: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Draw an id `[n] int64` from each row of `logprobs [n, V]`, any id possible; `keys [n, 2]` from `noise_keys`."""
    ids = torch.arange(logprobs.shape[1], dtype=torch.int32, device=logprobs.device)
    return logprobs.exp().div_(exponential_noise(ids, keys[:, :1], keys[:, 1:])).argmax(-1)


def sample_sparse(logprobs: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """The same draw where most ids are cut off (minus infinity): noise is made for the others only.

    A row with nothing left gives an arbitrary id.
    """
    rows, ids = (logprobs > float("-inf")).nonzero(as_tuple=True)
    if not len(ids):
        return torch.zeros(len(logprobs), dtype=torch.int64, device=logprobs.device)
    first, second = keys[rows].unbind(1)
    ratio = logprobs[rows, ids].exp_().div_(exponential_noise(ids.int(), first, second))
    counts = torch.bincount(rows, minlength=len(logprobs))
    starts = counts.cumsum(0) - counts
    column = torch.arange(len(rows), device=rows.device) - starts[rows]
    table = torch.full((len(logprobs), int(counts.max())), -1.0, device=logprobs.device)
    table[rows, column] = ratio
    return ids[(starts + table.argmax(-1)).clamp_(max=len(ids) - 1)]
