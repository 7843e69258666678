"""What a config can declare about stored weights, as data: schemes, the modules they apply to, those left alone.

No torch here and no file: how a config says it is read by `quant_settings`, what is really stored by `quantization`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

from deepseek_tgi.adapters.awq.format import AwqFormat

Shape = tuple[int, ...]
StoredTensors = tuple[tuple[str, str, Shape], ...]
"""Suffix, dtype and shape of each tensor of a module."""

_MAX_PATTERN, _MAX_REPEATS, _MAX_NAME = 200, 3, 256
_REPEATED_GROUP = re.compile(r"\)\s*[*+{]|\(\?|\\\d")
_NEVER_QUANTISED = ("embed_tokens", "gate")
"""Embeddings are looked up; a router is no linear layer in the published model files. No tool packs them."""


@dataclass(frozen=True, slots=True)
class Int4Scheme:
    """4-bit codes with a scale for each `group_size` inputs (-1: one for all of them).

    `zero_point`: each group has a zero of its own, else it is the midpoint. `sorted_groups`: groups may be made of
    inputs that do not lie side by side (activation order).
    """

    layout: AwqFormat
    group_size: int
    zero_point: bool
    sorted_groups: bool = False

    @property
    def label(self) -> str:
        """Short name for reports: `int4-g128`, `int4-row`."""
        return "int4-row" if self.group_size == -1 else f"int4-g{self.group_size}"

    def tensors(self, out_features: int, in_features: int) -> StoredTensors:
        """The tensors of a layer of this shape, its bias aside."""
        size = in_features if self.group_size == -1 else self.group_size
        layout, shape = self.layout, (out_features, in_features)
        tensors: list[tuple[str, str, Shape]] = [
            (layout.weight, "int32", layout.weight_shape(*shape)),
            (layout.scales, "float16", layout.scales_shape(*shape, size)),
        ]
        if self.zero_point or layout.stores_midpoint:
            tensors.append((layout.zeros, "int32", layout.zeros_shape(*shape, size)))
        if self.sorted_groups:
            tensors.append((layout.group_index, "int32", (in_features,)))
        return tuple(tensors)


@dataclass(frozen=True, slots=True)
class Fp8Scheme:
    """8-bit floats (E4M3) with a scale for each block of `block` outputs and inputs; None: one for all or one a row.

    `scale` names its tensor; both public names are read, and both mean a factor of the weight.
    """

    block: tuple[int, int] | None
    scale: str = "weight_scale_inv"

    @property
    def label(self) -> str:
        """Short name for reports: `fp8-128x128`, `fp8`."""
        return "fp8" if self.block is None else f"fp8-{self.block[0]}x{self.block[1]}"

    def tensors(self, out_features: int, in_features: int) -> StoredTensors:
        """The tensors of a layer of this shape, its bias aside."""
        rows, columns = self.block or (1, in_features)
        grid = (-(-out_features // rows), -(-in_features // columns))
        return (("weight", "float8_e4m3fn", (out_features, in_features)), (self.scale, "float32", grid))


Scheme = Int4Scheme | Fp8Scheme


@dataclass(frozen=True, slots=True)
class NameList:
    """Modules as configs list them: parts of a path made of whole names, or `re:` patterns matched from the start.

    `opaque` says that some entry is not evaluated: a class of layers, or a pattern that might run for ever.
    """

    parts: frozenset[str] = frozenset()
    patterns: tuple[re.Pattern[str], ...] = ()
    opaque: bool = False

    @classmethod
    def of(cls, entries: Iterable[str]) -> NameList:
        """The list that a config gives; empty entries name nothing."""
        entries = [entry for entry in entries if entry.strip(".")]
        wanted = [entry[len("re:") :] for entry in entries if entry.startswith("re:")]
        patterns = [_compiled(text) for text in wanted]
        return cls(
            parts=frozenset(entry.strip(".") for entry in entries if not entry.startswith("re:")),
            patterns=tuple(pattern for pattern in patterns if pattern is not None),
            opaque=None in patterns,
        )

    def covers(self, module: str) -> bool:
        """True if the list names `module` or a module above it.

        `mlp.gate` covers `model.layers.0.mlp.gate` and not `model.layers.0.mlp.gate_proj`.
        """
        if len(module) > _MAX_NAME:
            return False
        # Every run of neighbouring names is looked up: lists have hundreds of entries, models many thousand modules.
        names = module.split(".") if self.parts else []
        runs = (".".join(names[i:j]) for i in range(len(names)) for j in range(i + 1, len(names) + 1))
        return any(run in self.parts for run in runs) or any(pattern.match(module) for pattern in self.patterns)


EVERYTHING = NameList(patterns=(re.compile(""),))
"""Covers every module."""


@dataclass(frozen=True, slots=True)
class QuantSettings:
    """The declared quantisation. `rules`: the first list that covers a module gives its scheme; none declared if empty.

    `packs_head`: the output head is quantised unless excluded. `source` is the file that says so.
    """

    method: str
    source: str
    rules: tuple[tuple[NameList, Scheme], ...] = ()
    excluded: NameList = NameList()
    packs_head: bool = False

    @property
    def schemes(self) -> tuple[Scheme, ...]:
        """Every declared scheme."""
        return tuple(dict.fromkeys(scheme for _, scheme in self.rules))

    @property
    def layout(self) -> AwqFormat | None:
        """The dialect of 4-bit layers, None if the config declares none. A checkpoint has one."""
        return next((scheme.layout for scheme in self.schemes if isinstance(scheme, Int4Scheme)), None)

    @property
    def fp8(self) -> Fp8Scheme | None:
        """The scheme of 8-bit float layers, None if the config declares none. A checkpoint has one."""
        return next((scheme for scheme in self.schemes if isinstance(scheme, Fp8Scheme)), None)

    @property
    def group_sizes(self) -> tuple[int, ...]:
        """The declared sizes of 4-bit groups, unjudged (-1: the whole input side): layers are checked against them."""
        sizes = (scheme.group_size for scheme in self.schemes if isinstance(scheme, Int4Scheme))
        return tuple(dict.fromkeys(sizes))

    @property
    def zero_point(self) -> bool:
        """True if any 4-bit scheme has zeros of its own."""
        return any(scheme.zero_point for scheme in self.schemes if isinstance(scheme, Int4Scheme))

    @property
    def open_ended(self) -> bool:
        """True if the config does not settle for every module whether it is quantised."""
        return self.excluded.opaque or any(names.opaque for names, _ in self.rules)

    def excludes(self, module: str) -> bool:
        """True if `module` is listed as left alone."""
        return self.excluded.covers(module)

    def scheme(self, module: str, head: str = "lm_head") -> Scheme | None:
        """How the linear layer `module` is stored, as far as the config tells; None: not quantised."""
        name = module.rpartition(".")[2]
        if self.excludes(module) or name in _NEVER_QUANTISED or (name == head and not self.packs_head):
            return None
        return next((scheme for names, scheme in self.rules if names.covers(module)), None)


def cut_group(size: int, start: int, stop: int, whole: bool = True) -> int:
    """Neighbouring inputs with one scale in a slice `start:stop` of a layer with groups of `size`.

    Within one group that is the whole slice. Else, off the grid, groups are cut into equal smaller ones; the last may
    be short unless `whole`.
    """
    if start // size == (stop - 1) // size:
        return stop - start
    return math.gcd(size, start, stop if whole else 0)


def _compiled(text: str) -> re.Pattern[str] | None:
    """The pattern, or None for one that is no pattern or whose matching could take very long."""
    if len(text) > _MAX_PATTERN or _REPEATED_GROUP.search(text) or sum(map(text.count, "*+{")) > _MAX_REPEATS:
        return None
    try:
        return re.compile(text)
    except (re.error, OverflowError):
        return None
