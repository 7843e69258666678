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

from deepseek_tgi.adapters.checkpoint import Checkpoint
from deepseek_tgi.adapters.model_config import ModelConfig
from deepseek_tgi.adapters.module_table import EMBEDDING, HEAD, Kind, ModuleSpec
from deepseek_tgi.adapters.quantization import FLOAT_DTYPES, resolve
from deepseek_tgi.adapters.stored_tensors import (
    DeclaredForms,
    StoredForm,
    StoredTensor,
    dense_form,
    quantised_form,
)
from deepseek_tgi.kernels.dense_linear.native import on_grid
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
            self._plan = resolve(config, checkpoint)
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
            self._checkpoint.check(module.name, (module.out_features,), FLOAT_DTYPES)
            return dense_form((self._tensor("", module.name),))
        name = self._home(module)
        if module.bias:
            self._checkpoint.check(f"{name}.bias", (module.out_features,), FLOAT_DTYPES)
        shape = (module.out_features, module.in_features)
        scheme = self._plan.judge(name, shape) if module.kind in (Kind.LINEAR, Kind.HEAD) else None
        if scheme is not None:
            tensors = tuple(self._tensor(suffix, f"{name}.{suffix}") for suffix in self._tensors[name])
            return quantised_form(self._config.quantization.method, scheme, module.in_features, tensors)
        expected = shape if module.in_features else (module.out_features,)
        self._checkpoint.check(f"{name}.weight", expected, FLOAT_DTYPES)
        suffixes = ("weight", "bias") if module.bias else ("weight",)
        form = dense_form(tuple(self._tensor(suffix, f"{name}.{suffix}") for suffix in suffixes))
        return replace(form, on_grid=self._on_grid(name, expected))

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
