"""Which part of every module each rank holds, worked out from the config alone.

A cut falls on whole heads, and on whole quantisation groups of a side whose scales a group shares; ranks may get
unequal parts. More ranks than K/V heads are served if they are a multiple: ranks then share a head's keys and values.
What cannot be cut is refused by name before any tensor is read, with the numbers of ranks that would work.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import lcm

from deepseek_tgi.adapters.model_config import GroupedQueryAttention, ModelConfig
from deepseek_tgi.adapters.module_table import Axis, Kind, ModuleSpec, Side, module_table
from deepseek_tgi.adapters.quant_schemes import Fp8Scheme, QuantSettings
from deepseek_tgi.errors import ConfigError

ALIGNMENT = 16
"""Widths are cut at multiples of this where that leaves every rank a part: buffers and kernel tiles have this grain."""
_FREE_AXES = (Axis.MLP, Axis.EXPERT, Axis.SHARED, Axis.VOCABULARY)

Ranges = tuple[range, ...]


@dataclass(frozen=True, slots=True)
class Need:
    """What an axis demands of its cuts: a multiple of `step` units of `size`, because of `module`."""

    size: int
    step: int
    module: ModuleSpec
    grid: int

    @property
    def pieces(self) -> int:
        """Parts that can be given away."""
        return -(-self.size // self.step)


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """The parts of all ranks: for each axis of the model, the range of units of every rank."""

    config: ModelConfig
    world_size: int
    axes: Mapping[Axis, Ranges]

    def outputs(self, module: ModuleSpec, rank: int) -> range:
        """The outputs of `module` that `rank` holds."""
        return self._cut(module, Side.OUT, module.out_features, rank)

    def inputs(self, module: ModuleSpec, rank: int) -> range:
        """The inputs of `module` that `rank` holds; with fewer than all, its product is a partial sum."""
        return self._cut(module, Side.IN, module.in_features, rank)

    def local(self, rank: int) -> ModelConfig:
        """The config of the model as `rank` holds it: its own heads and widths. `vocab_size` stays the model's."""
        config, spec = self.config, self.config.attention
        heads = len(self.axes[Axis.HEADS][rank])
        if isinstance(spec, GroupedQueryAttention):
            kv_heads = len(self.axes[Axis.KV_HEADS][rank])
            local = replace(config, attention=replace(spec, num_attention_heads=heads, num_key_value_heads=kv_heads))
        else:
            local = replace(config, attention=replace(spec, num_attention_heads=heads))
        mlp, experts = config.mlp, config.experts
        if Axis.MLP in self.axes:
            mlp = replace(mlp, intermediate_size=len(self.axes[Axis.MLP][rank]))
        if experts is not None and Axis.EXPERT in self.axes:
            shared = len(self.axes[Axis.SHARED][rank]) if Axis.SHARED in self.axes else 0
            experts = replace(experts, intermediate_size=len(self.axes[Axis.EXPERT][rank]), shared_size=shared)
        return replace(local, mlp=mlp, experts=experts)

    def _cut(self, module: ModuleSpec, side: Side, size: int, rank: int) -> range:
        split = module.split
        if split is None or split.side is not side:
            return range(size)
        units = self.axes[split.axis][rank]
        return range(units.start * split.unit, units.stop * split.unit)


class Share:
    """What one rank holds, by the names of modules."""

    def __init__(self, plan: ShardPlan, rank: int) -> None:
        self.rank = rank
        self._plan = plan
        self._modules = {module.name: module for module in module_table(plan.config)}

    def shape(self, name: str) -> tuple[int, int]:
        """Outputs and inputs of the whole module as it is stored."""
        module = self._modules[name]
        return module.out_features, module.in_features

    def outputs(self, name: str) -> range:
        """See `ShardPlan`."""
        return self._plan.outputs(self._modules[name], self.rank)

    def inputs(self, name: str) -> range:
        """See `ShardPlan`."""
        return self._plan.inputs(self._modules[name], self.rank)

    def vocabulary(self) -> tuple[range, ...]:
        """Every rank's rows of the embedding and of the output matrix."""
        return self._plan.axes[Axis.VOCABULARY]


def plan_shards(config: ModelConfig, world_size: int) -> ShardPlan:
    """Deal the model out to `world_size` ranks.

    Raises: `ConfigError` naming each tensor that cannot be split so, its width, its grid and what would work.
    """
    if world_size < 1:
        raise ConfigError(f"num_shard: got {world_size}, expected at least 1")
    needs = _needs(config)
    axes = _deal_all(config, needs, world_size)
    refused = [axis for axis in needs if axis not in axes]
    if refused:
        raise ConfigError(_refusal(config, needs, refused, world_size))
    return ShardPlan(config, world_size, axes)


def quant_grid(settings: QuantSettings, module: ModuleSpec) -> tuple[int, int]:
    """Multiples at which the outputs and the inputs of `module` may be cut, by how the config says it is stored.

    A group that spans the whole input side leaves its cuts free: each rank keeps the whole row of scales. Outputs have
    scales of their own in every form. Sizes that make no sense are refused elsewhere, with the tensors.
    """
    scheme = settings.scheme(module.name) if module.kind is Kind.LINEAR else None
    if isinstance(scheme, Fp8Scheme):
        return 1, 1 if scheme.block is None else scheme.block[1]
    if scheme is None or not 0 < scheme.group_size < module.in_features:
        return 1, 1
    return 1, scheme.group_size


