"""The kernels for one shape of layer: what they are compiled for, and their launches."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deepseek_tgi.kernels.cuda.machine import Machine
from deepseek_tgi.kernels.cuda.program import Kernel, KernelSpec
from deepseek_tgi.kernels.moe.cuda_experts import CudaExperts, Cuts, Parts, most_groups
from deepseek_tgi.kernels.moe.shape import LayerShape, OneWay, PanelWay, SortedWay, StreamWay
from deepseek_tgi.kernels.moe.tiles import TILE, TiledInt4

_KEPT_PLANS = 256
"""Numbers of tokens that are remembered: prompts come in all lengths."""


@dataclass(frozen=True, slots=True)
class Step:
    """The operands of a call, x in bfloat16."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    out: torch.Tensor

    def rows(self, rows: slice) -> Step:
        """Some of its tokens."""
        return Step(self.x[rows], self.ids[rows], self.weights[rows], self.out[rows])


@dataclass(frozen=True, slots=True)
class Product:
    """One of the two products of sorted tokens, ready to launch."""

    kernel: Kernel
    grid: tuple[int, int, int]
    threads: int


@dataclass(frozen=True, slots=True)
class Sorted:
    """What `run_many` launches for a number of tokens."""

    sort: Kernel
    gate_up: Product
    down: Product


class LayerKernels:
    """The launches for one shape of layer; each kernel is compiled when it is first asked for."""

    def __init__(self, machine: Machine, shape: LayerShape) -> None:
        self.machine = machine
        self.shape = shape
        self._plans: dict[int, tuple[Cuts, OneWay | StreamWay | Sorted]] = {}
        self._found: dict[KernelSpec, Kernel] = {}
        self._combining: Kernel | None = None

    def plan(self, experts: CudaExperts, tokens: int) -> tuple[Cuts, OneWay | StreamWay | Sorted]:
        """How memory and work of so many tokens are cut, the same for every layer of the shape: worked out once."""
        found = self._plans.get(tokens)
        if found is None:
            top_k, way = self.shape.top_k, self.shape.way(tokens, self.machine)
            if isinstance(way, (OneWay, StreamWay)):
                found = Cuts.of(experts, tokens, top_k), way
            else:
                ready = self._sorted(way, most_groups(experts, tokens, top_k, way.rows))
                found = Cuts.of(experts, tokens, top_k), ready
            if len(self._plans) >= _KEPT_PLANS:
                self._plans.clear()
            self._plans[tokens] = found
        return found

    def run_one(self, step: Step, gate_up: TiledInt4, down: TiledInt4, gated: int, way: OneWay) -> None:
        """A single token: two launches."""
        blocks, threads = self.machine.multiprocessors, way.warps * 32
        first, second = (self._kernel(wanted) for wanted in self.shape.one_specs(way, blocks))
        first((blocks, 1, 1), threads, (step.x, gate_up.codes, gate_up.metas, step.ids, gated), overlap=True)
        made = (gated, down.codes, down.metas, step.ids, step.weights, step.out)
        second((-(-self.shape.hidden // TILE), 1, 1), threads, made, overlap=True)

    def run_stream(self, step: Step, gate_up: TiledInt4, down: TiledInt4, parts: Parts, way: StreamWay) -> None:
        """A few tokens: three launches."""
        blocks, threads = self.machine.multiprocessors, way.warps * 32
        first, second = (self._kernel(wanted) for wanted in self.shape.stream_specs(way, blocks))
        for kernel, given, weight, made in (
            (first, step.x, gate_up, parts.gated),
            (second, parts.gated, down, parts.products),
        ):
            kernel(
                (blocks, 1, 1), threads, (given, weight.codes, weight.metas, step.ids, made, len(step.x)), overlap=True
            )
        self._combine(step, parts.products)

    def run_many(self, step: Step, gate_up: TiledInt4, down: TiledInt4, parts: Parts, how: Sorted) -> None:
        """Tokens sorted by expert: four launches."""
        tiles = (parts.order, parts.tiles, parts.total)
        how.sort((1, 1, 1), 1024, (step.ids, *tiles, step.x.shape[0]), overlap=True)
        for product, given, weight, made in (
            (how.gate_up, step.x, gate_up, parts.gated),
            (how.down, parts.gated, down, parts.products),
        ):
            arguments = (given, weight.codes, weight.metas, *tiles, made)
            product.kernel(product.grid, product.threads, arguments, overlap=True)
        self._combine(step, parts.products)

    def _sorted(self, way: SortedWay | PanelWay, most: int) -> Sorted:
        """The launches of a step of tokens that go in at most so many groups."""
        gate_up, down = (
            Product(self._kernel(wanted), (-(-rows // of_block), most, 1), threads)
            for (wanted, threads, of_block), rows in (
                (self.shape.product("moe_gate_up", way), self.shape.inner),
                (self.shape.product("moe_down", way), self.shape.hidden),
            )
        )
        return Sorted(self._kernel(self.shape.sorted_spec("moe_sort", SortedWay(way.rows))), gate_up, down)

    def _combine(self, step: Step, products: int) -> None:
        if self._combining is None:
            self._combining = self._kernel(self.shape.sorted_spec("moe_combine", SortedWay(8)))
        summed = (products, step.ids, step.weights, step.out, step.out.stride(0))
        self._combining((-(-self.shape.hidden // 1024), step.x.shape[0], 1), 256, summed, overlap=True)

    def _kernel(self, wanted: KernelSpec) -> Kernel:
        found = self._found.get(wanted)
        if found is None:
            found = self._found[wanted] = self.machine.programs.kernel(wanted)
        return found
