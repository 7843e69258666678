"""Grouped experts on an NVIDIA GPU: pairs sorted by expert on the device, no word to the host.

INT4 experts of one group size run on the tensor cores straight from their codes (`sources/moe.cu`), the shared expert
cut into pieces as wide as a routed one, so that it is part of the same launches. Experts of other kinds are kept in
bfloat16 and go through torch's grouped product.

A row's bits depend on how many rows there are (one, a few, many), not on what is in them.

Choice: weights of all experts lie in one tensor, tiles of 16 outputs by 64 inputs. Prevents: a pointer table, and a
launch for each expert. Rejected: sorting on the host, which would wait for the device once a layer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from deepseek_tgi.kernels.common import ACTIVATIONS
from deepseek_tgi.kernels.cuda.machine import machine_of
from deepseek_tgi.kernels.cuda.program import Kernel, KernelSpec, Programs, spec
from deepseek_tgi.kernels.moe import PackedExperts, check_moe
from deepseek_tgi.kernels.moe import cuda_experts as packed
from deepseek_tgi.kernels.moe.cuda_experts import CudaExperts, Cuts, Parts, Way
from deepseek_tgi.kernels.moe.tiles import CHUNK, TILE, TiledInt4, hold_int4, padded

if TYPE_CHECKING:
    from deepseek_tgi.kernels.select import KernelSet

_PAD = 16
"""Elements between staged rows, as `sources/moe.cu` has them."""
STAGES = 3
"""Units of passing rows in shared memory, likewise."""
SIGNATURES = {
    "moe_sort": "ppppi",
    "moe_gate_up": "ppppppp",
    "moe_gate_up_wide": "ppppppp",
    "moe_gate_up_one": "ppppp",
    "moe_down": "ppppppp",
    "moe_down_wide": "ppppppp",
    "moe_down_one": "pppppp",
    "moe_combine": "ppppl",
}


def provide(kernels: KernelSet) -> KernelSet:
    """See `kernels.device_set`."""
    op = CudaMoe(machine_of(kernels.device).programs)
    return replace(kernels, hold_int4=hold_int4, pack_experts=CudaExperts, moe=op)


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


class CudaMoe:
    """The op over the kernels of one device."""

    def __init__(self, programs: Programs) -> None:
        self._programs = programs
        self._kernels: dict[LayerShape, LayerKernels] = {}

    def __call__(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        experts: PackedExperts,
        out: torch.Tensor,
        *,
        scratch: torch.Tensor | None = None,
    ) -> None:
        """See the contract."""
        check_moe(x, ids, weights, experts, out, dtypes=ACTIVATIONS)
        assert isinstance(experts, CudaExperts), "packed by another set of kernels"
        step = Step(x if x.dtype is torch.bfloat16 else x.bfloat16(), ids, weights, out)
        if not len(x):
            return
        if experts.dense is not None:
            for first in range(0, len(x), packed.MOST_TOKENS):
                _grouped(step.rows(slice(first, first + packed.MOST_TOKENS)), experts.num_experts, experts.dense)
            return
        most = min(len(x), packed.MOST_TOKENS)
        if scratch is None:
            scratch = torch.empty(experts.scratch_floats(most, ids.shape[1]), device=x.device)
        for first in range(0, len(x), most):
            self._tiled(step.rows(slice(first, first + most)), experts, scratch)

    def _tiled(self, step: Step, experts: CudaExperts, scratch: torch.Tensor) -> None:
        assert experts.gate_up is not None
        assert experts.down is not None
        cuts = Cuts.of(experts, *step.ids.shape)
        kernels = self._of_layer(experts, *step.ids.shape)
        if len(step.x) == 1:
            kernels.run_one(step, experts.gate_up, experts.down, cuts.cut(scratch).gated)
        else:
            kernels.run_few(step, experts.gate_up, experts.down, cuts.cut(scratch), cuts.tiles)

    def _of_layer(self, experts: CudaExperts, num_tokens: int, top_k: int) -> LayerKernels:
        assert experts.gate_up is not None
        shape = LayerShape(
            group=experts.gate_up.group_size,
            bfloat16_scales=experts.gate_up.scale_dtype is torch.bfloat16,
            experts=experts.num_experts,
            top_k=top_k,
            pieces=experts.pieces,
            hidden=experts.hidden_size,
            inner=experts.inner,
            way=Way.of(experts, num_tokens, top_k),
        )
        found = self._kernels.get(shape)
        if found is None:
            found = self._kernels[shape] = LayerKernels(self._programs, shape)
        return found


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What the kernels of a layer are compiled for; `inner` is padded."""

    group: int
    bfloat16_scales: bool
    experts: int
    top_k: int
    pieces: int
    hidden: int
    inner: int
    way: Way

    def macros(self) -> dict[str, int]:
        """As `sources/moe.cu` names them."""
        return {
            "GROUP": self.group, "GROUP_SCALES": 1 + self.bfloat16_scales,
            "EXPERTS": self.experts, "TOP": self.top_k, "SHARED": self.pieces,
            "HIDDEN": self.hidden, "INNER": self.inner, "ROWS": self.way.rows, "WARPS": self.way.warps,
            "DEPTH": self.way.depth,
        }  # fmt: skip

    def spec(self, name: str) -> KernelSpec:
        """The kernel `name` of `sources/moe.cu` for this layer."""
        return spec("moe", name, SIGNATURES[name], self._shared_bytes(name), **self.macros())

    def _shared_bytes(self, name: str) -> int:
        """Dynamic shared memory: staged rows, or the warps' sums that take their place."""
        unit = max(CHUNK, self.group)
        hidden, rows = padded(self.hidden, unit), self.way.rows
        if name.endswith("_wide"):
            return STAGES * rows * (unit + _PAD) * 2
        staged = {"moe_gate_up": rows * (hidden + _PAD), "moe_down": rows * (self.inner + _PAD)}.get(name, 0) * 2
        sums = {"moe_gate_up": 2, "moe_down": 1}.get(name, 0) * self.way.warps * rows // 8 * 512
        return (hidden + _PAD) * 2 if name == "moe_gate_up_one" else max(staged, sums)


