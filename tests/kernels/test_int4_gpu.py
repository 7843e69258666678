"""INT4 products on an NVIDIA GPU, in real sizes and odd ones, against float64."""

from __future__ import annotations

import pytest
import torch

from deepseek_tgi.kernels.common import ComputeDtype
from deepseek_tgi.kernels.cuda.nvrtc import arch_of, compile_all
from deepseek_tgi.kernels.cuda.program import KernelSpec
from deepseek_tgi.kernels.int4_linear import cuda, dequantised, layout, tune, wide
from deepseek_tgi.kernels.int4_linear.choice import Chooser, runs, tables_for
from deepseek_tgi.kernels.int4_linear.wide import WideShape
from deepseek_tgi.kernels.select import select_kernels

pytestmark = pytest.mark.gpu

SIZES = [
    (28672, 4096, 128), (4096, 14336, 128), (6144, 4096, 128), (4096, 4096, 128), (4608, 3584, 128),
    (3584, 18944, 128), (2048, 2048, 128), (576, 2048, 64), (1000, 1344, 64), (130, 160, 32), (33, 96, 96), (1, 64, 64),
]  # fmt: skip
ROWS = (1, 2, 7, 8, 9, 16, 17, 32, 33, 64, 65, 130, 256, 300, 700)


class Case:
    """A random weight packed on the device, and the numbers it stands for."""

    def __init__(self, n: int, k: int, group: int, dtype: torch.dtype = torch.float16) -> None:
        torch.manual_seed(n + k)
        device = torch.device("cuda")
        codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, device=device)
        zeros = torch.randint(0, 16, (n, k // group), dtype=torch.uint8, device=device)
        scales = (torch.rand(n, k // group, device=device) * 0.01 + 0.005).to(dtype)
        wide = codes.view(n, -1, group).double() - zeros.unsqueeze(-1)
        self.weight = (wide * scales.double().unsqueeze(-1)).view(n, k)
        self.packed = layout.pack(codes, zeros, scales, group)


@pytest.fixture(scope="module")
def ops() -> cuda.Int4Ops:
    device = torch.device("cuda")
    machine = cuda.machine_of(device)
    return cuda.Int4Ops(machine, Chooser(tables_for(device), machine.multiprocessors, machine.capability))


@pytest.fixture(scope="module", autouse=True)
def compiled(ops: cuda.Int4Ops) -> None:
    """What the tests below launch, compiled on all cores at once."""
    wanted: list[KernelSpec] = []
    for size in SIZES:
        w = Case(*size).packed
        for rows in ROWS:
            choice = ops.chooser.choice(w, rows)
            wanted += [tune.spec_of(choice, w, rows, out_bf16=narrow) for narrow in (False, True)]
    compile_all(wanted, arch_of(*torch.cuda.get_device_capability()))


def off(y: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative distance; NaN, where anything was not written, passes no bound."""
    return float((y.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_every_number_of_rows_against_float64(ops: cuda.Int4Ops, size: tuple[int, int, int]) -> None:
    case = Case(*size)
    for rows in ROWS:
        x = torch.randn(rows, size[1], device="cuda").bfloat16()
        bias, residual = torch.randn(size[0], device="cuda"), torch.randn(rows, size[0], device="cuda")
        product = x.double() @ case.weight.t()
        out = torch.full((rows, size[0]), float("nan"), dtype=torch.bfloat16, device="cuda")
        ops.int4_linear(x, case.packed, out=out)
        # Rounding the result to bfloat16 makes 1.7e-3 of the norm; rounding weights, where they are, as much again.
        assert off(out, product) < 4e-3, rows
        wide = torch.full((rows, size[0]), float("nan"), device="cuda")
        ops.int4_linear(x, case.packed, bias, residual, wide)
        assert off(wide, product + bias.double() + residual.double()) < 2.5e-3, rows
        again = torch.full((rows, size[0]), float("nan"), device="cuda")
        ops.int4_linear(x, case.packed, bias, residual, again)
        assert torch.equal(wide, again), rows


def test_candidates_against_float64(ops: cuda.Int4Ops) -> None:
    size = (1000, 1344, 64)
    case = Case(*size)
    arch = arch_of(*torch.cuda.get_device_capability())
    rows = (1, 16, 64, 200)
    compile_all((each for m in rows for each in tune.specs(case.packed, m, ops.machine)), arch)
    for m in rows:
        x = torch.randn(m, size[1], device="cuda").bfloat16()
        product = x.double() @ case.weight.t()
        for choice in tune.candidates(case.packed, m, ops.machine):
            assert runs(choice, m, case.packed, ops.machine.capability)
            out = torch.full((m, size[0]), float("nan"), dtype=torch.bfloat16, device="cuda")
            tune.call(ops.machine, choice, x, case.packed, out)
            assert off(out, product) < 4e-3, (m, choice)


WIDES = [
    WideShape(256, 2, 5, sharers=2), WideShape(256, 2, 5, cluster=2), WideShape(128, 3, 6, sharers=2),
    WideShape(128, 1, 5, cluster=2, sharers=2), WideShape(64, 4, 8), WideShape(64, 1, 4, cluster=4),
    WideShape(64, 2, 6, sharers=4),
]  # fmt: skip


@pytest.mark.parametrize("size", [(1000, 1344, 64), (2048, 4096, 128), (130, 640, 32)], ids=str)
def test_shapes_of_the_copy_engine_s_kernel_against_float64(ops: cuda.Int4Ops, size: tuple[int, int, int]) -> None:
    case = Case(*size)
    shapes = [shape for shape in WIDES if runs(shape, 300, case.packed, ops.machine.capability)]
    specs = [tune.spec_of(shape, case.packed, 300, out_bf16=narrow) for shape in shapes for narrow in (False, True)]
    compile_all(specs, arch_of(*torch.cuda.get_device_capability()))
    for rows in (37, 64, 300, 1100):
        x, bias = torch.randn(rows, size[1], device="cuda").bfloat16(), torch.randn(size[0], device="cuda")
        residual = torch.randn(rows, size[0], device="cuda")
        product = x.double() @ case.weight.t()
        for shape in shapes:
            narrow = torch.full((rows, size[0]), float("nan"), dtype=torch.bfloat16, device="cuda")
            wide.launch(ops.machine, shape, x, case.packed, narrow)
            assert off(narrow, product) < 4e-3, (rows, shape)
            sums = [torch.full((rows, size[0]), float("nan"), device="cuda") for _ in range(2)]
            for out in sums:
                wide.launch(ops.machine, shape, x, case.packed, out, bias=bias, residual=residual)
            assert off(sums[0], product + bias.double() + residual.double()) < 2.5e-3, (rows, shape)
            assert torch.equal(*sums), (rows, shape)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_dequantised_products_with_what_is_added(ops: cuda.Int4Ops, dtype: torch.dtype) -> None:
    case, rows = Case(1000, 1344, 64), 1500
    x, bias = torch.randn(rows, 1344, device="cuda").bfloat16(), torch.randn(1000, device="cuda")
    product = x.double() @ case.weight.t()
    for added in ((None, False), (bias, False), (None, True), (bias, True)):
        for in_place in (False, True) if added[1] and dtype == torch.float32 else (False,):
            residual = torch.randn(rows, 1000, device="cuda") if added[1] else None
            expected = product + sum(0 if t is None else t.double() for t in (added[0], residual))
            out = torch.full((rows, 1000), float("nan"), dtype=dtype, device="cuda")
            if in_place:
                assert residual is not None
                out = residual
            dequantised.write(ops.machine.programs, x, case.packed, out, bias=added[0], residual=residual)
            assert off(out, expected) < 4e-3, (added[0] is None, added[1], in_place)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_other_scales(ops: cuda.Int4Ops, dtype: torch.dtype) -> None:
    case = Case(1024, 1024, 128, dtype)
    for rows in (1, 8, 32, 100):
        x = torch.randn(rows, 1024, device="cuda").bfloat16()
        y = ops.int4_linear(x, case.packed)
        assert y.dtype == torch.float32
        assert off(y, x.double() @ case.weight.t()) < 2.5e-3


@pytest.mark.parametrize("rows", [1, 8, 20, 64], ids=lambda m: f"M{m}")
def test_float32_rows_that_lie_apart_are_rounded_first(ops: cuda.Int4Ops, rows: int) -> None:
    case = Case(1024, 1024, 128)
    wide = torch.randn(rows, 1500, device="cuda")
    for x in (wide[:, 100:1124], wide[:, 101:1125]):
        expected = x.bfloat16().double() @ case.weight.t()
        assert off(ops.int4_linear(x, case.packed), expected) < 2.5e-3


@pytest.mark.parametrize("rows", [1, 2, 8, 20], ids=lambda m: f"M{m}")
def test_norm_and_activation_first(rows: int) -> None:
    kernels = select_kernels("cuda", ComputeDtype.BFLOAT16, "cuda")
    case = Case(4096, 1536, 128)
    gate_up = torch.randn(rows, 3072, device="cuda").bfloat16()
    gate, up = gate_up.double().chunk(2, -1)
    residual = torch.randn(rows, 4096, device="cuda")
    y = kernels.silu_int4_linear(gate_up, case.packed, None, residual, torch.full_like(residual, float("nan")))
    assert off(y, (gate * torch.sigmoid(gate) * up) @ case.weight.t() + residual.double()) < 4e-3
    x, norm = torch.randn(rows, 1536, device="cuda") * 7, torch.rand(1536, device="cuda") + 0.5
    normed = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.double()
    assert off(kernels.norm_int4_linear(x, norm, 1e-5, case.packed), normed @ case.weight.t()) < 4e-3


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30])
def test_what_is_out_of_bounds_stays_in_its_row(ops: cuda.Int4Ops, bad: float) -> None:
    case = Case(1024, 1024, 128)
    for rows in (2, 8, 16, 32, 64, 200):
        x = torch.randn(rows, 1024, device="cuda").bfloat16()
        clean = ops.int4_linear(x, case.packed)
        x[1, 700] = bad
        y = ops.int4_linear(x, case.packed)
        kept = [i for i in range(rows) if i != 1]
        assert torch.equal(y[kept], clean[kept]), rows
        assert y[1].isfinite().all() == (bad == 1e30), rows


@pytest.mark.parametrize("size", [1e-30, 1e-10, 1e10, 1e30])
def test_magnitude_does_not_matter(ops: cuda.Int4Ops, size: float) -> None:
    case = Case(1024, 1024, 128)
    for rows in (1, 8, 32, 64, 200):
        x = (torch.randn(rows, 1024, device="cuda") * size).bfloat16()
        assert off(ops.int4_linear(x, case.packed), x.double() @ case.weight.t()) < 2.5e-3, rows


@pytest.mark.parametrize("rows", [1, 8, 16, 32, 64, 256], ids=lambda m: f"M{m}")
def test_a_graph_makes_the_same_bits(ops: cuda.Int4Ops, rows: int) -> None:
    first, second = Case(4096, 4096, 128), Case(1024, 4096, 128)
    x, residual = torch.randn(rows, 4096, device="cuda").bfloat16(), torch.randn(rows, 4096, device="cuda")

    def chain() -> torch.Tensor:
        stream = ops.int4_linear(x, first.packed, None, residual)
        return ops.int4_linear(stream, second.packed)

    eager = chain()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = chain()
    for _ in range(20):
        recorded.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(recorded, eager)
