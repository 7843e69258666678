"""From a checkpoint to packed weights: the one door through which layers get their numbers.

Choice: tensors are read, packed and dropped one module at a time, so the peak is the packed model plus what one fused
module takes unpacked. Prevents: a loader that needs the model twice. Rejected: building a dense state dict first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from deepseek_tgi.adapters.awq.format import DenseWeight, Int4Weight
from deepseek_tgi.adapters.layers.linear import DenseLinear, Int4Linear, Linear, SplitLinear
from deepseek_tgi.adapters.layers.norm import RmsNorm
from deepseek_tgi.adapters.model_config import ModelConfig
from deepseek_tgi.adapters.quantization import QuantPlan
from deepseek_tgi.kernels.common import PackedDense, PackedInt4
from deepseek_tgi.kernels.route import GroupRank, Routing
from deepseek_tgi.kernels.select import KernelSet


class WeightSource:
    """Reads modules of one checkpoint by name and packs them for `kernels`. Used while loading only.

    `formats` counts the modules by how they were stored.
    """

    def __init__(self, plan: QuantPlan, kernels: KernelSet) -> None:
        self.kernels = kernels
        self.formats: Counter[str] = Counter()
        self._plan = plan

    def linear(
        self,
        names: Sequence[str],
        widths: Sequence[int],
        in_features: int,
        bias: bool | Sequence[bool],
        rows: Sequence[torch.Tensor | None] = (),
    ) -> Linear:
        """Modules `names`, of `widths` outputs each, fused along the outputs in the order given.

        `bias` may be given for each module. `rows`, one for each module, is the order in which its outputs are taken
        (None: as stored).
        Raises: `CheckpointError` for a tensor that is missing or of another shape, naming it.
        """
        weights = self._read(names, widths, in_features, bias, rows)
        return (
            self._pack(weights[0]) if len(weights) == 1 else SplitLinear(self.kernels, [self._pack(w) for w in weights])
        )

    def norm(self, name: str, size: int, eps: float) -> RmsNorm:
        """The norm `name`, whose weight is kept in float32."""
        weight = self._plan.tensor(f"{name}.weight", (size,)).to(torch.float32, copy=True)
        return RmsNorm(self.kernels.rms_norm, weight, eps)

    def output_head(self, head: str, embedding: str, config: ModelConfig) -> DenseLinear | Int4Linear:
        """The output matrix `[V, H]`: module `head`, or the embedding where they are tied."""
        shape = (config.vocab_size, config.hidden_size)
        return self._pack(self._plan.output_head(head, embedding, shape, config.tie_word_embeddings))

    def table(self, embedding: str, head: str, config: ModelConfig) -> torch.Tensor:
        """The embedding table `[V, H]` in the stored dtype. A copy: a file cut short later cannot fault the server."""
        shape = (config.vocab_size, config.hidden_size)
        return self._plan.embedding(embedding, head, shape, config.tie_word_embeddings).clone()

    def packed(self, names: Sequence[str], widths: Sequence[int], in_features: int) -> PackedInt4 | PackedDense:
        """Modules `names` without bias, fused, as the kernels hold them; dense if they are stored too differently."""
        weights = self._read(names, widths, in_features, False)
        if len(weights) > 1:
            weights = [DenseWeight.cat([DenseWeight(w.dequantise()) for w in weights])]
        return self._pack(weights[0]).weight

    def dense(self, name: str, out_features: int, in_features: int) -> torch.Tensor:
        """Module `name` as `[N, K] float32`, whatever its stored form."""
        return self._read((name,), (out_features,), in_features, False)[0].dequantise()

    def correction_bias(self, gate: str, routing: Routing) -> torch.Tensor | None:
        """The bias `[E] float32` that V3 adds to scores when it chooses experts."""
        if routing.group_rank is not GroupRank.BEST_TWO:
            return None
        name = f"{gate}.e_score_correction_bias"
        return self._plan.tensor(name, (routing.num_experts,)).to(torch.float32, copy=True)

    def _read(
        self,
        names: Sequence[str],
        widths: Sequence[int],
        in_features: int,
        bias: bool | Sequence[bool],
        rows: Sequence[torch.Tensor | None] = (),
    ) -> Sequence[Int4Weight | DenseWeight]:
        """The modules as one weight, or one each where they are stored too differently to fuse."""
        biases = [bias] * len(names) if isinstance(bias, bool) else bias
        sides = zip(names, widths, biases, strict=True)
        weights = [self._plan.linear(name, width, in_features, has_bias) for name, width, has_bias in sides]
        for index, order in enumerate(rows):
            if order is not None:
                weights[index] = weights[index].reordered(order)
        self.formats.update("int4" if isinstance(w, Int4Weight) else "dense" for w in weights)
        int4 = [w for w in weights if isinstance(w, Int4Weight)]
        dense = [w for w in weights if isinstance(w, DenseWeight)]
        if len(weights) == 1:
            return weights
        if len(int4) == len(weights) and Int4Weight.can_cat(int4):
            return [Int4Weight.cat(int4)]
        if len(dense) == len(weights):
            return [DenseWeight.cat(dense)]
        return weights

    def _pack(self, weight: Int4Weight | DenseWeight) -> DenseLinear | Int4Linear:
        bias = None if weight.bias is None else weight.bias.to(torch.float32, copy=True)
        if isinstance(weight, Int4Weight):
            packed = self.kernels.pack_int4(weight.codes, weight.zeros, weight.scales, weight.group_size)
            return Int4Linear(self.kernels, packed, bias)
        return DenseLinear(self.kernels, self.kernels.pack_dense(weight.weight), bias)