class LayerKernels:
    """The kernels for one shape of layer; each is compiled when it is first asked for."""

    def __init__(self, programs: Programs, shape: LayerShape) -> None:
        self._programs = programs
        self._shape = shape
        self._threads = shape.way.warps * 32
        self._tiles_of_block = shape.way.warps if shape.way.wide else 1
        self._product = "_wide" if shape.way.wide else ""
        self._found: dict[str, Kernel] = {}

    def run_one(self, step: Step, gate_up: TiledInt4, down: TiledInt4, gated: torch.Tensor) -> None:
        """A single token: two launches."""
        slots = self._shape.top_k + self._shape.pieces
        given = (step.x, gate_up.codes, gate_up.scales, step.ids, gated)
        self._kernel("moe_gate_up_one")((self._shape.inner // TILE, slots, 1), self._threads, given, overlap=True)
        made = (gated, down.codes, down.scales, step.ids, step.weights, step.out)
        self._kernel("moe_down_one")((down.codes.shape[1], 1, 1), slots * 32, made, overlap=True)

    def run_few(self, step: Step, gate_up: TiledInt4, down: TiledInt4, parts: Parts, most: int) -> None:
        """Tokens whose pairs make at most `most` tiles: four launches."""
        tokens, each = len(step.x), self._tiles_of_block
        tiles = (parts.order, parts.tiles, parts.total)
        self._kernel("moe_sort")((1, 1, 1), 1024, (step.ids, *tiles, tokens), overlap=True)
        given = (step.x, gate_up.codes, gate_up.scales, *tiles, parts.gated)
        self._kernel(f"moe_gate_up{self._product}")(
            (-(-self._shape.inner // TILE // each), most, 1), self._threads, given, overlap=True
        )
        made = (parts.gated, down.codes, down.scales, *tiles, parts.products)
        each *= 2 if self._shape.way.wide else 1
        self._kernel(f"moe_down{self._product}")(
            (-(-down.codes.shape[1] // each), most, 1), self._threads, made, overlap=True
        )
        summed = (parts.products, step.ids, step.weights, step.out, step.out.stride(0))
        blocks = -(-self._shape.hidden // 1024)
        self._kernel("moe_combine")((blocks, tokens, 1), 256, summed, overlap=True)

    def _kernel(self, name: str) -> Kernel:
        found = self._found.get(name)
        if found is None:
            found = self._found[name] = self._programs.kernel(self._shape.spec(name))
        return found


def _grouped(step: Step, num_experts: int, dense: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Through bfloat16 weights and torch's grouped product; nothing is asked of the device."""
    gate_up, down = dense
    tokens, top_k = step.ids.shape
    device, slots = step.x.device, top_k + len(gate_up) - num_experts
    pieces = torch.arange(num_experts, len(gate_up), device=device)
    chosen = torch.cat((step.ids, pieces.expand(tokens, -1)), 1).flatten()
    shares = torch.cat((step.weights, step.weights.new_ones(tokens, len(pieces))), 1)
    order = chosen.sort(stable=True).indices
    ends = torch.zeros(len(gate_up), dtype=torch.int32, device=device)
    ends.scatter_add_(0, chosen.long(), torch.ones_like(chosen, dtype=torch.int32))
    ends = ends.cumsum(0, dtype=torch.int32)
    given = step.x.index_select(0, order // slots)
    gate, up = torch._grouped_mm(given, gate_up.transpose(1, 2), offs=ends).chunk(2, 1)
    gated = (torch.nn.functional.silu(gate.float()) * up).bfloat16()
    products = torch.empty((len(order), step.x.shape[1]), dtype=torch.bfloat16, device=device)
    products[order] = torch._grouped_mm(gated, down.transpose(1, 2), offs=ends)
    # Ascending experts first, the shared pieces last: the order that the contract sums in.
    ranks = torch.cat((step.ids.argsort(1), torch.arange(top_k, slots, device=device).expand(tokens, -1)), 1)
    own = products.view(tokens, slots, -1)
    for slot in range(slots):
        at = ranks[:, slot : slot + 1]
        step.out.add_(own.take_along_dim(at.unsqueeze(2), 1).squeeze(1) * shares.gather(1, at))
