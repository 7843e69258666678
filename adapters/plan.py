"""What a model will be once loaded, worked out before: every module with its form, its split and its bytes.

Reads no tensor. `forms` says how each module is stored: `DeclaredForms` by the config alone, or the headers of the
stored tensors. No torch here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from deepseek_tgi.adapters.module_table import Kind, ModuleSpec, Side, module_table
from deepseek_tgi.adapters.quant_schemes import cut_group
from deepseek_tgi.adapters.sharding import ShardPlan
from deepseek_tgi.adapters.stored_tensors import StoredForm
from deepseek_tgi.kernels.held_bytes import ITEM_BYTES, HeldBytes

FormOf = Callable[[ModuleSpec], StoredForm]
_UP_PROJECTION = ".kv_b_proj"
_DOWN = ".down_proj"
"""Its inputs are made in whatever order it stores them, so that nothing is sorted at run time."""
_UP = ".up_proj"
ORDER_BYTES, EXPERT_ORDER_BYTES = 8, 4
"""Bytes for each input of a layer, and of an expert, that sorts its inputs itself."""
_PACKED_BITS = 8


@dataclass(frozen=True, slots=True)
class PlanLine:
    """Modules that are alike: one line of a report.

    `name` has ranges where layers and experts are numbered; `shape` is one module's. `parts` is the width of the cut
    side on each rank, empty for what every rank has in full. `stored_bytes` and `parameters` count all `count` modules.
    """

    name: str
    kind: str
    count: int
    shape: tuple[int, ...]
    form: str
    split: str
    parts: tuple[int, ...]
    parameters: int
    stored_bytes: int


@dataclass(frozen=True, slots=True)
class RankWeights:
    """Bytes of one rank's weights: its share of the files, and as its kernels will hold them."""

    stored_bytes: int
    held_bytes: int


@dataclass(frozen=True, slots=True)
class WeightPlan:
    """All modules of a model, and what they come to on each rank."""

    parameters: int
    stored_bytes: int
    lines: tuple[PlanLine, ...]
    ranks: tuple[RankWeights, ...]


@dataclass(slots=True)
class _Group:
    """Modules of one line while they are collected: `numbers[i]` are those seen at the i-th numbered place."""

    module: ModuleSpec
    form: StoredForm
    numbers: tuple[set[int], ...]
    count: int = 0
    stored_bytes: int = field(default=0)


def plan_weights(shards: ShardPlan, form_of: FormOf, held: HeldBytes) -> WeightPlan:
    """The plan of the model that `shards` deals out, under the kernel set of `held`."""
    groups: dict[tuple[object, ...], _Group] = {}
    for module in module_table(shards.config):
        form = form_of(module)
        words = module.name.split(".")
        pattern = tuple("#" if word.isdecimal() else word for word in words)
        key = (pattern, module.out_features, module.in_features, module.split, module.bias, form.label)
        numbers = [int(word) for word in words if word.isdecimal()]
        group = groups.get(key)
        if group is None:
            group = groups[key] = _Group(module, form, tuple(set() for _ in numbers))
        for seen, number in zip(group.numbers, numbers, strict=True):
            seen.add(number)
        group.count += 1
        group.stored_bytes += form.num_bytes
    ranks = range(shards.world_size)
    lines = tuple(_line(group, shards) for group in groups.values())
    return WeightPlan(
        parameters=sum(line.parameters for line in lines),
        stored_bytes=sum(line.stored_bytes for line in lines),
        lines=lines,
        ranks=tuple(_rank_weights(groups.values(), shards, rank, held) for rank in ranks),
    )


def parameters_of(module: ModuleSpec) -> int:
    """Numbers that training set: weight and bias."""
    return module.out_features * (module.in_features or 1) + module.bias * module.out_features


