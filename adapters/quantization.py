"""The one place that decides which layers are packed, in which dialect, and whether the stored tensors agree.

Rules:
- The declared label was judged with the config (`quant_settings`). Then the stored tensors decide layer by layer;
  where they disagree with the list of excluded modules, that is logged once.
- A declared version decides the layout and shapes are checked against it; square layers look alike in every layout, so
  there the version alone rules.
- `zero_point` true with no zero tensor is an error; false with one reads it and says so.
- Tied embeddings: a stored output head equal to the embedding is skipped; one that differs is skipped with a warning,
  for the flag is what the model was trained under. Rejected: using the differing head, which changes a model's answers
  by what its exporter happened to leave in the file.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from deepseek_tgi.adapters.awq.format import (
    AWQ_VERSIONS,
    NIBBLES_PER_WORD,
    PACK_QUANTIZED,
    AwqFormat,
)
from deepseek_tgi.adapters.awq.unpack import unpack
from deepseek_tgi.adapters.checkpoint import Checkpoint
from deepseek_tgi.adapters.model_config import ModelConfig
from deepseek_tgi.adapters.quant_settings import QuantSettings
from deepseek_tgi.adapters.weight_forms import DenseWeight, Int4Weight, Weight
from deepseek_tgi.errors import CheckpointError, UnsupportedModelError

logger = logging.getLogger(__name__)

FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_NEVER_CONVERTED = (".gate",)
"""A router is no linear layer in the published model files, so no tool packs it and no list of exceptions names it."""
_PACKED_SUFFIXES = tuple(f".{layout.weight}" for layout in (*AWQ_VERSIONS.values(), PACK_QUANTIZED))


def resolve(config: ModelConfig, checkpoint: Checkpoint) -> QuantPlan:
    """Judge declared quantisation against the stored tensors' names and shapes, reading no tensor.

    Raises: `UnsupportedModelError` or `CheckpointError` naming the layer and what would be right.
    """
    settings = config.quantization
    packed = [name.rpartition(".")[0] for name in checkpoint.names() if name.endswith(_PACKED_SUFFIXES)]
    if packed and settings.layout is None:
        raise CheckpointError(
            f"{settings.source}: no quantization_config, yet {len(packed)} layers are packed, {packed[0]} among them"
        )
    plan = QuantPlan(settings, checkpoint)
    for module in packed:
        plan.check_packed(module)
    listed = [module for module in packed if settings.excludes(module)]
    if listed:
        logger.warning(
            "%s: %d layers listed as not converted are stored packed and read so, %s among them",
            settings.source,
            len(listed),
            listed[0],
        )
    if settings.layout is not None and not packed:
        logger.warning("%s: declares %s, yet every layer is stored dense", settings.source, settings.method)
    return plan


class QuantPlan:
    """Reads layers of one checkpoint in whatever form they are stored. Owns only what it has logged."""

    def __init__(self, settings: QuantSettings, checkpoint: Checkpoint) -> None:
        """Made by `resolve`."""
        self.settings = settings
        self.checkpoint = checkpoint
        self._said: set[str] = set()

    @property
    def label(self) -> str:
        """Short name for reports: `none`, `awq-gemm-g64`, `compressed-tensors-g128`."""
        if self.settings.layout is None:
            return "none"
        version = f"-{self.settings.layout.name}" if self.settings.method == "awq" else ""
        sizes = "".join(f"-g{size}" for size in self.settings.group_sizes)
        return f"{self.settings.method}{version}{sizes}"

    def linear(self, module: str, out_features: int, in_features: int, bias: bool | None = None) -> Weight:
        """Read one linear layer, packed or dense as it is stored.

        `bias` true requires one, false leaves a stored one unread, None takes it if it is there. Packed layers own
        their memory; dense tensors are views of the mapped file.
        Raises: `CheckpointError` naming the tensor, what was got and what was expected.
        """
        wants_bias = bias if bias is not None else f"{module}.bias" in self.checkpoint
        bias_tensor = self.tensor(f"{module}.bias", (out_features,)) if wants_bias else None
        layout = self.settings.layout
        if layout is not None and f"{module}.{layout.weight}" in self.checkpoint:
            return replace(self._read_packed(module, layout, (out_features, in_features)), bias=bias_tensor)
        weight = self.tensor(f"{module}.weight", (out_features, in_features))
        expected = self.settings.open_ended or self.settings.excludes(module) or module.endswith(_NEVER_CONVERTED)
        if layout is not None and not expected:
            self._say_once("dense", "%s is stored dense though not listed as such; it is read dense", module)
        return DenseWeight(weight, bias_tensor)

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """A float tensor (norm, embedding, bias) as a view of the mapped file."""
        return self.checkpoint.tensor(name, shape, FLOAT_DTYPES)

    def embedding(self, module: str, head: str, shape: tuple[int, int], tied: bool) -> torch.Tensor:
        """The embedding table; a tied model may have stored it under the name of its head only."""
        name = f"{module}.weight"
        if tied and name not in self.checkpoint and f"{head}.weight" in self.checkpoint:
            name = f"{head}.weight"
        return self.tensor(name, shape)

    def output_head(self, module: str, embedding: str, shape: tuple[int, int], tied: bool) -> Weight:
        """The output head `[V, H]`; for a tied model that is the embedding's tensor itself, whatever else is stored."""
        if not tied:
            # AutoAWQ never packs the head, so a dense one is no disagreement with the list.
            packed = self.settings.layout and f"{module}.{self.settings.layout.weight}" in self.checkpoint
            return self.linear(module, *shape) if packed else DenseWeight(self.tensor(f"{module}.weight", shape))
        table = self.embedding(embedding, module, shape, tied)
        extra = [name for name in self.checkpoint.names() if name.startswith(f"{module}.")]
        name = f"{module}.weight"
        if extra == [name] and f"{embedding}.weight" in self.checkpoint:
            same = self.checkpoint.shape(name) == shape and torch.equal(self.checkpoint.tensor(name), table)
            self.checkpoint.release()
            if not same:
                self._say_once("head", "%s differs from the embedding it is tied to; the embedding is used", name)
        elif extra and extra != [name]:
            self._say_once("head", "%s is stored packed but tied to the embedding; the embedding is used", module)
        self.checkpoint.skip(extra, "tied to the embedding")
        return DenseWeight(table)

    def check_packed(self, module: str) -> None:
        """Check one packed layer by name and header: one form only, zeros where declared, a sensible group size."""
        layout = self.settings.layout
        assert layout is not None, "only called for a declared layout"
        where = f"{self.checkpoint.folder}: {module}"
        if f"{module}.{layout.weight}" not in self.checkpoint:
            raise CheckpointError(f"{where} is packed in another form than {self.settings.method} {layout.name}")
        if f"{module}.weight" in self.checkpoint:
            raise CheckpointError(f"{where} is stored twice, dense (weight) and packed ({layout.weight}); expected one")
        if f"{module}.weight_g_idx" in self.checkpoint:
            raise UnsupportedModelError(f"{where} has weight_g_idx: activation ordering is not implemented")
        self.checkpoint.require([f"{module}.{layout.scales}"])
        if self.settings.zero_point:
            self.checkpoint.require([f"{module}.{layout.zeros}"])
        self._group_size(module, self._plain_input_side(module, layout))

    def _plain_input_side(self, module: str, layout: AwqFormat) -> int | None:
        """K by the headers alone, where they are sure of it: not for a packed (maybe padded) or contradictory side."""
        stored = self.checkpoint.shape(f"{module}.{layout.weight}")
        scales = self.checkpoint.shape(f"{module}.{layout.scales}")
        sure = layout.input_major and len(stored) == len(scales) == 2 and scales[1] == stored[1] * NIBBLES_PER_WORD
        return stored[0] if sure else None

    def _group_size(self, module: str, in_features: int | None) -> int:
        """The real group size of a layer; without `in_features`, only signs are judged (and 0 returned)."""
        declared = self.settings.group_sizes
        if len(declared) > 1 and in_features is not None:
            groups = self.checkpoint.shape(f"{module}.{PACK_QUANTIZED.scales}")[-1]
            stored = in_features // max(groups, 1)
            declared = tuple(size for size in declared if size in (stored, -1 if groups == 1 else stored)) or declared
        for size in declared:
            if size != -1 and (size <= 0 or (in_features is not None and in_features % size)):
                side = "" if in_features is None else f" of its input side, {in_features}"
                raise CheckpointError(
                    f"{self.settings.source}: {module}: group_size is {size}; expected -1 or a positive divisor{side}"
                )
        if in_features is None:
            return 0
        return in_features if declared[0] == -1 else declared[0]

    def _read_packed(self, module: str, layout: AwqFormat, shape: tuple[int, int]) -> Int4Weight:
        size = self._group_size(module, shape[1])
        self._check_layout(module, layout, shape)
        if layout is PACK_QUANTIZED:
            self._check_weight_shape(module, shape)
        prefix = f"{module}."
        weight = self.checkpoint.tensor(prefix + layout.weight, layout.weight_shape(*shape), (torch.int32,))
        scales = self.checkpoint.tensor(prefix + layout.scales, layout.scales_shape(*shape, size), FLOAT_DTYPES)
        if not torch.isfinite(scales).all():
            raise CheckpointError(f"{self.checkpoint.folder}: tensor {prefix}{layout.scales} holds infinities or NaN")
        zeros = self._read_zeros(prefix + layout.zeros, layout, shape, size)
        return unpack(layout, weight, zeros, scales, shape, group_size=size)

    def _read_zeros(self, name: str, layout: AwqFormat, shape: tuple[int, int], size: int) -> torch.Tensor | None:
        if name not in self.checkpoint:
            return None
        if not self.settings.zero_point:
            self._say_once("zeros", "%s is stored although the config declares none; it is used", name)
        return self.checkpoint.tensor(name, layout.zeros_shape(*shape, size), (torch.int32,))

    def _check_layout(self, module: str, layout: AwqFormat, shape: tuple[int, int]) -> None:
        """The declared version against the stored shape, naming the version that would fit."""
        name = f"{module}.{layout.weight}"
        stored, expected = self.checkpoint.shape(name), layout.weight_shape(*shape)
        if stored == expected:
            return
        fits = [other.name for other in AWQ_VERSIONS.values() if stored == other.weight_shape(*shape)]
        hint = f", which is the shape of version {fits[0]}" if fits and layout.name in AWQ_VERSIONS else ""
        raise CheckpointError(
            f"{self.checkpoint.folder}: tensor {name} has shape {list(stored)}{hint}; "
            f"expected {list(expected)} for {layout.name} of out {shape[0]}, in {shape[1]}"
        )

    def _check_weight_shape(self, module: str, shape: tuple[int, int]) -> None:
        name = f"{module}.weight_shape"
        if name not in self.checkpoint:
            return
        stored = self.checkpoint.tensor(name, (2,), (torch.int64, torch.int32)).tolist()
        if stored != list(shape):
            raise CheckpointError(f"{self.checkpoint.folder}: tensor {name} says {stored}; expected {list(shape)}")

    def _say_once(self, key: str, message: str, name: str) -> None:
        if key not in self._said:
            self._said.add(key)
            logger.warning("%s: " + message + " (said once)", self.checkpoint.folder, name)
