"""Rotary position tables: what angle each position turns each pair of a head, for every scaling in use.

Choice for `dynamic` (NTK): a token at position p is turned by the frequencies of a sequence of p + 1 tokens, whatever
the request's length, batch or chunking. Within the original length that is plain rope, as `transformers` computes it;
beyond it, it is what `transformers` computes when it decodes token by token with a cache. Prevents: cached keys whose
bytes depend on how a prompt was cut or on its neighbours, which would make prefix reuse wrong. Rejected:
`transformers`' prefill rule (all positions take the longest sequence of the batch), and frequencies fixed for the
largest context (different from the reference already within the original length).
"""

from __future__ import annotations

import math

import torch

from deepseek_tgi.adapters.rope_config import RopeConfig, RopeKind

FIRST_ROWS = 4096
"""Positions computed at the start; the table doubles when a longer context arrives."""


class RopeTable:
    """Owner of the table `[P, D] float32` (cosines of the D/2 pairs, then sines), grown as contexts get longer.

    A row depends on its position alone, so growing never changes a row. Angles are float32 products, as in the
    reference the models were trained and judged with. On a GPU the table is whole from the start, rounded up to
    `FIRST_ROWS`: CUDA graphs hold its address.
    """

    def __init__(self, config: RopeConfig, head_dim: int, max_positions: int, device: torch.device) -> None:
        self._config = config
        self._head_dim = head_dim
        self._device = device
        whole = -(-max_positions // FIRST_ROWS) * FIRST_ROWS
        rows = min(FIRST_ROWS, max_positions) if device.type == "cpu" else whole
        self._table = build_table(config, head_dim, 0, rows).to(device)

    def covering(self, num_positions: int) -> torch.Tensor:
        """The table with at least `num_positions` rows."""
        have = int(self._table.shape[0])
        if num_positions > have:
            more = build_table(self._config, self._head_dim, have, max(num_positions, 2 * have))
            self._table = torch.cat((self._table, more.to(self._device)))
        return self._table


def build_table(config: RopeConfig, dim: int, start: int, stop: int) -> torch.Tensor:
    """Rows `start..stop-1` of the table, `[stop - start, dim] float32`."""
    positions = torch.arange(start, stop, dtype=torch.float32)
    if config.kind is RopeKind.DYNAMIC:
        frequencies = _dynamic(config, dim, torch.arange(start, stop))
    else:
        frequencies = inverse_frequencies(config, dim)
    angles = positions[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), 1) * attention_factor(config)


def inverse_frequencies(config: RopeConfig, dim: int) -> torch.Tensor:
    """Radians a position for each of the dim/2 pairs, `[dim/2] float32`; not for `dynamic`, which has no single set."""
    plain = _plain(config.theta, dim)
    if config.kind is RopeKind.LINEAR:
        return plain / config.factor
    if config.kind is RopeKind.LLAMA3:
        return _llama3(config, plain)
    if config.kind is RopeKind.YARN:
        return _yarn(config, dim, plain)
    assert config.kind is RopeKind.DEFAULT
    return plain


def attention_factor(config: RopeConfig) -> float:
    """What cosines and sines are multiplied by; 1 except for yarn.

    Source: YaRN (arXiv 2309.00071, eq. 22), and transformers `_compute_yarn_parameters` for the two mscales, whose
    ratio takes its place when both are given.
    """
    if config.kind is not RopeKind.YARN:
        return 1.0
    if config.attention_factor is not None:
        return config.attention_factor
    if config.mscale is not None and config.mscale_all_dim is not None:
        return yarn_mscale(config.factor, config.mscale) / yarn_mscale(config.factor, config.mscale_all_dim)
    return yarn_mscale(config.factor, 1.0)


def softmax_factor(config: RopeConfig) -> float:
    """What the softmax scale of latent attention is multiplied by: the square of `mscale_all_dim`'s mscale.

    Source: the attention of DeepSeek's published model files.
    """
    if not config.mscale_all_dim:
        return 1.0
    return yarn_mscale(config.factor, config.mscale_all_dim) ** 2


def yarn_mscale(factor: float, mscale: float) -> float:
    """`0.1 mscale ln(factor) + 1`, or 1 where nothing is stretched."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _plain(theta: float, dim: int) -> torch.Tensor:
    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    return 1.0 / torch.pow(theta, exponents)


def _dynamic(config: RopeConfig, dim: int, positions: torch.Tensor) -> torch.Tensor:
    """`[P, dim/2]`: one set of frequencies a position (see the module's choice)."""
    if dim == 2:
        return torch.ones(len(positions), 1)  # a single pair turns by one whatever the base
    original = config.original_max_position_embeddings
    lengths = (positions + 1).clamp(min=original).double()
    stretch = config.factor * lengths / original - (config.factor - 1)
    bases = (config.theta * stretch ** (dim / (dim - 2))).float()
    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    return 1.0 / bases[:, None] ** exponents


def _llama3(config: RopeConfig, plain: torch.Tensor) -> torch.Tensor:
    """Long waves are slowed by `factor`, short ones kept, those between blended. Source: Llama 3.1's own code."""
    original = config.original_max_position_embeddings
    wavelengths = 2 * math.pi / plain
    low, high = config.low_freq_factor, config.high_freq_factor
    blend = ((original / wavelengths - low) / (high - low)).clamp(0, 1)
    return (1 - blend) * plain / config.factor + blend * plain


def _yarn(config: RopeConfig, dim: int, plain: torch.Tensor) -> torch.Tensor:
    """Pairs that turn more than `beta_fast` times in the original length are kept, fewer than `beta_slow` slowed."""
    low = _pair_turning(config.beta_fast, config, dim)
    high = _pair_turning(config.beta_slow, config, dim)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low if high != low else 0.001
    slowed = ((torch.arange(dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return plain / config.factor * slowed + plain * (1 - slowed)


def _pair_turning(turns: float, config: RopeConfig, dim: int) -> float:
    """The (fractional) pair that turns so often within the original length."""
    ratio = config.original_max_position_embeddings / (turns * 2 * math.pi)
    return dim * math.log(ratio) / (2 * math.log(config.theta))
