"""Which tensors a module really is stored as, by the headers of a checkpoint's files.

Of the values, only the first rows of large dense weights are looked at, since kernels keep those on an int8 grid in 8
bits.

What loading would refuse is refused here in the same words; what it would merely remark on becomes a note.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from deepseek_tgi.adapters.awq.format import AwqFormat
from deepseek_tgi.adapters.checkpoint import Checkpoint
from deepseek_tgi.adapters.model_config import ModelConfig
from deepseek_tgi.adapters.module_table import EMBEDDING, HEAD, Kind, ModuleSpec
from deepseek_tgi.adapters.quantization import FLOAT_DTYPES, resolve
from deepseek_tgi.adapters.stored_tensors import (
    DeclaredForms,
    StoredForm,
    StoredTensor,
    packed_form,
    real_group_sizes,
)
from deepseek_tgi.errors import CheckpointError
from deepseek_tgi.kernels.dense_linear.native import on_grid
from deepseek_tgi.kernels.held_bytes import ITEM_BYTES
from deepseek_tgi.kernels.quant_layout import GRID, GRID_MIN_WEIGHTS

_ROWS_TRIED = 16


class StoredForms:
    """The forms of a checkpoint's modules. Remembers which tensors were asked for, to tell what is left over."""

    def __init__(self, config: ModelConfig, checkpoint: Checkpoint) -> None:
        """Raises what loading raises for settings and tensors that do not go together."""
        self._config = config
        self._checkpoint = checkpoint
        self._declared = DeclaredForms(config)
        self._asked: set[str] = set()
        self._grids: dict[tuple[str, ...], bool] = {}
        self._remarks: list[str] = []
        self._differing: Counter[tuple[str, str]] = Counter()
        self._example: dict[tuple[str, str], str] = {}
        with _collecting(self._remarks):
            resolve(config, checkpoint)
        self._tensors: defaultdict[str, list[str]] = defaultdict(list)
        for name in checkpoint.names():
            module, _, suffix = name.rpartition(".")
            self._tensors[module].append(suffix)

    def form(self, module: ModuleSpec) -> StoredForm:
        """How `module` is stored. Raises `CheckpointError` for a tensor that is missing or of another shape."""
        form = self._stored(module)
        declared = self._declared.form(module)
        if form.label != declared.label:
            key = (declared.label, form.label)
            self._differing[key] += 1
            self._example.setdefault(key, module.name)
        return form

    def notes(self) -> list[str]:
        """Where config and files disagree, and what is stored besides; call it when all forms were asked for."""
        notes = list(self._remarks)
        for (declared, stored), count in self._differing.items():
            notes.append(
                f"{count} modules are stored as {stored} where config.json says {declared}, "
                f"{self._example[declared, stored]} among them; the files decide"
            )
        return [*notes, *self._left_over()]

    def _stored(self, module: ModuleSpec) -> StoredForm:
        if module.kind is Kind.VECTOR:
            tensor = self._check("", module.name, (module.out_features,))
            return StoredForm(tensor.dtype, ITEM_BYTES[tensor.dtype] * 8, 0, tensor.dtype, (tensor,))
        name = self._home(module)
        shape = (module.out_features, module.in_features) if module.in_features else (module.out_features,)
        bias = (self._check("bias", f"{name}.bias", (module.out_features,)),) if module.bias else ()
        layout = self._config.quantization.layout
        if layout is not None and layout.weight in self._tensors[name]:
            return self._packed(name, module, layout, bias)
        weight = self._check("weight", f"{name}.weight", shape)
        bits, grid = ITEM_BYTES[weight.dtype] * 8, self._on_grid(name, shape)
        return StoredForm(weight.dtype, bits, 0, weight.dtype, (weight, *bias), grid)

    def _on_grid(self, name: str, shape: tuple[int, ...]) -> bool:
        """True if the module's first rows lie on an int8 grid; of modules alike in other layers the first is asked."""
        if len(shape) != 2 or shape[0] * shape[1] < GRID_MIN_WEIGHTS or shape[1] % GRID:
            return False
        kind = tuple(word for word in name.split(".") if not word.isdecimal())
        if kind not in self._grids:
            rows = self._checkpoint.tensor(f"{name}.weight")[:_ROWS_TRIED]
            self._grids[kind] = on_grid(rows) is not None
            self._checkpoint.release()
        return self._grids[kind]

    def _home(self, module: ModuleSpec) -> str:
        """The module's name in the files: a tied model may have stored its embedding as its head only."""
        if module.name == EMBEDDING and self._config.tie_word_embeddings and EMBEDDING not in self._tensors:
            return HEAD
        return module.name

    def _packed(self, name: str, module: ModuleSpec, layout: AwqFormat, bias: tuple[StoredTensor, ...]) -> StoredForm:
        form = packed_form(self._config.quantization, module, self._group_size(name, module, layout), bias)
        tensors = []
        for tensor in form.tensors[: len(form.tensors) - len(bias)]:
            dtypes = (torch.int32,) if tensor.dtype == "int32" else FLOAT_DTYPES
            tensors.append(self._check(tensor.suffix, f"{name}.{tensor.suffix}", tensor.shape, dtypes))
        seen = {tensor.suffix for tensor in (*tensors, *bias)}
        tensors += [self._tensor(suffix, f"{name}.{suffix}") for suffix in self._tensors[name] if suffix not in seen]
        scales = next(tensor for tensor in tensors if tensor.suffix == layout.scales)
        return replace(form, dtype=scales.dtype, tensors=(*tensors, *bias))

    def _group_size(self, name: str, module: ModuleSpec, layout: AwqFormat) -> int:
        """The declared size that the stored scales have; of one that does not divide, loading's own refusal."""
        sizes = real_group_sizes(self._config.quantization, module)
        if not sizes:
            raise CheckpointError(
                f"{self._config.quantization.source}: {module.name}: group_size is "
                f"{self._config.quantization.group_sizes[0]}; expected -1 or a positive divisor of its input side, "
                f"{module.in_features}"
            )
        stored = self._checkpoint.shape(f"{name}.{layout.scales}")
        shape = (module.out_features, module.in_features)
        return next((size for size in sizes if layout.scales_shape(*shape, size) == stored), sizes[0])

    def _check(
        self, suffix: str, name: str, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...] = FLOAT_DTYPES
    ) -> StoredTensor:
        self._checkpoint.check(name, shape, dtypes)
        return self._tensor(suffix, name)

    def _tensor(self, suffix: str, name: str) -> StoredTensor:
        self._asked.add(name)
        return StoredTensor(suffix, dtype_name(self._checkpoint.dtype(name)), self._checkpoint.shape(name))

    def _left_over(self) -> Iterator[str]:
        """What is stored besides the model, by what it is."""
        first, last = self._config.num_hidden_layers, self._config.num_hidden_layers + self._config.num_extra_layers
        extra = tuple(f"model.layers.{index}." for index in range(first, last))
        sizes: Counter[str] = Counter()
        counts: Counter[str] = Counter()
        for name in self._checkpoint.names():
            if name in self._asked:
                continue
            kind = "skipped: layers that predict further tokens" if extra and name.startswith(extra) else "not used"
            counts[kind] += 1
            sizes[kind] += self._checkpoint.num_bytes_of(name)
        for kind, count in counts.items():
            yield f"{count} tensors of {sizes[kind]} bytes are {kind}"


def dtype_name(dtype: torch.dtype) -> str:
    """torch's name without its module."""
    return str(dtype).removeprefix("torch.")


@contextmanager
def _collecting(into: list[str]) -> Iterator[None]:
    """Append what the loading code warns of to `into` instead of logging it."""

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            into.append(record.getMessage())

    logger, collector = logging.getLogger("deepseek_tgi.adapters"), Collector(logging.WARNING)
    propagates = logger.propagate
    logger.addHandler(collector)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(collector)
        logger.propagate = propagates
