"""What the kernels of a layer of experts are compiled for, and the ways in which they compute a number of tokens.

The figures of a way were chosen by measuring layers of DeepSeek-V2-Lite on an H200.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from deepseek_tgi.kernels.cuda.machine import Machine, shared_limit
from deepseek_tgi.kernels.cuda.program import KernelSpec, spec
from deepseek_tgi.kernels.moe.cuda_experts import sorted_rows
from deepseek_tgi.kernels.moe.tiles import CHUNK, TILE, padded

_PAD = 8
"""Elements between rows, as `sources/moe.cu` has them."""
_STAGES = 3
"""Units of passing rows in shared memory, likewise."""
_ROWS = 8
"""Pairs of an expert that a few tokens' kernels multiply together."""
_STAGE = 128
"""Inputs that the kernels of few tokens load together, where they come out even."""
_SORTED = "ppppppp"
_WARPGROUPS = 90
"""The only capability that has their instructions."""
_FIXED_BYTES = 28 << 10
"""Of a block's shared memory: left for what is not dynamic."""


@dataclass(frozen=True, slots=True)
class OneWay:
    """Of a single token, `depth` stages of weights under way, of each warp."""

    warps: int
    depth: int


@dataclass(frozen=True, slots=True)
class StreamWay:
    """Of a few tokens: a block a multiprocessor, `warps` each, `split` of which share an item.

    `depth` times 64 inputs' weights under way, of each warp; at `most` so many tokens.
    """

    warps: int
    split: int
    depth: int
    most: int


@dataclass(frozen=True, slots=True)
class SortedWay:
    """Of sorted tokens, `rows` pairs of an expert together; `depth` units of weights under way, of each warp.

    `wide`: every warp has tiles of its own; else those of a block share one.
    """

    rows: int
    warps: int = 4
    depth: int = 2
    wide: bool = True


@dataclass(frozen=True, slots=True)
class PanelWay:
    """Of sorted tokens, `rows` pairs of an expert together, multiplied by `warpgroups` a block (sm_90a).

    `stages` of 64 inputs under way; `blocks` of a multiprocessor.
    """

    warpgroups: int
    stages: int
    blocks: int
    rows: int = 128


Way = OneWay | StreamWay | SortedWay | PanelWay

