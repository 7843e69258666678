"""The kernel set of a GPU, put together on a CPU: who brings what, and activations in bfloat16 through every op."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch

from deepseek_tgi.kernels import triton_use
from deepseek_tgi.kernels.common import ComputeDtype
from deepseek_tgi.kernels.compiler import BuildError
from deepseek_tgi.kernels.device_set import assemble, operators, syncing_ops
from deepseek_tgi.kernels.moe import Expert
from deepseek_tgi.kernels.paged_attention.triton import provide as provide_triton
from deepseek_tgi.kernels.select import KernelSet
from deepseek_tgi.kernels.triton_use import triton_unfit

CPU = torch.device("cpu")
HALF_STEP = 2.0**-8
"""Of bfloat16: what rounding changes a number by, at most."""


@pytest.fixture
def plain() -> KernelSet:
    return operators(CPU, ComputeDtype.BFLOAT16)


def test_what_is_brought_is_used_by_what_is_made_of_it(plain: KernelSet) -> None:
    calls: list[torch.dtype] = []

    def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None) -> torch.Tensor:
        calls.append(x.dtype if out is None else out.dtype)
        return plain.rms_norm(x, weight, eps, out)

    made = assemble(plain, [lambda kernels: replace(kernels, rms_norm=rms_norm)])
    packed = made.pack_int4(
        torch.randint(16, (16, 32), dtype=torch.uint8), torch.full((16, 1), 8, dtype=torch.uint8), torch.ones(16, 1), 32
    )
    made.norm_int4_linear(torch.randn(2, 32), torch.ones(32), 1e-6, packed)
    assert calls == [torch.bfloat16]


def test_what_cannot_be_had_is_said_and_left_as_it_was(plain: KernelSet, caplog: pytest.LogCaptureFixture) -> None:
    def unfit(kernels: KernelSet) -> KernelSet:
        raise BuildError("rope needs sm_80")

    with caplog.at_level(logging.WARNING):
        assert assemble(plain, [unfit]) is plain
    assert "rope needs sm_80; torch's operators do its work" in caplog.text


def test_an_op_brought_whole_is_not_made_of_parts(plain: KernelSet) -> None:
    def brought(*args: object, **kwargs: object) -> torch.Tensor:
        raise AssertionError

    made = assemble(plain, [lambda kernels: replace(kernels, qkv_attention=brought)])
    assert made.qkv_attention is brought


def test_torchs_ops_that_ask_the_device_are_known(plain: KernelSet) -> None:
    def write(*args: object, **kwargs: object) -> None: ...

    def attend(*args: object, **kwargs: object) -> torch.Tensor:
        raise AssertionError

    assert {"qkv_attention", "latent_prepare", "latent_attention", "moe"} <= syncing_ops(plain)
    made = assemble(plain, [lambda kernels: replace(kernels, kv_write=write, paged_attention=attend)])
    assert "qkv_attention" not in syncing_ops(made)
    assert "latent_attention" in syncing_ops(made)


def test_row_ops_take_and_give_bfloat16(plain: KernelSet) -> None:
    x = torch.randn(5, 64).bfloat16()
    weight = torch.randn(64)
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    near(plain.rms_norm(x, weight, 1e-6), exact, torch.bfloat16)
    out = torch.full((5, 64), float("nan"), dtype=torch.bfloat16)
    near(plain.rms_norm(x.float(), weight, 1e-6, out), exact, torch.bfloat16)
    gate, up = x.double().chunk(2, 1)
    near(plain.silu_mul(x), gate / (1 + (-gate).exp()) * up, torch.bfloat16)


def test_rope_turns_bfloat16_in_place(plain: KernelSet) -> None:
    q, k = torch.randn(3, 2, 8).bfloat16(), torch.randn(3, 1, 8).bfloat16()
    angles = torch.rand(4, 4) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), 1)
    positions = torch.tensor([3, 0, 2], dtype=torch.int32)
    turned = torch.polar(torch.ones(4, 4), angles)[positions.long()].unsqueeze(1)
    exact = [torch.complex(x.float()[..., :4], x.float()[..., 4:]) * turned for x in (q, k)]
    plain.rope(q, k, positions, cos_sin)
    for got, want in zip((q, k), exact, strict=True):
        near(got, torch.cat((want.real, want.imag), -1).double(), torch.bfloat16)


@pytest.mark.parametrize("stream", [torch.float32, torch.bfloat16])
def test_products_add_to_the_stream_or_give_activations(plain: KernelSet, stream: torch.dtype) -> None:
    x, weight = torch.randn(3, 64).bfloat16(), torch.randn(16, 64).bfloat16()
    residual = torch.randn(3, 16).to(stream)
    out = torch.full((3, 16), float("nan"), dtype=stream)
    plain.dense_linear(x, plain.pack_dense(weight), None, residual, out)
    exact = x.double() @ weight.double().t()
    # Torch's product is rounded to bfloat16 once more.
    assert ((out.double() - exact - residual.double()).abs() <= HALF_STEP * (exact.abs() + out.double().abs())).all()


def test_experts_take_bfloat16_and_add_to_the_stream(plain: KernelSet) -> None:
    x, out = torch.randn(4, 32).bfloat16(), torch.zeros(4, 32)
    dense = [(torch.randn(64, 32).bfloat16(), torch.randn(32, 32).bfloat16()) for _ in range(3)]
    experts = plain.pack_experts([Expert(plain.pack_dense(a), plain.pack_dense(b)) for a, b in dense])
    ids = torch.tensor([[0, 2], [1, 0], [2, 1], [0, 1]], dtype=torch.int32)
    shares = torch.rand(4, 2)
    plain.moe(x, ids, shares, experts, out)
    exact = torch.zeros(4, 32, dtype=torch.float64)
    for t in range(4):
        for j in range(2):
            gate_up, down = dense[int(ids[t, j])]
            gate, up = (gate_up.double() @ x[t].double()).chunk(2)
            exact[t] += shares[t, j] * (down.double() @ (gate / (1 + (-gate).exp()) * up))
    # Three roundings to bfloat16 in a row, of numbers as large as the largest.
    assert (out - exact).abs().max() <= 6 * HALF_STEP * exact.abs().max()


def near(got: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype) -> None:
    """Rounded once from float32."""
    assert got.dtype == dtype
    assert ((got.double() - exact).abs() <= HALF_STEP * 1.01 * exact.abs() + 1e-6).all()


def test_triton_is_used_where_what_it_needs_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "cc")
    assert triton_unfit() is None
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", "/nonexistent")
    assert "C compiler" in str(triton_unfit())
    monkeypatch.setattr(triton_use, "find_spec", lambda name: None)
    assert "triton is not installed" in str(triton_unfit())
    with pytest.raises(BuildError, match="paged_attention: the package triton"):
        provide_triton(operators(CPU, ComputeDtype.BFLOAT16))
