"""Which tensors a module is stored as, by the config alone: names, dtypes, shapes and so bytes. No torch here."""

from __future__ import annotations

import math
from dataclasses import dataclass

from deepseek_tgi.adapters.model_config import ModelConfig
from deepseek_tgi.adapters.module_table import Kind, ModuleSpec
from deepseek_tgi.adapters.quant_schemes import Int4Scheme, Scheme
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
    `on_grid`: the values are known to lie on an int8 grid, which kernels may use. `ordered`: inputs may be sorted by
    group (activation order).
    """

    label: str
    bits: int
    group_size: int
    dtype: str
    tensors: tuple[StoredTensor, ...]
    on_grid: bool = False
    ordered: bool = False

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
        if self._settings.schemes and self._settings.open_ended:
            self.notes.append("which modules are left dense is not wholly told by config.json: stored tensors decide")

    def form(self, module: ModuleSpec) -> StoredForm:
        """How `module` is stored. Raises `CheckpointError` for a group size that makes no sense."""
        quantised = module.kind in (Kind.LINEAR, Kind.HEAD)
        scheme = self._settings.scheme(module.name) if quantised else None
        key = (module.kind, module.out_features, module.in_features, module.bias, scheme)
        if key not in self._known:
            fits = scheme is not None and self._fits(scheme, module)
            self._known[key] = self._quantised(module, scheme) if scheme and fits else self._dense(module)
        return self._known[key]

    def _dense(self, module: ModuleSpec) -> StoredForm:
        if module.kind is Kind.VECTOR:
            return dense_form((StoredTensor("", "float32", (module.out_features,)),))
        shape = (module.out_features, module.in_features) if module.in_features else (module.out_features,)
        return dense_form((StoredTensor("weight", self._dtype, shape), *self._bias(module)))

    def _quantised(self, module: ModuleSpec, scheme: Scheme) -> StoredForm:
        tensors = [StoredTensor(*each) for each in scheme.tensors(module.out_features, module.in_features)]
        return quantised_form(self._settings.method, scheme, module.in_features, (*tensors, *self._bias(module)))

    def _bias(self, module: ModuleSpec) -> tuple[StoredTensor, ...]:
        return (StoredTensor("bias", self._dtype, (module.out_features,)),) if module.bias else ()

    def _fits(self, scheme: Scheme, module: ModuleSpec) -> bool:
        """False for groups that do not divide the input side: a tool that packs leaves such a module dense."""
        if not isinstance(scheme, Int4Scheme) or scheme.group_size == _PER_ROW:
            return True
        size, k = scheme.group_size, module.in_features
        if size <= 0:
            raise CheckpointError(
                f"{self._settings.source}: {module.name}: group_size is {size}; expected -1 or a positive divisor of "
                f"its input side, {k}"
            )
        fits = k % size == 0 or scheme.layout.short_last_group
        if not fits:
            self.notes.append(f"{module.name} has {k} inputs, which groups of {size} do not divide: taken as dense")
        return fits


def dense_form(tensors: tuple[StoredTensor, ...]) -> StoredForm:
    """The form of a module that is not quantised; the first tensor is its weight."""
    dtype = tensors[0].dtype
    return StoredForm(dtype, ITEM_BYTES[dtype] * 8, 0, dtype, tensors)


def quantised_form(
    method: str, scheme: Scheme, in_features: int, tensors: tuple[StoredTensor, ...], dtype: str = ""
) -> StoredForm:
    """The form of a quantised module; `dtype` is that of its scales, by default what `scheme` says."""
    label = f"{method} {scheme.label.replace('-', ' ')}".replace("fp8 fp8", "fp8")
    if isinstance(scheme, Int4Scheme):
        size = in_features if scheme.group_size == _PER_ROW else scheme.group_size
        scales = dtype or next(each.dtype for each in tensors if each.suffix == scheme.layout.scales)
        return StoredForm(label, 4, size, scales, tensors, ordered=scheme.sorted_groups)
    block = scheme.block[1] if scheme.block else in_features
    return StoredForm(label, 8, block, dtype or "float32", tensors)