ONE = OneWay(16, 2)
STREAM = StreamWay(16, 2, 4, 32)
_MOST_PAIRS = 12
"""Of tiles that a block has, whose sums are in registers."""
FEW = SortedWay(8, warps=8, wide=False)
_FEW_TOKENS = 4
PANEL = PanelWay(2, 4, 2)
_PANELS_FROM = 17
"""Pairs an expert, beyond which panels are faster."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What all kernels of a layer are compiled for; `inner` is padded."""

    group: int
    bfloat16_scales: bool
    experts: int
    top_k: int
    pieces: int
    hidden: int
    inner: int

    def macros(self, stage: int) -> dict[str, int]:
        """As `sources/experts.cuh` names them."""
        return {
            "GROUP": self.group, "SCALE_KIND": 1 + self.bfloat16_scales, "EXPERTS": self.experts, "TOP": self.top_k,
            "SHARED": self.pieces, "HIDDEN": self.hidden, "INNER": self.inner, "STAGE": stage,
        }  # fmt: skip

    @property
    def unit(self) -> int:
        """Inputs that are loaded together."""
        return max(CHUNK, self.group)

    @property
    def stage(self) -> int:
        """Inputs that the kernels of few tokens load together: more of them cost fewer instructions."""
        wide = _STAGE // self.unit * self.unit
        even = wide and not padded(self.hidden, self.unit) % wide and not self.inner % wide
        return wide if even else self.unit

    @property
    def _tile_bytes(self) -> int:
        """Of 16 outputs and a stage of inputs."""
        return self.stage // 2 * TILE + self.stage // self.group * TILE * 4

    def way(self, num_tokens: int, machine: Machine) -> Way:
        """How so many tokens are computed on a device."""
        if num_tokens == 1 and self._fits_one(machine):
            return ONE
        if 1 < num_tokens <= STREAM.most and self._fits_stream(machine):
            return STREAM
        expected = num_tokens * self.top_k / self.experts
        if machine.capability == _WARPGROUPS and expected > _PANELS_FROM:
            return PANEL
        if num_tokens < _FEW_TOKENS and self._fits_few(machine):
            return FEW
        return SortedWay(sorted_rows(expected))

    def _fits_few(self, machine: Machine) -> bool:
        """Whether whole rows of both products find their memory on a device."""
        wanted = (self.sorted_spec(name, FEW).shared_bytes for name in ("moe_gate_up", "moe_down"))
        return max(wanted) <= shared_limit(machine.capability)

    def one_specs(self, way: OneWay, multiprocessors: int) -> tuple[KernelSpec, KernelSpec]:
        """Both kernels of a single token."""
        macros = {"WARPS": way.warps, "DEPTH": way.depth, "BLOCKS": multiprocessors, **self.macros(self.stage)}
        up, down = self._one_bytes(way)
        first = spec("moe_one", "moe_gate_up_one", "ppppp", up, **macros)
        second = spec("moe_one", "moe_down_one", "pppppp", down, **macros)
        return replace(first, beside=True), replace(second, beside=True)

    def _fits_one(self, machine: Machine) -> bool:
        """Whether both kernels of a single token find their memory and registers on a device."""
        tiles, blocks = self.inner // TILE, machine.multiprocessors
        pairs = -(-self.pieces * tiles // blocks) + -(-self.top_k * tiles // blocks)
        limit = shared_limit(machine.capability) - _FIXED_BYTES
        return pairs <= _MOST_PAIRS and max(self._one_bytes(ONE)) <= limit

    def _one_bytes(self, way: OneWay) -> tuple[int, int]:
        stages = (self.top_k + self.pieces) * (self.inner // self.stage)
        lines = -(-stages // way.warps) * way.warps * self.stage * 2
        return way.warps * way.depth * 2 * self._tile_bytes, stages * self._tile_bytes + lines

    def stream_specs(self, way: StreamWay, multiprocessors: int) -> tuple[KernelSpec, KernelSpec]:
        """Both kernels of a few tokens."""
        macros = {
            "WARPS": way.warps, "SPLIT": way.split, "DEPTH": self._stages(way), "MOST": way.most,
            "BLOCKS": multiprocessors, **self.macros(self.stage),
        }  # fmt: skip
        shared = self._stream_bytes(way)
        first = spec("moe_few", "moe_gate_up_few", "pppppi", shared, **macros)
        second = spec("moe_few", "moe_down_few", "pppppi", shared, **macros)
        return replace(first, beside=True), replace(second, beside=True)

    def _fits_stream(self, machine: Machine) -> bool:
        """Whether both kernels of a few tokens find their memory on a device."""
        return self._stream_bytes(STREAM) <= shared_limit(machine.capability) - _FIXED_BYTES

    def _stream_bytes(self, way: StreamWay) -> int:
        slot = 2 * self._tile_bytes + _ROWS * self.stage * 2
        return way.warps * self._stages(way) * slot + 2 * way.warps * 2 * 128 * 4

    def _stages(self, way: StreamWay) -> int:
        """A warp's stages under way."""
        return max(2, way.depth * CHUNK // self.stage)

    def product(self, name: str, way: SortedWay | PanelWay) -> tuple[KernelSpec, int, int]:
        """`moe_gate_up` or `moe_down` over sorted tokens: the kernel, its threads, and the outputs of a block."""
        up = name == "moe_gate_up"
        if isinstance(way, SortedWay):
            of_block = TILE * (way.warps if up else 2 * way.warps) if way.wide else TILE
            return self.sorted_spec(f"{name}_wide" if way.wide else name, way), way.warps * 32, of_block
        rows = way.warpgroups * 64
        warp_bytes = CHUNK // 2 * TILE + max(1, CHUNK // self.group) * TILE * 4
        staged = way.stages * (way.rows * CHUNK * 2 + rows // TILE * warp_bytes)
        made = way.rows * (rows + 4) * 4
        wanted = spec(
            "moe_panel", f"{name}_panel", _SORTED, max(staged, made), TOKENS=way.rows, WARPGROUPS=way.warpgroups,
            STAGES=way.stages, BLOCKS=way.blocks, **self.macros(self.unit),
        )  # fmt: skip
        return wanted, way.warpgroups * 128, rows // 2 if up else rows

    def sorted_spec(self, name: str, way: SortedWay) -> KernelSpec:
        """A kernel of `sources/moe.cu`."""
        rows = {"moe_gate_up": self.hidden, "moe_down": self.inner}.get(name, 0)
        if name.endswith("_wide"):
            shared = _STAGES * way.rows * (self.unit + _PAD) * 2
        elif rows:  # staged rows, or the warps' sums that take their place
            sums = (2 if name == "moe_gate_up" else 1) * way.warps * way.rows // 8 * 512
            shared = max(way.rows * (padded(rows, self.unit) + _PAD) * 2, sums)
        else:
            shared = 0
        signature = {"moe_sort": "ppppi", "moe_combine": "ppppl"}.get(name, _SORTED)
        return spec(
            "moe", name, signature, shared, ROWS=way.rows, WARPS=way.warps, DEPTH=way.depth, **self.macros(self.unit)
        )  # fmt: skip
