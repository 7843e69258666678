"""The gated MLP: `hidden += down(silu(gate(x)) * up(x))` with `x = norm(hidden)`; gate and up are one product."""

from __future__ import annotations

from typing import Any

import torch

from deepseek_tgi.adapters.layers.linear import Linear
from deepseek_tgi.adapters.layers.norm import RmsNorm
from deepseek_tgi.adapters.layers.part import RowPart, StepContext, cut, floats_of
from deepseek_tgi.adapters.model_config import GatedMlp, ModelConfig
from deepseek_tgi.adapters.weights import WeightSource


class Mlp(RowPart):
    """A dense gated MLP with its norm."""

    def __init__(
        self, norm: RmsNorm, gate_up: Linear, down: Linear, intermediate_size: int, dtype: torch.dtype = torch.float32
    ) -> None:
        """`dtype` is that of activations."""
        self._norm = norm
        self._gate_up = gate_up
        self._down = down
        self._dtype = dtype
        self._widths = (norm.size, 2 * intermediate_size, intermediate_size)

    @classmethod
    def load(cls, source: WeightSource, name: str, norm: str, config: ModelConfig, mlp: GatedMlp) -> Mlp:
        """Read module `name` (for example `model.layers.0.mlp`) and the norm before it."""
        hidden, inner = config.hidden_size, mlp.intermediate_size
        gate_up, down = source.gated(name, hidden, inner, mlp.bias)
        return cls(
            source.norm(norm, hidden, config.rms_norm_eps), gate_up, down, inner, source.kernels.activation_dtype
        )

    def scratch_floats(self, num_tokens: int) -> int:
        """See `Part`."""
        return num_tokens * floats_of(self._widths, self._dtype)

    @property
    def binding(self) -> tuple[Any, ...]:
        """See `Part`."""
        return ("mlp", *self._widths)

    @property
    def nbytes(self) -> int:
        """See `Part`."""
        return self._norm.nbytes + self._gate_up.nbytes + self._down.nbytes

    def bind(self, scratch: torch.Tensor, num_tokens: int) -> tuple[torch.Tensor, ...]:
        """Buffers `normed [T, H]`, `gate_up [T, 2I]`, `inner [T, I]`."""
        return tuple(cut(scratch, num_tokens, self._widths, self._dtype))

    def __call__(
        self, hidden: torch.Tensor, buffers: tuple[torch.Tensor, ...], step: StepContext | None = None
    ) -> None:
        """See `Part`."""
        normed, gate_up, inner = buffers
        self._gate_up.after_norm(hidden, self._norm, normed, gate_up)
        self._down.after_silu(gate_up, inner, hidden, hidden)
