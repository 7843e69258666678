"""FP8 scales of a layer's cached keys and values that a checkpoint may carry, under every name that tools give them.

Choice: a scale is used if it is stored and FP8 is asked for; each side that has none is scaled by its own vectors
(`kernels.fp8_format`). Start-up says how many layers are which. Prevents: scales that are read from the file and never
reach the write. Rejected: vLLM's and TGI's fallback of 1.0, which loses what lies below 2^-9.
Source: vLLM `maybe_remap_kv_scale_name`, compressed-tensors `kv_cache_scheme`, TGI `get_kv_scales`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from deepseek_tgi.adapters.checkpoint import Checkpoint
from deepseek_tgi.errors import CheckpointError

logger = logging.getLogger(__name__)

Scales = tuple[float | None, float | None]
"""Of keys and of values, as float16 values; None where the checkpoint has none."""
_NAMES = {
    "k": ("k_scale", "attn.k_scale", "k_proj.k_scale", "k_proj.output_scale"),
    "v": ("v_scale", "attn.v_scale", "v_proj.v_scale", "v_proj.output_scale"),
}
_SHARED = ("kv_scale", "attn.kv_scale")
_UNUSED = ("q_scale", "attn.q_scale", "prob_scale", "attn.prob_scale", "q_proj.output_scale")
_SMALLEST, _LARGEST = 2.0**-14, 65504.0


def read_cache_scales(checkpoint: Checkpoint, attention: str) -> Scales:
    """The scales of module `attention` (for example `model.layers.0.self_attn`).

    Raises `CheckpointError` for a scale that is not one number within float16's normal range.
    """
    checkpoint.skip([f"{attention}.{suffix}" for suffix in _UNUSED], "scales of what is not cached")
    return _scale(checkpoint, attention, "k"), _scale(checkpoint, attention, "v")


def report_cache_scales(found: Sequence[Scales]) -> None:
    """Say, once a load, how many layers have scales and what the others do."""
    both = sum(None not in pair for pair in found)
    one = sum((k is None) != (v is None) for k, v in found)
    none = len(found) - both - one
    logger.info(
        "kv cache: fp8_e4m3fn: %d of %d layers have scales in the checkpoint, %d for keys or values only; "
        "%d fall back to a scale of each token and head", both, len(found), one, none + one,
    )  # fmt: skip


def _scale(checkpoint: Checkpoint, attention: str, side: str) -> float | None:
    stored = [name for suffix in (*_NAMES[side], *_SHARED) if (name := f"{attention}.{suffix}") in checkpoint]
    if not stored:
        return None
    tensor = checkpoint.tensor(stored[0])
    if tensor.numel() != 1 or not tensor.dtype.is_floating_point:
        raise CheckpointError(
            f"{stored[0]}: got {list(tensor.shape)} {tensor.dtype}, expected one number, a layer's scale"
        )
    value = float(tensor.double().reshape(()))
    if not _SMALLEST <= value <= _LARGEST:
        raise CheckpointError(f"{stored[0]}: got {value:g}, expected a scale from {_SMALLEST:g} to {_LARGEST:g}")
    return float(tensor.float().half().reshape(()))
