"""Each family as the list of its parts; `decoder` runs any such list.

Knows which modules a family has and what they are called; knows no format, kernel or request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from deepseek_tgi.adapters.layers.part import Part
from deepseek_tgi.adapters.model_config import ModelConfig
from deepseek_tgi.adapters.models import deepseek, llama, qwen2, qwen3
from deepseek_tgi.adapters.weights import WeightSource

LAYERS: Mapping[str, Callable[[ModelConfig, WeightSource, int], tuple[Part, ...]]] = {
    "llama": llama.layer,
    "qwen2": qwen2.layer,
    "qwen3": qwen3.layer,
    "deepseek_v2": deepseek.layer,
    "deepseek_v3": deepseek.layer,
}
"""`model_type` to the function that loads layer i; has the keys of `model_config.FAMILIES`."""
