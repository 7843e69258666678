"""Qwen3 (R1-0528-Qwen3-8B): a llama with an RMS norm on each query and key head before rope, and its own head size.

`ModelConfig.attention` carries both; the attention part reads `q_norm` and `k_norm` where it says so.
"""

from __future__ import annotations

from deepseek_tgi.adapters.models.llama import layer

__all__ = ["layer"]
