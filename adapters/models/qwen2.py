"""Qwen2 (R1-Distill-Qwen): a llama whose q, k and v always have biases; `ModelConfig.attention` says so."""

from __future__ import annotations

from deepseek_tgi.adapters.models.llama import layer

__all__ = ["layer"]
