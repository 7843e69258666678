"""A mixture of experts: `hidden += routed(x) + shared(x)` with `x = norm(hidden)`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from deepseek_tgi.adapters.layers.linear import DenseLinear
from deepseek_tgi.adapters.layers.norm import RmsNorm
from deepseek_tgi.adapters.layers.part import RowPart, StepContext, cut, floats_of
from deepseek_tgi.adapters.layers.partial import PartialSum
from deepseek_tgi.adapters.model_config import MixtureOfExperts, ModelConfig
from deepseek_tgi.adapters.weights import WeightSource
from deepseek_tgi.kernels.moe import PackedExperts


@dataclass(frozen=True, slots=True)
class MoeWeights:
    """The tensors of one part. `bias [E]` corrects the choice of experts (V3)."""

    norm: RmsNorm
    gate: DenseLinear
    bias: torch.Tensor | None
    experts: PackedExperts


class Moe(RowPart):
    """The experts of one layer with their norm; the shared expert is one more of them, of every token.

    Between ranks routed and shared experts are added up together.
    """

    ops = ("route", "moe")

    def __init__(self, spec: MixtureOfExperts, weights: MoeWeights, source: WeightSource) -> None:
        self._routing = spec.routing
        self._weights = weights
        self._route = source.kernels.route
        self._choose = source.kernels.choose_experts
        self._moe = source.kernels.moe
        self._sum = PartialSum(source.group)
        top_k = spec.routing.top_k
        self._dtype = source.kernels.activation_dtype
        self._width, self._widths = weights.norm.size, (spec.routing.num_experts, top_k, top_k)

    @classmethod
    def load(cls, source: WeightSource, name: str, norm: str, config: ModelConfig) -> Moe:
        """Read module `name` (for example `model.layers.1.mlp`) and the norm before it."""
        spec, hidden = config.experts, config.hidden_size
        assert spec is not None, "only layers with experts load them"
        num_experts = spec.routing.num_experts
        names = [f"{name}.experts.{index}" for index in range(num_experts)]
        experts = [source.expert(n, hidden, spec.intermediate_size) for n in names]
        shared = source.expert(f"{name}.shared_experts", hidden, spec.shared_size) if spec.shared_size else None
        weights = MoeWeights(
            norm=source.norm(norm, hidden, config.rms_norm_eps),
            gate=source.router(f"{name}.gate", num_experts, hidden),
            bias=source.correction_bias(f"{name}.gate", spec.routing),
            experts=source.kernels.pack_experts(experts, shared),
        )
        return cls(spec, weights, source)

    def scratch_floats(self, num_tokens: int) -> int:
        """See `Part`."""
        return num_tokens * self._own_floats() + self._weights.experts.scratch_floats(num_tokens, self._routing.top_k)

    @property
    def binding(self) -> tuple[Any, ...]:
        """See `Part`."""
        return ("moe", self._width, *self._widths)

    @property
    def nbytes(self) -> int:
        """See `Part`."""
        w = self._weights
        bias = 0 if w.bias is None else w.bias.nbytes
        return sum((w.norm.nbytes, w.gate.nbytes, bias, w.experts.nbytes))

    def bind(self, scratch: torch.Tensor, num_tokens: int) -> tuple[torch.Tensor, ...]:
        """Buffers `normed [T, H]`, `logits [T, E]`, `ids [T, k] int32`, `weights [T, k]`, and the rest for experts."""
        (normed,) = cut(scratch, num_tokens, (self._width,), self._dtype)
        behind = scratch[num_tokens * floats_of((self._width,), self._dtype) :]
        logits, ids, weights = cut(behind, num_tokens, self._widths)
        return normed, logits, ids.view(torch.int32), weights, scratch[num_tokens * self._own_floats() :]

    def _own_floats(self) -> int:
        """Of each token, besides what the experts take."""
        return floats_of((self._width,), self._dtype) + floats_of(self._widths)

    def __call__(
        self, hidden: torch.Tensor, buffers: tuple[torch.Tensor, ...], step: StepContext | None = None
    ) -> None:
        """See `Part`."""
        normed, logits, ids, weights, rest = buffers
        w = self._weights
        if self._choose is None:
            w.norm(hidden, normed)
            w.gate(normed, None, logits)
            self._route(logits, w.bias, self._routing, (ids, weights))
        else:
            self._choose(
                hidden, w.gate.weight, self._routing, norm_weight=w.norm.weight, eps=w.norm.eps, bias=w.bias,
                normed=normed, logits=logits, out=(ids, weights),
            )  # fmt: skip
        parts = self._sum.begin(hidden)
        self._moe(normed, ids, weights, w.experts, parts, scratch=rest)
        self._sum.end(hidden, parts)
