"""The one place that decides how each layer is stored, and whether the stored tensors agree with the config.

Rules:
- The declared label was judged with the config (`quant_settings`). Then the stored tensors decide layer by layer;
  where they disagree with the list of excluded modules, that is logged once.
- What a form of storage demands of its tensors is judged by its reader (`int4_reader`, `fp8_reader`): names, shapes and
  dtypes of all layers before any is read, values as each is.
- Layers behind the model's own (which predict further tokens) are not judged: they are not read.
- Tied embeddings: a stored output head equal to the embedding is skipped; one that differs is skipped with a warning,
  for the flag is what the model was trained under. Rejected: using the differing head, which changes a model's answers
  by what its exporter happened to leave in the file.
"""

from __future__ import annotations

import logging
import re
from dataclasses import replace

import torch

from deepseek_tgi.adapters.checkpoint import Checkpoint
from deepseek_tgi.adapters.fp8_reader import CODE_DTYPES, Fp8Reader
from deepseek_tgi.adapters.int4_reader import FLOAT_DTYPES, PACKED_SUFFIXES, Int4Reader
from deepseek_tgi.adapters.model_config import ModelConfig
from deepseek_tgi.adapters.quant_schemes import QuantSettings, Scheme
from deepseek_tgi.adapters.weight_forms import DenseWeight, Part, Weight
from deepseek_tgi.errors import CheckpointError

__all__ = ["FLOAT_DTYPES", "QuantPlan", "resolve"]

logger = logging.getLogger(__name__)

_NEVER_CONVERTED = (".gate",)
"""A router is no linear layer in the published model files, so no tool packs it and no list of exceptions names it."""
_LAYER = re.compile(r"model\.layers\.(\d{1,9})\.")


def resolve(config: ModelConfig, checkpoint: Checkpoint) -> QuantPlan:
    """Judge declared quantisation against the stored tensors' names and headers, reading no tensor.

    Raises: `UnsupportedModelError` or `CheckpointError` naming the layer and what would be right.
    """
    settings = config.quantization
    own = [name for name in checkpoint.names() if _in_model(name, config)]
    packed = [name.rpartition(".")[0] for name in own if name.endswith(PACKED_SUFFIXES)]
    floats = [
        name.removesuffix(".weight")
        for name in own
        if name.endswith(".weight") and checkpoint.dtype(name) in CODE_DTYPES
    ]
    plan = QuantPlan(settings, checkpoint)
    plan.check(packed, floats)
    quantised = [*packed, *floats]
    listed = [module for module in quantised if settings.excludes(module)]
    if listed:
        logger.warning(
            "%s: %d layers listed as not converted are stored packed and read so, %s among them",
            settings.source,
            len(listed),
            listed[0],
        )
    if settings.schemes and not quantised:
        logger.warning("%s: declares %s, yet every layer is stored dense", settings.source, settings.method)
    return plan


def _in_model(name: str, config: ModelConfig) -> bool:
    """False for tensors of layers behind the model's own."""
    match = _LAYER.match(name)
    return match is None or int(match[1]) < config.num_hidden_layers


