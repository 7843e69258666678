"""Rotary position settings, read from either spelling `transformers` has used.

4.x writes `rope_theta` beside `rope_scaling` (whose kind is under `type` or `rope_type`); 5.x writes one
`rope_parameters` object. Both become one `RopeConfig`. This file holds settings; `layers.rope` does the arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from deepseek_tgi.adapters.json_fields import Fields, shown
from deepseek_tgi.errors import ConfigError, UnsupportedModelError

DEFAULT_THETA = 10_000.0
LARGEST_MSCALE = 1000.0
_LEAST_TURNS = 1e-6
"""Settings beyond these leave the range of floats on their way into frequencies and scales; real ones are near 1."""


class RopeKind(Enum):
    """How frequencies depend on context length; values are the checkpoint's own words."""

    DEFAULT = "default"
    LINEAR = "linear"
    DYNAMIC = "dynamic"
    LLAMA3 = "llama3"
    YARN = "yarn"


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """One rotary setting; fields that `kind` does not use keep their neutral value.

    `original_max_position_embeddings` is the context the frequencies were trained for: for `dynamic` that is the
    config's `max_position_embeddings`, for `llama3` and `yarn` the key of that name (else the same fallback).
    `attention_factor`, `mscale` and `mscale_all_dim` are None when the checkpoint does not give them: their absence
    selects a different formula for yarn, so it must survive. 0 for the mscales counts as absent, as upstream, except
    for DeepSeek's own families (`deepseek_config.published_yarn`).
    """

    kind: RopeKind = RopeKind.DEFAULT
    theta: float = DEFAULT_THETA
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def rescaled(self, kind: str, factor: float, max_position_embeddings: int) -> RopeConfig:
        """The same theta under TGI's `--rope-scaling`/`--rope-factor`, which replace the checkpoint's scaling."""
        if kind not in (RopeKind.LINEAR.value, RopeKind.DYNAMIC.value):
            raise ConfigError(f"--rope-scaling is {kind!r}; expected linear or dynamic")
        if not 1.0 <= factor < float("inf"):
            raise ConfigError(f"--rope-factor is {factor!r}; expected a finite number of at least 1")
        plain = RopeConfig(theta=self.theta)
        return replace(
            plain, kind=RopeKind(kind), factor=factor, original_max_position_embeddings=max_position_embeddings
        )


def rope_section(config: Fields) -> Fields | None:
    """The object of rotary settings, whichever name it has."""
    return config.section("rope_parameters") or config.section("rope_scaling")


def read_rope(config: Fields, max_position_embeddings: int) -> RopeConfig:
    """Read the rotary settings of a `config.json`.

    Raises: `UnsupportedModelError` for a kind that is not implemented, `CheckpointError` for bad values.
    Source: transformers `modeling_rope_utils.py` (which keys each kind reads, and their defaults).
    """
    fields = rope_section(config) or Fields(config.source, {})
    theta_home = fields if fields.has("rope_theta") else config
    theta = theta_home.number("rope_theta", default=DEFAULT_THETA, low=1.0)
    kind = _read_kind(fields)
    for home in (fields, config):
        if home.number("partial_rotary_factor", default=1.0) != 1.0:
            raise UnsupportedModelError(
                f"{config.source}: {home.prefix}partial_rotary_factor is {home.data['partial_rotary_factor']!r}; "
                "only full rotation (1.0) is implemented"
            )
    if kind is RopeKind.DEFAULT:
        return RopeConfig(theta=theta)
    if kind in (RopeKind.LINEAR, RopeKind.DYNAMIC):
        return RopeConfig(
            kind=kind,
            theta=theta,
            factor=fields.number("factor", low=1.0, above=False),
            original_max_position_embeddings=max_position_embeddings,
        )
    home = config if config.has("original_max_position_embeddings") else fields
    original = home.integer("original_max_position_embeddings", default=max_position_embeddings)
    if kind is RopeKind.LLAMA3:
        return _read_llama3(fields, theta, original)
    return _read_yarn(fields, theta, original, max_position_embeddings)


def _read_kind(fields: Fields) -> RopeKind:
    key = "rope_type" if fields.has("rope_type") else "type"
    name = fields.text(key, default="default")
    known = [kind.value for kind in RopeKind]
    if name not in known:
        raise UnsupportedModelError(
            f"{fields.source}: {fields.prefix}{key} is {shown(repr(name))}; implemented are {', '.join(known)}"
        )
    return RopeKind(name)


def _read_llama3(fields: Fields, theta: float, original: int) -> RopeConfig:
    low, high = fields.number("low_freq_factor"), fields.number("high_freq_factor")
    if high <= low:
        fields.fail("high_freq_factor", f"a number above low_freq_factor ({low:g})")
    return RopeConfig(
        kind=RopeKind.LLAMA3,
        theta=theta,
        factor=fields.number("factor", low=1.0, above=False),
        original_max_position_embeddings=original,
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _read_yarn(fields: Fields, theta: float, original: int, max_position_embeddings: int) -> RopeConfig:
    return RopeConfig(
        kind=RopeKind.YARN,
        theta=theta,
        factor=fields.number("factor", default=max(1.0, max_position_embeddings / original), low=1.0, above=False),
        original_max_position_embeddings=original,
        beta_fast=fields.number("beta_fast", default=32.0, low=_LEAST_TURNS, above=False),
        beta_slow=fields.number("beta_slow", default=1.0, low=_LEAST_TURNS, above=False),
        attention_factor=fields.optional_number("attention_factor"),
        mscale=fields.optional_number("mscale", high=LARGEST_MSCALE, above=False) or None,
        mscale_all_dim=fields.optional_number("mscale_all_dim", high=LARGEST_MSCALE, above=False) or None,
        truncate=fields.flag("truncate", default=True),
    )