def _line(group: _Group, shards: ShardPlan) -> PlanLine:
    module = group.module
    parts: tuple[int, ...] = ()
    if module.split is not None:
        cut = shards.outputs if module.split.side is Side.OUT else shards.inputs
        parts = tuple(len(cut(module, rank)) for rank in range(shards.world_size))
    return PlanLine(
        name=_numbered(module.name, group.numbers),
        kind=module.kind.value,
        count=group.count,
        shape=(module.out_features, module.in_features) if module.in_features else (module.out_features,),
        form=group.form.label,
        split=module.rule,
        parts=parts,
        parameters=parameters_of(module) * group.count,
        stored_bytes=group.stored_bytes,
    )


def _rank_weights(groups: Iterable[_Group], shards: ShardPlan, rank: int, held: HeldBytes) -> RankWeights:
    holder = _Holder(held, shards.config.tie_word_embeddings)
    stored = memory = 0
    for group in groups:
        module = group.module
        outputs, inputs = shards.outputs(module, rank), shards.inputs(module, rank)
        whole, part = module.out_features * (module.in_features or 1), len(outputs) * (len(inputs) or 1)
        stored += group.stored_bytes * part // whole
        memory += group.count * holder.bytes_of(module, group.form, outputs, inputs)
    return RankWeights(stored, memory)


@dataclass(frozen=True, slots=True)
class _Holder:
    """How a rank keeps its modules: under the kernel set of `sizes`, `tied` if one storage is embedding and head."""

    sizes: HeldBytes
    tied: bool

    def bytes_of(self, module: ModuleSpec, form: StoredForm, outputs: range, inputs: range) -> int:
        """Bytes of a rank's part of one module once packed; biases, norms and vectors are kept in float32."""
        n, k = len(outputs), len(inputs)
        if module.kind in (Kind.NORM, Kind.VECTOR):
            return 4 * n
        if module.kind is Kind.EMBEDDING and not self.tied:
            return n * k * ITEM_BYTES[form.dtype]
        bias = 4 * n if module.bias else 0
        if module.name.endswith(_UP_PROJECTION):
            return self.sizes.up_projection(n, k) + bias
        return self._linear(module, form, n, inputs) + bias

    def _linear(self, module: ModuleSpec, form: StoredForm, n: int, inputs: range) -> int:
        k = len(inputs)
        if module.kind is Kind.GATE:
            return self.sizes.exact(n, k, "float32" if form.bits <= _PACKED_BITS else form.dtype)
        if form.bits == 4:
            if form.ordered and k < module.in_features:
                return self.sizes.dense(n, k, "float32")  # groups fall apart, so the layer is unpacked
            size = cut_group(form.group_size, inputs.start, inputs.stop)
            order = k * _order_bytes(module) if form.ordered else 0
            return self.sizes.int4(n, k, size, ITEM_BYTES[form.dtype]) + order
        if form.bits == 8:
            return self.sizes.fp8(n, k, cut_group(form.group_size, inputs.start, inputs.stop, whole=False))
        return self.sizes.dense(n, k, form.dtype, form.on_grid)


def _order_bytes(module: ModuleSpec) -> int:
    """Bytes that an order takes for each input of `module`: none where the maker of the inputs sorts them."""
    if module.name.endswith(_DOWN):
        return 0
    if "experts." not in module.name:
        return ORDER_BYTES
    return 0 if module.name.endswith(_UP) else EXPERT_ORDER_BYTES  # gate and up have one between them


def _numbered(name: str, numbers: Sequence[set[int]]) -> str:
    """`name` with each number replaced by the range of those seen in its place."""
    places = iter(numbers)
    return ".".join(ranges_of(next(places)) if word.isdecimal() else word for word in name.split("."))


def ranges_of(numbers: Iterable[int]) -> str:
    """`0-3,7` for 0, 1, 2, 3, 7."""
    runs = []
    for _, run in groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0]):
        values = [number for _, number in run]
        runs.append(str(values[0]) if len(values) == 1 else f"{values[0]}-{values[-1]}")
    return ",".join(runs)
