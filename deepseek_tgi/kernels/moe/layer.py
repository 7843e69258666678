"""The kernels for one shape of layer: what they are compiled for, and their launches."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deepseek_tgi.kernels.cuda.machine import Machine
from deepseek_tgi.kernels.cuda.program import Kernel, KernelSpec
from deepseek_tgi.kernels.moe.cuda_experts import Parts
from deepseek_tgi.kernels.moe.shape import LayerShape, OneWay, PanelWay, SortedWay, StreamWay
from deepseek_tgi.kernels.moe.tiles import TILE, TiledInt4


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


class LayerKernels:
    """The launches for one shape of layer; each kernel is compiled when it is first asked for."""

    def __init__(self, machine: Machine, shape: LayerShape) -> None:
        self._machine = machine
        self.shape = shape
        self._found: dict[KernelSpec, Kernel] = {}

    def run_one(self, step: Step, gate_up: TiledInt4, down: TiledInt4, gated: torch.Tensor, way: OneWay) -> None:
        """A single token: two launches."""
        blocks, threads = self._machine.multiprocessors, way.warps * 32
        first, second = (self._kernel(wanted) for wanted in self.shape.one_specs(way, blocks))
        first((blocks, 1, 1), threads, (step.x, gate_up.codes, gate_up.metas, step.ids, gated), overlap=True)
        made = (gated, down.codes, down.metas, step.ids, step.weights, step.out)
        second((-(-self.shape.hidden // TILE), 1, 1), threads, made, overlap=True)

    def run_stream(self, step: Step, gate_up: TiledInt4, down: TiledInt4, parts: Parts, way: StreamWay) -> None:
        """A few tokens: three launches."""
        blocks, threads = self._machine.multiprocessors, way.warps * 32
        first, second = (self._kernel(wanted) for wanted in self.shape.stream_specs(way, blocks))
        for kernel, given, weight, made in (
            (first, step.x, gate_up, parts.gated),
            (second, parts.gated, down, parts.products),
        ):
            kernel(
                (blocks, 1, 1), threads, (given, weight.codes, weight.metas, step.ids, made, len(step.x)), overlap=True
            )
        self._combine(step, parts.products)

    def run_many(
        self, step: Step, gate_up: TiledInt4, down: TiledInt4, parts: Parts, how: tuple[SortedWay | PanelWay, int]
    ) -> None:
        """Tokens sorted by expert, in at most so many groups: four launches."""
        shape, (way, most) = self.shape, how
        tiles = (parts.order, parts.tiles, parts.total)
        sort = self._kernel(shape.sorted_spec("moe_sort", SortedWay(way.rows)))
        sort((1, 1, 1), 1024, (step.ids, *tiles, len(step.x)), overlap=True)
        for name, given, weight, made, rows in (
            ("moe_gate_up", step.x, gate_up, parts.gated, shape.inner),
            ("moe_down", parts.gated, down, parts.products, shape.hidden),
        ):
            product, threads, of_block = shape.product(name, way)
            self._kernel(product)(
                (-(-rows // of_block), most, 1),
                threads,
                (given, weight.codes, weight.metas, *tiles, made),
                overlap=True,
            )
        self._combine(step, parts.products)

    def _combine(self, step: Step, products: torch.Tensor) -> None:
        summed = (products, step.ids, step.weights, step.out, step.out.stride(0))
        kernel = self._kernel(self.shape.sorted_spec("moe_combine", SortedWay(8)))
        kernel((-(-self.shape.hidden // 1024), len(step.x), 1), 256, summed, overlap=True)

    def _kernel(self, wanted: KernelSpec) -> Kernel:
        found = self._found.get(wanted)
        if found is None:
            found = self._found[wanted] = self._machine.programs.kernel(wanted)
        return found
