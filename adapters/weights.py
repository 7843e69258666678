"""From a checkpoint to packed weights: the one door through which layers get their numbers.

Choice: tensors are read, packed and dropped one module at a time, so the peak is the packed model plus what one fused
module takes unpacked. Prevents: a loader that needs the model twice. Rejected: building a dense state dict first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch

from deepseek_tgi.adapters.cache_scales import Scales, read_cache_scales
from deepseek_tgi.adapters.layers.linear import DenseLinear, Int4Linear, Linear, OrderedLinear, SplitLinear
from deepseek_tgi.adapters.layers.norm import RmsNorm
from deepseek_tgi.adapters.layers.partial import PartialLinear
from deepseek_tgi.adapters.model_config import ModelConfig
from deepseek_tgi.adapters.parallel import RankGroup
from deepseek_tgi.adapters.quantization import QuantPlan
from deepseek_tgi.adapters.sharding import Share
from deepseek_tgi.adapters.weight_forms import DenseWeight, Fp8Weight, Int4Weight, Part, Weight, fuse, on_device
from deepseek_tgi.errors import CheckpointError, ConfigError
from deepseek_tgi.kernels.common import PackedDense, PackedInt4
from deepseek_tgi.kernels.latent_attention import FORMS
from deepseek_tgi.kernels.moe import Expert
from deepseek_tgi.kernels.route import GroupRank, Routing
from deepseek_tgi.kernels.select import KernelSet


class WeightSource:
    """Reads modules of one checkpoint by name and packs them for `kernels`. Used while loading only.

    With several ranks, who asks names the sizes of its own `share`, and gets that part of each module.
    `formats` counts the modules by how they were stored; `latent_form` is how latent attention prefills.
    """

    def __init__(
        self,
        plan: QuantPlan,
        kernels: KernelSet,
        share: Share | None = None,
        group: RankGroup | None = None,
        *,
        latent_form: str = "auto",
    ) -> None:
        if latent_form not in FORMS:
            raise ConfigError(f"mla_prefill: got {latent_form!r}, expected one of {', '.join(FORMS)}")
        self.kernels = kernels
        self._device = kernels.device
        self.group = group
        self.latent_form = latent_form
        self.formats: Counter[str] = Counter()
        self._plan = plan
        self._share = share

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
        whole = self._joined(self._read(names, widths, in_features, bias, rows))
        return whole if self._whole_inputs(names[0]) else self._summed(whole)

    def gated(self, name: str, in_features: int, inner: int, bias: bool) -> tuple[Linear, Linear]:
        """`gate_proj` and `up_proj` of module `name` as one product, and its `down_proj`.

        Where `down_proj` stores its inputs in another order, gate and up make them in that order: nothing is gathered
        at run time.
        """
        gate_up, down = self._read_gated(name, in_features, inner, bias)
        return self._joined(gate_up), self._summed(self._pack(down))

    def expert(self, name: str, in_features: int, inner: int) -> Expert:
        """As `gated`, without bias and as the kernels hold it; on several ranks, this rank's part of a sum.

        Dense if gate and up are stored too differently to fuse.
        """
        gate_up, down = self._read_gated(name, in_features, inner, False)
        whole = gate_up[0] if len(gate_up) == 1 else DenseWeight(torch.cat([w.dequantise() for w in gate_up]))
        order = whole.order if isinstance(whole, Int4Weight) else None
        order = None if order is None else order.to(self._device, torch.int32)
        return Expert(self._held(whole), self._held(down), order)

    def router(self, name: str, num_experts: int, in_features: int) -> DenseLinear:
        """The gate `name` of a mixture of experts, kept in full: a rounded logit sends a token to another expert."""
        (weight,) = self._read((name,), (num_experts,), in_features, False)
        plain = weight.weight if isinstance(weight, DenseWeight) else weight.dequantise()
        return DenseLinear(self.kernels, self.kernels.pack_dense(plain.to(self._device), exact=True), None)

    def norm(self, name: str, size: int, eps: float) -> RmsNorm:
        """The norm `name`, whose weight is kept in float32."""
        weight = self._plan.tensor(f"{name}.weight", (size,)).to(self._device, torch.float32, copy=True)
        return RmsNorm(self.kernels.rms_norm, weight, eps)

    def output_head(self, head: str, embedding: str, config: ModelConfig) -> Linear:
        """The output matrix `[V, H]`: module `head`, or the embedding where they are tied; this rank's rows of it."""
        shape = (config.vocab_size, config.hidden_size)
        whole = self._plan.output_head(head, embedding, shape, config.tie_word_embeddings)
        rows = self.vocabulary(config)[self._rank]
        return self._pack(whole if len(rows) == config.vocab_size else whole.rows(rows.start, rows.stop))

    def table(self, embedding: str, head: str, config: ModelConfig) -> torch.Tensor:
        """This rank's rows of the embedding table `[V, H]` in the stored dtype.

        A copy: a file cut short later cannot fault the server.
        """
        shape = (config.vocab_size, config.hidden_size)
        rows = self.vocabulary(config)[self._rank]
        return self._plan.embedding(embedding, head, shape, config.tie_word_embeddings)[rows.start : rows.stop].to(
            self._device, copy=True
        )

    def vocabulary(self, config: ModelConfig) -> tuple[range, ...]:
        """Every rank's rows of the embedding table and of the output matrix."""
        return (range(config.vocab_size),) if self._share is None else self._share.vocabulary()

    def dense(self, name: str, out_features: int, in_features: int) -> torch.Tensor:
        """Module `name` as `[N, K] float32`, whatever its stored form."""
        weight = self._read((name,), (out_features,), in_features, False)[0]
        return on_device(weight, self._device).dequantise()

    def bias(self, name: str, out_features: int) -> torch.Tensor:
        """This rank's part of the bias of module `name`, `[N] float32`."""
        whole = out_features if self._share is None else self._share.shape(name)[0]
        bias = self._plan.tensor(f"{name}.bias", (whole,)).to(self._device, torch.float32, copy=True)
        own = range(whole) if self._share is None else self._share.outputs(name)
        return bias[own.start : own.stop]

    def cache_scales(self, attention: str) -> Scales:
        """FP8 scales of the keys and values that module `attention` caches."""
        return read_cache_scales(self._plan.checkpoint, attention)

    def correction_bias(self, gate: str, routing: Routing) -> torch.Tensor | None:
        """The bias `[E] float32` that V3 adds to scores when it chooses experts."""
        if routing.group_rank is not GroupRank.BEST_TWO:
            return None
        name = f"{gate}.e_score_correction_bias"
        bias = self._plan.tensor(name, (routing.num_experts,)).to(self._device, torch.float32, copy=True)
        if not bool(bias.isfinite().all()):
            raise CheckpointError(f"{name}: got values that are not finite, expected a bias that experts rank by")
        return bias

    def _read_gated(self, name: str, in_features: int, inner: int, bias: bool) -> tuple[Sequence[Weight], Weight]:
        """Gate with up, and down with its inputs in the order they are made, which is then cut between ranks."""
        last, names = f"{name}.down_proj", (f"{name}.gate_proj", f"{name}.up_proj")
        if not self._plan.sorts_inputs(last, in_features=self._shape(last, in_features, inner)[1]):
            (down,) = self._read((last,), (in_features,), inner, bias)
            return self._read(names, (inner, inner), in_features, bias), down
        whole = self._plan.linear(last, *self._shape(last, in_features, inner), bias)
        assert isinstance(whole, Int4Weight), "only packed layers are sorted"
        assert whole.order is not None, "the plan says that it is"
        down, order = replace(whole, order=None), whole.order
        if self._share is not None:
            own = self._share.inputs(last)
            order = order[own.start : own.stop]
            bias_once = whole.bias if self._rank == 0 else None
            down = replace(down.columns(own.start, own.stop), bias=bias_once)
        wholes = [self._plan.linear(each, *self._shape(each, inner, in_features), bias) for each in names]
        gate_up = [each.reordered(order) for each in wholes]
        self.formats.update(w.label for w in (*gate_up, down))
        return self._fused(gate_up), down

    def _read(
        self,
        names: Sequence[str],
        widths: Sequence[int],
        in_features: int,
        bias: bool | Sequence[bool],
        rows: Sequence[torch.Tensor | None] = (),
    ) -> Sequence[Weight]:
        """The modules as one weight, or one each where they are stored too differently to fuse."""
        biases = [bias] * len(names) if isinstance(bias, bool) else bias
        weights = []
        for index, (name, width, has_bias) in enumerate(zip(names, widths, biases, strict=True)):
            weight = self._own(name, width, in_features, has_bias)
            assert (weight.out_features, weight.in_features) == (width, in_features), name
            order = rows[index] if rows else None
            weights.append(weight if order is None else weight.reordered(order))
        self.formats.update(w.label for w in weights)
        return self._fused(weights)

    def _fused(self, weights: Sequence[Weight]) -> Sequence[Weight]:
        fused = fuse(weights)
        return weights if fused is None else [fused]

    def _shape(self, name: str, out_features: int, in_features: int) -> tuple[int, int]:
        """Of the module as it is stored, all ranks' parts; the sizes given are those of this rank's."""
        return (out_features, in_features) if self._share is None else self._share.shape(name)

    def _own(self, name: str, out_features: int, in_features: int, bias: bool) -> Weight:
        """This rank's part of the module."""
        if self._share is None:
            return self._plan.linear(name, out_features, in_features, bias)
        part = Part(self._share.outputs(name), self._share.inputs(name))
        weight = self._plan.linear(name, *self._share.shape(name), bias, part)
        # Parts over inputs are summed, so the bias must be in one of them only.
        return weight if self._whole_inputs(name) or self._rank == 0 else replace(weight, bias=None)

    def _whole_inputs(self, name: str) -> bool:
        return self._share is None or len(self._share.inputs(name)) == self._share.shape(name)[1]

    @property
    def _rank(self) -> int:
        return 0 if self._share is None else self._share.rank

    def _summed(self, part: Linear) -> Linear:
        """The product whose parts the ranks have."""
        return part if self.group is None else PartialLinear(self.kernels, part, self.group)

    def _pack(self, weight: Weight) -> DenseLinear | Int4Linear | OrderedLinear:
        plain = self._pack_plain(weight)
        order = weight.order if isinstance(weight, Int4Weight) else None
        return plain if order is None else OrderedLinear(self.kernels, plain, order.to(self._device))

    def _pack_plain(self, weight: Weight) -> DenseLinear | Int4Linear:
        """The product over inputs as the codes have them."""
        weight = on_device(weight, self._device)
        bias = None if weight.bias is None else weight.bias.to(torch.float32, copy=True)
        if isinstance(weight, Int4Weight):
            packed = self.kernels.pack_int4(weight.codes, weight.zeros, weight.scales, weight.group_size)
            return Int4Linear(self.kernels, packed, bias)
        if isinstance(weight, Fp8Weight):
            return DenseLinear(self.kernels, self.kernels.pack_fp8(weight.codes, weight.scales, weight.block), bias)
        return DenseLinear(self.kernels, self.kernels.pack_dense(weight.weight), bias)

    def _held(self, weight: Weight) -> PackedInt4 | PackedDense:
        """An expert's weight, as the experts' packing wants it."""
        hold = self.kernels.hold_int4
        if hold is None or not isinstance(weight, Int4Weight):
            return self._pack_plain(weight).weight
        own = on_device(weight, self._device)
        assert isinstance(own, Int4Weight)
        return hold(own.codes, own.zeros, own.scales, own.group_size)

    def _joined(self, weights: Sequence[Weight]) -> Linear:
        parts = [self._pack(w) for w in weights]
        return parts[0] if len(parts) == 1 else SplitLinear(self.kernels, parts)
