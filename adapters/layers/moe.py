"""A mixture of experts: `hidden += shared(x) + routed(x)` with `x = norm(hidden)`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from deepseek_tgi.adapters.layers.linear import Linear
from deepseek_tgi.adapters.layers.norm import RmsNorm
from deepseek_tgi.adapters.layers.part import Part, StepContext, cut, padded
from deepseek_tgi.adapters.layers.partial import PartialSum
from deepseek_tgi.adapters.model_config import MixtureOfExperts, ModelConfig
from deepseek_tgi.adapters.weights import WeightSource
from deepseek_tgi.kernels.moe import PackedExperts


@dataclass(frozen=True, slots=True)
class MoeWeights:
    """The tensors of one part. `bias [E]` corrects the choice of experts (V3); the shared expert may be absent."""

    norm: RmsNorm
    gate: Linear
    bias: torch.Tensor | None
    experts: PackedExperts
    shared_gate_up: Linear | None
    shared_down: Linear | None


class Moe(Part):
    """The experts of one layer with their norm."""

    def __init__(self, spec: MixtureOfExperts, weights: MoeWeights, source: WeightSource) -> None:
        self._spec = spec
        self._weights = weights
        self._route = source.kernels.route
        self._moe = source.kernels.moe
        self._sum = PartialSum(source.group)
        shared = spec.shared_size if weights.shared_down is not None else 0
        self._widths = (weights.norm.size, spec.routing.num_experts, 2 * shared, shared)

    @classmethod
    def load(cls, source: WeightSource, name: str, norm: str, config: ModelConfig) -> Moe:
        """Read module `name` (for example `model.layers.1.mlp`) and the norm before it."""
        spec, hidden = config.experts, config.hidden_size
        assert spec is not None, "only layers with experts load them"
        inner, shared = spec.intermediate_size, spec.shared_size
        names = [f"{name}.experts.{index}" for index in range(spec.routing.num_experts)]
        experts = [source.expert(n, hidden, inner) for n in names]
        shared_name = f"{name}.shared_experts"
        shared_gate_up, shared_down = (None, None)
        if shared:
            # Routed and shared experts are added up over ranks together.
            shared_gate_up, shared_down = source.gated(shared_name, hidden, shared, False, summed=False)
        weights = MoeWeights(
            norm=source.norm(norm, hidden, config.rms_norm_eps),
            gate=source.linear((f"{name}.gate",), (spec.routing.num_experts,), hidden, False),
            bias=source.correction_bias(f"{name}.gate", spec.routing),
            experts=source.kernels.pack_experts([e[0] for e in experts], [e[1] for e in experts]),
            shared_gate_up=shared_gate_up,
            shared_down=shared_down,
        )
        return cls(spec, weights, source)

    @property
    def scratch_floats(self) -> int:
        """See `Part`."""
        return sum(padded(w) for w in self._widths)

    @property
    def binding(self) -> tuple[Any, ...]:
        """See `Part`."""
        return ("moe", *self._widths)

    @property
    def nbytes(self) -> int:
        """See `Part`."""
        w = self._weights
        linears = (w.gate, w.shared_gate_up, w.shared_down)
        bias = 0 if w.bias is None else w.bias.nbytes
        return w.norm.nbytes + bias + w.experts.nbytes + sum(part.nbytes for part in linears if part is not None)

    def bind(self, scratch: torch.Tensor, num_tokens: int) -> tuple[torch.Tensor, ...]:
        """Buffers `normed [T, H]`, `logits [T, E]`, `gate_up [T, 2I]`, `inner [T, I]` of the shared expert."""
        return tuple(cut(scratch, num_tokens, self._widths))

    def __call__(self, hidden: torch.Tensor, buffers: tuple[torch.Tensor, ...], step: StepContext) -> None:
        """See `Part`."""
        normed, logits, gate_up, inner = buffers
        w = self._weights
        w.norm(hidden, normed)
        w.gate(normed, None, logits)
        ids, weights = self._route(logits, w.bias, self._spec.routing)
        self._sum.begin(hidden)
        if w.shared_gate_up is not None and w.shared_down is not None:
            w.shared_gate_up(normed, None, gate_up)
            w.shared_down.after_silu(gate_up, inner, hidden, hidden)
        self._moe(normed, ids, weights, w.experts, hidden)
        self._sum.end(hidden)
