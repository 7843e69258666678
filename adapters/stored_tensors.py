"""Which tensors a module is stored as, by the config alone: names, dtypes, shapes and so bytes. No torch here."""

from __future__ import annotations

import math
from dataclasses import dataclass

from deepseek_tgi.adapters.model_config import ModelConfig
from deepseek_tgi.adapters.module_table import Kind, ModuleSpec
from deepseek_tgi.adapters.quant_settings import QuantSettings
from deepseek_tgi.errors import CheckpointError
from deepseek_tgi.kernels.held_bytes import ITEM_BYTES

UNDECLARED_DTYPE = "float16"
"""Taken where the config names no dtype: 16 bits, as all such public checkpoints have."""
_PER_ROW = -1


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a module; `suffix` follows the module's name (empty: the module is the tensor)."""

    suffix: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class StoredForm:
    """How one module is stored. `bits` of a weight; `group_size` the inputs that share a scale (0: none do).

    `label` is what reports say: `bfloat16`, `awq int4 g128`. `dtype` is a dense weight's own, else its scales'.
    `on_grid`: the values are known to lie on an int8 grid, which kernels may use.
    """

    label: str
    bits: int
    group_size: int
    dtype: str
    tensors: tuple[StoredTensor, ...]
    on_grid: bool = False

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors of the module."""
        return sum(tensor.num_bytes for tensor in self.tensors)


class DeclaredForms:
    """The forms that a config declares. Remembers what modules of one shape have in common; says what it assumed."""

    def __init__(self, config: ModelConfig) -> None:
        self._settings = config.quantization
        self._dtype = config.dtype or UNDECLARED_DTYPE
        self._known: dict[tuple[object, ...], StoredForm] = {}
        self.notes: list[str] = []
        if config.dtype is None:
            self.notes.append(f"config.json names no dtype: {UNDECLARED_DTYPE} is assumed for what is not quantised")
        if self._settings.open_ended:
            self.notes.append("the list of excluded modules has patterns, which only stored tensors settle")

    def form(self, module: ModuleSpec) -> StoredForm:
        """How `module` is stored. Raises `CheckpointError` for a group size that makes no sense."""
        packed = _may_be_packed(self._settings, module) and not self._settings.excludes(module.name)
        key = (module.kind, module.out_features, module.in_features, module.bias, packed)
        if key not in self._known:
            self._known[key] = self._packed(module) if packed else self._dense(module)
        return self._known[key]

    def _dense(self, module: ModuleSpec) -> StoredForm:
        if module.kind is Kind.VECTOR:
            return StoredForm("float32", 32, 0, "float32", (StoredTensor("", "float32", (module.out_features,)),))
        shape = (module.out_features, module.in_features) if module.in_features else (module.out_features,)
        tensors = (StoredTensor("weight", self._dtype, shape), *self._bias(module))
        return StoredForm(self._dtype, ITEM_BYTES[self._dtype] * 8, 0, self._dtype, tensors)

    def _bias(self, module: ModuleSpec) -> tuple[StoredTensor, ...]:
        return (StoredTensor("bias", self._dtype, (module.out_features,)),) if module.bias else ()

    def _packed(self, module: ModuleSpec) -> StoredForm:
        size = self._group_size(module)
        return packed_form(self._settings, module, size, self._bias(module)) if size else self._dense(module)

    def _group_size(self, module: ModuleSpec) -> int:
        """The real group size; 0 if the declared ones do not fit, as a tool that packs leaves such a module dense."""
        sizes = real_group_sizes(self._settings, module)
        if not sizes:
            listed = " and ".join(str(size) for size in self._settings.group_sizes)
            self.notes.append(
                f"{module.name} has {module.in_features} inputs, which groups of {listed} do not divide: taken as dense"
            )
        return sizes[0] if sizes else 0


def real_group_sizes(settings: QuantSettings, module: ModuleSpec) -> list[int]:
    """The declared group sizes that `module` can have, -1 resolved. Raises `CheckpointError` for one without sense."""
    for size in settings.group_sizes:
        if size != _PER_ROW and size <= 0:
            raise CheckpointError(
                f"{settings.source}: {module.name}: group_size is {size}; expected -1 or a positive divisor of its "
                f"input side, {module.in_features}"
            )
    resolved = [module.in_features if size == _PER_ROW else size for size in settings.group_sizes]
    return [size for size in resolved if module.in_features % size == 0]


def packed_form(
    settings: QuantSettings, module: ModuleSpec, group_size: int, bias: tuple[StoredTensor, ...]
) -> StoredForm:
    """The form of a packed module under the declared layout, with scales in float16."""
    layout = settings.layout
    assert layout is not None, "only modules that may be packed get here"
    out, k = module.out_features, module.in_features
    tensors = [
        StoredTensor(layout.weight, "int32", layout.weight_shape(out, k)),
        StoredTensor(layout.scales, "float16", layout.scales_shape(out, k, group_size)),
    ]
    if settings.zero_point:
        tensors.append(StoredTensor(layout.zeros, "int32", layout.zeros_shape(out, k, group_size)))
    label = f"{settings.method} int4 {'a scale a row' if group_size == k else f'g{group_size}'}"
    return StoredForm(label, 4, group_size, "float16", (*tensors, *bias))


def _may_be_packed(settings: QuantSettings, module: ModuleSpec) -> bool:
    """AutoAWQ never packs an output head; the other tools do where it is not excluded."""
    if settings.layout is None:
        return False
    return module.kind is Kind.LINEAR or (module.kind is Kind.HEAD and settings.method != "awq")