class QuantPlan:
    """Reads layers of one checkpoint in whatever form they are stored. Owns only what it has logged."""

    def __init__(self, settings: QuantSettings, checkpoint: Checkpoint) -> None:
        """Made by `resolve`."""
        self.settings = settings
        self.checkpoint = checkpoint
        self._said: set[str] = set()
        layout, scheme = settings.layout, settings.fp8
        self._int4 = None if layout is None else Int4Reader(settings, layout, checkpoint, self._say_once)
        self._fp8 = None if scheme is None else Fp8Reader(settings, scheme, checkpoint)

    @property
    def label(self) -> str:
        """Short name for reports: `none`, `awq-gemm-g64`, `gptq-g128`, `fp8-128x128`, `compressed-tensors-g128`."""
        settings = self.settings
        if not settings.schemes:
            return "none"
        version = f"-{settings.layout.name}" if settings.method == "awq" and settings.layout is not None else ""
        sizes = "".join(f"-g{size}" for size in settings.group_sizes)
        if settings.fp8 is not None:
            sizes += settings.fp8.label.removeprefix("fp8") if settings.method == "fp8" else f"-{settings.fp8.label}"
        return f"{settings.method}{version}{sizes}"

    def check(self, packed: list[str], floats: list[str]) -> None:
        """Judge the modules that are stored in 4-bit words and in 8-bit floats, by names and headers.

        Raises: `UnsupportedModelError` or `CheckpointError` naming the layer.
        """
        for reader, modules, form in ((self._int4, packed, "packed"), (self._fp8, floats, "stored in 8-bit floats")):
            if modules and reader is None:
                declared = f"{self.settings.method} there" if self.settings.schemes else "no quantization_config"
                raise CheckpointError(
                    f"{self.settings.source}: {declared}, yet {len(modules)} layers are {form}, {modules[0]} among them"
                )
            for module in modules:
                assert reader is not None, "refused above"
                reader.check(module)

    def linear(
        self, module: str, out_features: int, in_features: int, bias: bool | None = None, part: Part | None = None
    ) -> Weight:
        """Read one linear layer in the form it is stored in, or `part` of it with the bias of its outputs.

        `bias` true requires one, false leaves a stored one unread, None takes it if it is there. Packed layers own
        their memory; 8-bit floats and dense tensors are views of the mapped file.
        Raises: `CheckpointError` naming the tensor, what was got and what was expected.
        """
        wants_bias = bias if bias is not None else f"{module}.bias" in self.checkpoint
        bias_tensor = self.tensor(f"{module}.bias", (out_features,)) if wants_bias else None
        if bias_tensor is not None and part is not None:
            bias_tensor = bias_tensor[part.outputs.start : part.outputs.stop]
        shape = (out_features, in_features)
        if self._int4 is not None and self._int4.stores(module):
            return replace(self._int4.read(module, shape, part), bias=bias_tensor)
        if self._fp8 is not None and self._fp8.stores(module):
            whole: Weight = self._fp8.read(module, shape)
        else:
            whole = self._dense(module, shape)
        return replace(whole if part is None else part.of(whole), bias=bias_tensor)

    def sorts_inputs(self, module: str, in_features: int) -> bool:
        """True if `module` is stored with its inputs in another order than they come in."""
        return self._int4 is not None and self._int4.stores(module) and self._int4.sorts_inputs(module, in_features)

    def _dense(self, module: str, shape: tuple[int, int]) -> DenseWeight:
        weight = self.tensor(f"{module}.weight", shape)
        expected = self.settings.open_ended or self.settings.excludes(module) or module.endswith(_NEVER_CONVERTED)
        if self.settings.schemes and not expected:
            self._say_once("dense", "%s is stored dense though not listed as such; it is read dense", module)
        return DenseWeight(weight)

    def judge(self, module: str, shape: tuple[int, int]) -> Scheme | None:
        """How the linear layer `module` is stored, by its headers alone; None: not quantised.

        Raises: `CheckpointError` for tensors that are missing or of another shape, as reading them would.
        """
        for reader in (self._int4, self._fp8):
            if reader is not None and reader.stores(module):
                return reader.judge(module, shape)
        self.checkpoint.check(f"{module}.weight", shape, FLOAT_DTYPES)
        return None

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
            # Most tools never quantise the head, so a dense one is no disagreement with the list.
            readers = [reader for reader in (self._int4, self._fp8) if reader is not None]
            quantised = any(reader.stores(module) for reader in readers)
            return self.linear(module, *shape) if quantised else DenseWeight(self.tensor(f"{module}.weight", shape))
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

    def _say_once(self, key: str, message: str, name: str) -> None:
        if key not in self._said:
            self._said.add(key)
            logger.warning("%s: " + message + " (said once)", self.checkpoint.folder, name)