def _needs(config: ModelConfig) -> dict[Axis, Need]:
    """The strictest demand of any module on each axis, all of them met by one step."""
    needs: dict[Axis, Need] = {}
    for module in module_table(config):
        if module.split is None:
            continue
        split = module.split
        side = module.out_features if split.side is Side.OUT else module.in_features
        grid = quant_grid(config.quantization, module)[split.side is Side.IN]
        step = lcm(grid, split.unit) // split.unit
        found = needs.get(split.axis)
        if found is None:
            needs[split.axis] = Need(side // split.unit, step, module, grid)
        elif found.step % step:
            worst = (module, grid) if step > found.step else (found.module, found.grid)
            needs[split.axis] = Need(found.size, lcm(step, found.step), *worst)
    return needs


def _deal_all(config: ModelConfig, needs: Mapping[Axis, Need], world_size: int) -> dict[Axis, Ranges]:
    """The ranges of every axis that can be dealt out."""
    axes: dict[Axis, Ranges] = {}
    for axis, need in needs.items():
        if axis in _FREE_AXES:
            fine = lcm(need.step, ALIGNMENT)
            ranges = _deal(need.size, fine, world_size) or _deal(need.size, need.step, world_size)
        elif Axis.KV_HEADS not in needs:
            ranges = _deal(need.size, need.step, world_size)
        else:
            continue
        if ranges:
            axes[axis] = ranges
    if isinstance(config.attention, GroupedQueryAttention):
        axes |= _deal_groups(config.attention, needs[Axis.HEADS].step, needs[Axis.KV_HEADS].step, world_size)
    return axes


def _deal_groups(spec: GroupedQueryAttention, step: int, kv_step: int, world_size: int) -> dict[Axis, Ranges]:
    """Query heads go with their K/V head: whole groups to a rank, or several ranks to a group."""
    groups, size = spec.num_key_value_heads, spec.num_attention_heads // spec.num_key_value_heads
    whole = _deal(groups, lcm(kv_step, lcm(step, size) // size), world_size)
    if whole:
        return {Axis.KV_HEADS: whole, Axis.HEADS: tuple(range(r.start * size, r.stop * size) for r in whole)}
    sharers = world_size // groups
    parts = _deal(size, step, sharers) if world_size % groups == 0 and size % step == 0 and kv_step == 1 else ()
    if not parts:
        return {}
    heads = tuple(range(g * size + p.start, g * size + p.stop) for g in range(groups) for p in parts)
    return {Axis.KV_HEADS: tuple(range(g, g + 1) for g in range(groups) for _ in parts), Axis.HEADS: heads}


def _deal(size: int, step: int, world_size: int) -> Ranges:
    """`size` units in runs of whole steps, the first ranks getting one more; nothing if a rank would get none."""
    pieces = -(-size // step)
    if pieces < world_size:
        return ()
    each, extra = divmod(pieces, world_size)
    bounds = [min(size, step * (rank * each + min(rank, extra))) for rank in range(world_size + 1)]
    return tuple(range(a, b) for a, b in pairwise(bounds))


def _working(config: ModelConfig, needs: Mapping[Axis, Need]) -> list[int]:
    limit = min(need.pieces for axis, need in needs.items() if axis is not Axis.KV_HEADS)
    return [count for count in range(1, limit + 1) if len(_deal_all(config, needs, count)) == len(needs)]


def _refusal(config: ModelConfig, needs: Mapping[Axis, Need], refused: Iterable[Axis], world_size: int) -> str:
    reasons = {axis: _reason(needs[axis], axis) for axis in refused}
    if isinstance(config.attention, GroupedQueryAttention) and Axis.HEADS in reasons:
        del reasons[Axis.KV_HEADS]  # they are dealt out together
        if needs[Axis.HEADS].step == 1:
            reasons[Axis.HEADS] += f" and {config.attention.num_key_value_heads} K/V heads"
    works, told = _listed(_working(config, needs)), "; ".join(reasons.values())
    return (
        f"num_shard: got {world_size}, expected {works}: {config.folder / 'config.json'}: {told}: a cut falls between "
        f"whole ones, and {world_size} ranks cannot each have some"
    )


def _reason(need: Need, axis: Axis) -> str:
    module, split = need.module, need.module.split
    assert split is not None, "only split modules make demands"
    width = module.out_features if split.side is Side.OUT else module.in_features
    side = "outputs" if split.side is Side.OUT else "inputs"
    grid = f" in groups of {need.grid}" if need.grid > 1 else ""
    heads = f" of {need.size} {axis.value}" if split.unit > 1 else ""
    return f"{module.name} has {width} {side}{heads}{grid}"


def _listed(counts: Sequence[int]) -> str:
    """`1 to 3, 6 or 9`: runs of three and more as a range."""
    runs: list[list[int]] = []
    for count in counts:
        if runs and count == runs[-1][1] + 1:
            runs[-1][1] = count
        else:
            runs.append([count, count])
    words: list[str] = []
    for first, last in runs:
        words += [f"{first} to {last}"] if last - first > 1 else [str(n) for n in range(first, last + 1)]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
