"""The forms of a stored weight: every slice, order and fusion against the dense numbers they stand for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from deepseek_tgi.adapters.weight_forms import DenseWeight, Fp8Weight, Int4Weight, Weight, fuse

N, K = 24, 96


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def int4(group: int = 32, ordered: bool = False, bias: bool = True, seed: int = 0) -> Int4Weight:
    gen = generator(seed)
    codes = torch.randint(0, 16, (N, K), generator=gen).to(torch.uint8)
    zeros = torch.randint(0, 16, (N, K // group), generator=gen).to(torch.uint8)
    scales = (torch.rand(N, K // group, generator=gen) + 0.5).half()
    order = torch.randperm(K, generator=gen) if ordered else None
    return Int4Weight(codes, zeros, scales, group, torch.randn(N, generator=gen) if bias else None, order)


def fp8(block: int = 40, seed: int = 0) -> Fp8Weight:
    gen = generator(seed)
    codes = (torch.randn(N, K, generator=gen) * 50).to(torch.float8_e4m3fn)
    scales = torch.rand(N, -(-K // block), generator=gen) + 0.5
    return Fp8Weight(codes, scales, block, torch.randn(N, generator=gen))


def dense(seed: int = 0) -> DenseWeight:
    gen = generator(seed)
    return DenseWeight(torch.randn(N, K, generator=gen), torch.randn(N, generator=gen))


FORMS: dict[str, Callable[[], Weight]] = {
    "int4": int4,
    "int4-ordered": lambda: int4(ordered=True),
    "fp8": fp8,
    "fp8-rows": lambda: fp8(block=K),
    "dense": dense,
}


@pytest.fixture(params=FORMS, ids=str)
def weight(request: pytest.FixtureRequest) -> Weight:
    return FORMS[request.param]()


def biases(weight: Weight) -> torch.Tensor:
    assert weight.bias is not None
    return weight.bias


def test_int4_means_code_less_zero_times_scale_at_its_ordered_input() -> None:
    w = int4(ordered=True)
    assert w.order is not None
    expected = torch.zeros(N, K)
    for n in range(N):
        for j in range(K):
            step = int(w.codes[n, j]) - int(w.zeros[n, j // 32])
            expected[n, int(w.order[j])] = step * float(w.scales[n, j // 32])
    assert torch.equal(w.dequantise(), expected)


def test_fp8_means_code_times_the_scale_of_its_block() -> None:
    w = fp8()
    expected = torch.stack([w.codes[:, k].float() * w.scales[:, k // 40] for k in range(K)], 1)
    assert torch.equal(w.dequantise(), expected)


def test_rows_may_be_taken_and_reordered_anywhere(weight: Weight) -> None:
    whole = weight.dequantise()
    assert torch.equal(weight.rows(5, 18).dequantise(), whole[5:18])
    assert torch.equal(biases(weight.rows(5, 18)), biases(weight)[5:18])
    order = torch.randperm(N, generator=generator(7))
    assert torch.equal(weight.reordered(order).dequantise(), whole[order])
    assert torch.equal(biases(weight.reordered(order)), biases(weight)[order])


@pytest.mark.parametrize(("start", "stop"), [(0, 32), (32, 96), (0, 48), (48, 96), (40, 80), (80, 96), (8, 56)])
def test_columns_may_be_taken_on_and_off_the_grid(weight: Weight, start: int, stop: int) -> None:
    part = weight.columns(start, stop)
    assert torch.equal(part.dequantise(), weight.dequantise()[:, start:stop])
    assert (part.out_features, part.in_features, part.bias) == (N, stop - start, None)


def test_columns_keep_the_stored_form_and_the_widest_group_that_fits() -> None:
    on_grid, off_grid, last = int4().columns(32, 96), int4().columns(48, 96), fp8().columns(40, 96)
    assert isinstance(on_grid, Int4Weight)
    assert on_grid.group_size == 32
    assert isinstance(off_grid, Int4Weight)
    assert off_grid.group_size == 16
    assert last.block == 40
    assert last.scales.shape == (N, 2)
    assert isinstance(int4(ordered=True).columns(0, 32), DenseWeight)
    for within in (int4(K).columns(8, 56), int4().columns(40, 56)):
        assert isinstance(within, Int4Weight)
        assert within.scales.shape == (N, 1), "one group has one scale, wherever it is cut"
    assert fp8(K).columns(7, 53).scales.shape == (N, 1)


def test_one_group_over_all_inputs_stays_one_wherever_it_is_cut() -> None:
    whole = int4(K)
    part = whole.columns(40, 56)
    assert isinstance(part, Int4Weight)
    assert (part.group_size, part.scales.shape) == (16, (N, 1))
    assert torch.equal(part.columns(3, 14).dequantise(), whole.dequantise()[:, 43:54])


def test_natural_order_keeps_the_numbers(weight: Weight) -> None:
    natural = weight.natural()
    assert getattr(natural, "order", None) is None
    assert torch.equal(natural.dequantise(), weight.dequantise())
    assert torch.equal(biases(natural), biases(weight))


@pytest.mark.parametrize("make", [int4, lambda seed: int4(ordered=True, seed=0), fp8, dense])
def test_like_layers_fuse_in_order(make: Callable[..., Weight]) -> None:
    parts = [make(seed=0), make(seed=1).rows(0, 9)]
    fused = fuse(parts)
    assert fused is not None
    assert torch.equal(fused.dequantise(), torch.cat([p.dequantise() for p in parts]))
    assert torch.equal(biases(fused), torch.cat([biases(p) for p in parts]))


def test_unlike_layers_do_not_fuse() -> None:
    pairs: list[tuple[Weight, Weight]] = [
        (int4(), dense()),
        (int4(), fp8()),
        (int4(32), int4(48)),
        (int4(), int4(ordered=True)),
        (int4(ordered=True, seed=0), int4(ordered=True, seed=1)),
        (fp8(40), fp8(48)),
    ]
    for pair in pairs:
        assert fuse(pair) is None
