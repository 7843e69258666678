"""Experts on the GPU's kernels, emulated here: against numpy in float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from emulation.emulated import EmulatedPrograms
from oracles import kernels as oracle

from deepseek_tgi.errors import GenerationError
from deepseek_tgi.kernels.common import Int4Tensors, PackedInt4, PlainDense
from deepseek_tgi.kernels.cuda.machine import Machine
from deepseek_tgi.kernels.int4_linear import layout
from deepseek_tgi.kernels.moe import Expert, cuda_experts, shape
from deepseek_tgi.kernels.moe.cuda import CudaMoe
from deepseek_tgi.kernels.moe.cuda_experts import CudaExperts
from deepseek_tgi.kernels.moe.tiles import hold_int4

Numpy = oracle.Array
MACHINE = Machine(EmulatedPrograms(), 3, 90)


class KeptInt4(PackedInt4):
    """An INT4 weight as it was stored."""

    def __init__(self, own: Int4Tensors) -> None:
        self.own = own
        super().__init__(own.codes.shape[0], own.codes.shape[1], own.group_size, 0)

    def tensors(self) -> Int4Tensors:
        return self.own

    def dequantise(self) -> torch.Tensor:
        return torch.from_numpy(meant(self.own)).float()


def int4(rows: int, columns: int, size: int, g: torch.Generator, dtype: torch.dtype) -> Int4Tensors:
    codes = torch.randint(0, 16, (rows, columns), generator=g, dtype=torch.uint8)
    zeros = torch.randint(0, 16, (rows, columns // size), generator=g, dtype=torch.uint8)
    scales = ((torch.rand(rows, columns // size, generator=g) + 0.5) * 0.1 / columns**0.5).to(dtype)
    return Int4Tensors(codes, zeros, scales, size)


def meant(own: Int4Tensors) -> Numpy:
    return oracle.int4_weight(
        own.codes.float().numpy(), own.zeros.float().numpy(), own.scales.float().numpy(), own.group_size
    )


def made(
    num: int, hidden: int, inner: int, shared: int, size: int, *, dense: bool = False
) -> tuple[CudaExperts, list[tuple[Numpy, Numpy]]]:
    g = torch.Generator().manual_seed(3)
    dtype = torch.bfloat16 if num == 4 else torch.float16  # both kinds of scales
    experts, matrices = [], []
    for width in [inner] * num + ([shared] if shared else []):
        gate_up, down = int4(2 * width, hidden, size, g, dtype), int4(hidden, width, size, g, dtype)
        matrices.append((meant(gate_up), meant(down)))
        if dense:
            one, two = (torch.from_numpy(m).bfloat16() for m in matrices[-1])
            experts.append(Expert(PlainDense(one), PlainDense(two)))
            matrices[-1] = (one.double().numpy(), two.double().numpy())
        else:
            experts.append(Expert(KeptInt4(gate_up), KeptInt4(down)))
    own = experts.pop() if shared else None
    return CudaExperts(experts, own), matrices


def one(x: Numpy, weights: tuple[Numpy, Numpy]) -> Numpy:
    gate, up = np.split(weights[0] @ x, 2)
    result: Numpy = weights[1] @ (gate / (1 + np.exp(-gate)) * up)
    return result


@pytest.fixture(params=["tiles", "chunks", "panels", "sorted", "dense"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "chunks":
        monkeypatch.setattr(cuda_experts, "MOST_TOKENS", 3)
    if request.param in {"panels", "sorted"}:  # of one token as well
        monkeypatch.setattr(shape, "_FIXED_BYTES", 1 << 20)
    if request.param == "panels":
        monkeypatch.setattr(shape, "_PANELS_FROM", 0)
    return str(request.param)


@pytest.mark.parametrize(
    ("tokens", "num", "top_k", "hidden", "inner", "shared", "size"),
    [
        (1, 6, 3, 128, 64, 128, 64),
        (1, 6, 3, 256, 128, 128, 64),  # two groups are loaded together; or four, of a width that is not even
        (7, 5, 2, 224, 128, 256, 32),
        (3, 4, 2, 160, 96, 96, 32),
        (5, 4, 2, 96, 32, 0, 32),
        (11, 3, 2, 256, 128, 384, 128),
        (37, 2, 1, 64, 64, 96, 32),
        (70, 2, 1, 192, 64, 128, 64),
    ],
)
def test_experts_add_what_numpy_says(
    way: str, tokens: int, num: int, top_k: int, hidden: int, inner: int, shared: int, size: int
) -> None:
    experts, matrices = made(num, hidden, inner, shared, size, dense=way == "dense")
    assert (experts.dense is not None) == (way == "dense")
    g = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, hidden, generator=g).bfloat16()
    ids = torch.rand(tokens, num, generator=g).argsort(1)[:, :top_k].int().contiguous()
    weights = torch.rand(tokens, top_k, generator=g)
    start = torch.randn(tokens, hidden, generator=g)
    out = start.clone()
    scratch = torch.full((experts.scratch_floats(tokens, top_k),), float("nan"))
    machine = replace(MACHINE, capability=80) if way == "sorted" else MACHINE
    CudaMoe(machine)(x, ids, weights, experts, out, scratch=scratch)
    rows = x.double().numpy()
    expected = start.double().numpy()
    for t in range(tokens):
        for j in range(top_k):
            expected[t] += float(weights[t, j]) * one(rows[t], matrices[int(ids[t, j])])
        if shared:
            expected[t] += one(rows[t], matrices[-1])
    # The gated activations are rounded to bfloat16; where experts have many rows weights as well, and in the dense way
    # products besides.
    error = np.abs(out.numpy() - expected).max() / np.abs(expected - start.numpy()).max()
    assert error < {"sorted": 2**-8, "dense": 2**-6}.get(way, 2**-8 if tokens < 37 and way != "panels" else 2**-7)


def test_a_layer_takes_every_number_of_tokens_in_turn() -> None:
    used, matrices = made(4, 128, 64, 64, 64)
    op, g = CudaMoe(MACHINE), torch.Generator().manual_seed(1)
    for tokens, top_k in ((40, 2), (1, 2), (7, 3), (40, 3), (40, 2), (1, 3), (7, 3)):
        x = torch.randn(tokens, 128, generator=g).bfloat16()
        ids = torch.rand(tokens, 4, generator=g).argsort(1)[:, :top_k].int().contiguous()
        weights = torch.rand(tokens, top_k, generator=g)
        out = torch.zeros(tokens, 128)
        op(x, ids, weights, used, out)
        rows = x.double().numpy()
        expected = np.stack(
            [
                sum(float(weights[t, j]) * one(rows[t], matrices[int(ids[t, j])]) for j in range(top_k))
                + one(rows[t], matrices[-1])
                for t in range(tokens)
            ]
        )
        assert np.abs(out.numpy() - expected).max() / np.abs(expected).max() < 2**-7


def test_scratch_that_is_too_short_is_refused() -> None:
    experts, _ = made(4, 128, 64, 64, 64)
    x, ids, weights = torch.randn(5, 128).bfloat16(), torch.tensor([[0, 1]] * 5, dtype=torch.int32), torch.ones(5, 2)
    scratch = torch.zeros(experts.scratch_floats(5, 2) - 1)
    with pytest.raises(GenerationError, match=r"moe: got scratch \[\d+\] float32, expected \d+ float32"):
        CudaMoe(MACHINE)(x, ids, weights, experts, torch.zeros(5, 128), scratch=scratch)


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    experts, _ = made(4, 128, 64, 64, 64)
    g = torch.Generator().manual_seed(2)
    x = torch.randn(9, 128, generator=g).bfloat16()
    ids = torch.rand(9, 4, generator=g).argsort(1)[:, :2].int().contiguous()
    weights = torch.rand(9, 2, generator=g)
    op = CudaMoe(MACHINE)
    together, others = torch.zeros(9, 128), torch.zeros(9, 128)
    op(x, ids, weights, experts, together)
    other_x, other_ids = x.flip(0).contiguous(), ids.flip(0).contiguous()
    other_x[4], other_ids[4] = x[2], ids[2]
    op(other_x, other_ids, weights.flip(0).contiguous().index_copy(0, torch.tensor([4]), weights[2:3]), experts, others)
    assert torch.equal(others[4], together[2])


@pytest.mark.parametrize("tokens", [60, 160])
def test_panels_give_a_token_the_same_bits_whoever_shares_its_expert(
    tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone in a short group, or among many; and wherever in its expert's order it stands."""
    monkeypatch.setattr(shape, "_PANELS_FROM", 0)
    experts, _ = made(2, 128, 64, 0, 64)
    g = torch.Generator().manual_seed(4)
    x = torch.randn(tokens, 128, generator=g).bfloat16()
    weights = torch.rand(tokens, 1, generator=g)
    op = CudaMoe(MACHINE)

    def row(ids: list[int], place: int) -> torch.Tensor:
        order = torch.arange(tokens).roll(place)
        out = torch.full((tokens, 128), 0.0)
        op(
            x[order].contiguous(),
            torch.tensor(ids, dtype=torch.int32).view(-1, 1),
            weights[order].contiguous(),
            experts,
            out,
        )
        return out[place]

    alone = row([0] + [1] * (tokens - 1), 0)
    assert alone.any()
    for place in (0, tokens // 2, tokens - 1):
        assert torch.equal(row([0] * tokens, place), alone)


def test_a_weight_that_is_nan_spoils_its_row_alone() -> None:
    experts, _ = made(4, 128, 64, 0, 64)
    x = torch.randn(3, 128).bfloat16()
    ids = torch.tensor([[0, 1]] * 3, dtype=torch.int32)
    weights = torch.ones(3, 2)
    weights[1] = float("nan")
    out = torch.zeros(3, 128)
    CudaMoe(MACHINE)(x, ids, weights, experts, out)
    assert out[1].isnan().all()
    assert out[[0, 2]].isfinite().all()


def test_experts_held_as_they_were_read_are_laid_out_alike() -> None:
    g = torch.Generator().manual_seed(5)

    def weight(n: int, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
        codes, zeros = (torch.randint(16, shape, dtype=torch.uint8, generator=g) for shape in ((n, k), (n, k // 32)))
        return codes, zeros, (torch.rand(n, k // 32, generator=g) * 0.1).half(), 32

    drawn = [(weight(128, 64), weight(64, 64)) for _ in range(3)]
    held, packed = (
        CudaExperts([Expert(pack(*gate_up), pack(*down)) for gate_up, down in drawn])
        for pack in (hold_int4, layout.pack)
    )
    for name in ("gate_up", "down"):
        ours, theirs = getattr(held, name), getattr(packed, name)
        assert torch.equal(ours.codes, theirs.codes)
        assert torch.equal(ours.metas, theirs.metas)
    # The float32 product of an exact difference and a scale, either way.
    assert torch.equal(hold_int4(*drawn[0][0]).dequantise(), layout.pack(*drawn[0][0]).dequantise())
