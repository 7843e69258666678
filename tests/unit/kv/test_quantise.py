"""The low-bit formats of cached vectors: their error bounds, and what saturates."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import kernels as oracle

from deepseek_tgi.kv.quantise import (
    dequantise_fp8,
    dequantise_int4,
    dequantise_rows,
    error_bound,
    quantise_fp8,
    quantise_int4,
    quantise_rows,
)

FINITE = st.floats(-65504, 65504, width=32)


@given(st.lists(FINITE, min_size=1, max_size=33))
@settings(max_examples=300, deadline=None)
def test_error_stays_within_the_stated_bound(values: list[float]) -> None:
    x = torch.tensor([values])
    back = dequantise_rows(*quantise_rows(x))
    assert float((back - x).abs().max()) <= float(error_bound(x, "int8"))
    back = dequantise_fp8(*quantise_fp8(x))
    assert float((back - x).abs().max()) <= float(error_bound(x, "fp8_e4m3fn"))
    x = torch.nn.functional.pad(x / 8, (0, 64 - x.shape[1]))  # of a length that INT4 has room for
    back = dequantise_int4(*quantise_int4(x))
    assert float((back.double() - x.double()).norm()) <= float(error_bound(x, "int4"))


@given(st.lists(FINITE, min_size=1, max_size=33))
@settings(max_examples=300, deadline=None)
def test_codes_are_those_of_the_written_format(values: list[float]) -> None:
    q, params = quantise_rows(torch.tensor([values]))
    codes, scale, zero = oracle.int8_vector(torch.tensor(values).numpy())
    assert q[0].tolist() == codes.tolist()
    assert params[0].tolist() == [scale, zero]


@pytest.mark.parametrize("value", [0.0, 1.0, -7.123, 1e-9, -1e-9, 65504.0, -65504.0])
def test_a_constant_vector_keeps_its_value_to_half_precision(value: float) -> None:
    x = torch.full((1, 64), value)
    back = dequantise_rows(*quantise_rows(x))
    assert bool((back == back[0, 0]).all())
    assert abs(float(back[0, 0]) - value) <= abs(value) * 2**-17 + 2**-24


def test_the_bound_is_half_a_step_where_half_precision_is_fine_enough() -> None:
    x = torch.linspace(-1, 1, 64).unsqueeze(0)
    assert float(error_bound(x, "int8")) <= 0.51 * 2 / 255


@pytest.mark.parametrize(("mode", "part"), [("bfloat16", 2**-8), ("fp8_e4m3fn", 0.063), ("int4", 0.25)])
def test_bounds_are_small_against_what_is_stored(mode: str, part: float) -> None:
    x = torch.randn(50, 64, generator=torch.Generator().manual_seed(0))
    size = x.norm(dim=-1) if mode == "int4" else x.abs().amax(-1)
    assert bool((error_bound(x, mode) <= part * size).all())
    assert not bool(error_bound(x, "float32").any())


def test_values_beyond_half_precision_saturate() -> None:
    back = dequantise_rows(*quantise_rows(torch.tensor([[1e30, -1e30, 0.0]])))
    assert back.isfinite().all()
    assert abs(float(back[0, 0]) - 65504) <= 300  # a step is 131008 / 255 = 514
    assert float(back[0, 1]) == -65504


def test_a_vector_with_a_nan_reads_back_as_nan() -> None:
    q, params = quantise_rows(torch.tensor([[1.0, float("nan")], [1.0, 2.0]]))
    back = dequantise_rows(q, params)
    assert back[0].isnan().all()
    assert back[1].isfinite().all()
