"""Every dialect of packed 4-bit weights against its numpy restatement."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from oracles import awq as oracle

from deepseek_tgi.adapters.awq.format import GEMM, GEMV, PACK_QUANTIZED, AwqFormat
from deepseek_tgi.adapters.awq.unpack import pack_gemm, unpack
from deepseek_tgi.adapters.weight_forms import DenseWeight, Int4Weight, fuse

SHAPES = [
    pytest.param(8, 32, 32, id="one-word-one-group"),
    pytest.param(64, 128, 128, id="one-group"),
    pytest.param(24, 192, 64, id="odd-groups"),
    pytest.param(40, 288, 32, id="nine-groups"),
    pytest.param(96, 96, 32, id="square"),
    pytest.param(16, 72, 72, id="whole-row"),
]


def as_torch(tensors: dict[str, oracle.Array]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in tensors.items()}


@pytest.mark.parametrize(("n", "k", "group"), SHAPES)
def test_gemm_reads_the_published_layout(n: int, k: int, group: int) -> None:
    layer = oracle.random_layer(n, k, group)
    t = as_torch(oracle.gemm_tensors(layer))
    got = unpack(GEMM, t["qweight"], t["qzeros"], t["scales"], (n, k), group_size=group)
    assert (got.codes.shape, got.zeros.shape, got.scales.shape) == ((n, k), (n, k // group), (n, k // group))
    np.testing.assert_array_equal(got.dequantise().numpy(), layer.weight())


@pytest.mark.parametrize(("n", "k", "group"), SHAPES)
def test_gemv_reads_the_published_layout(n: int, k: int, group: int) -> None:
    layer = oracle.random_layer(n, k, group)
    t = as_torch(oracle.gemv_tensors(layer))
    got = unpack(GEMV, t["qweight"], t["qzeros"], t["scales"], (n, k), group_size=group)
    np.testing.assert_array_equal(got.dequantise().numpy(), layer.weight())


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("n", "k", "group"), [*SHAPES, pytest.param(12, 60, 60, id="padded-words")])
def test_pack_quantized_reads_the_published_layout(n: int, k: int, group: int, symmetric: bool) -> None:
    layer = oracle.random_layer(n, k, group, symmetric=symmetric)
    t = as_torch(oracle.pack_quantized_tensors(layer, symmetric))
    got = unpack(
        PACK_QUANTIZED, t["weight_packed"], t.get("weight_zero_point"), t["weight_scale"], (n, k), group_size=group
    )
    np.testing.assert_array_equal(got.dequantise().numpy(), layer.weight())


@pytest.mark.parametrize("layout", [GEMM, GEMV, PACK_QUANTIZED], ids=lambda f: f.name)
@pytest.mark.parametrize(("n", "k", "group"), SHAPES)
def test_descriptor_shapes_are_those_of_the_written_tensors(layout: AwqFormat, n: int, k: int, group: int) -> None:
    layer = oracle.random_layer(n, k, group)
    tensors = {
        "gemm": oracle.gemm_tensors(layer),
        "gemv": oracle.gemv_tensors(layer),
        "pack-quantized": oracle.pack_quantized_tensors(layer, False),
    }[layout.name]
    assert tensors[layout.weight].shape == layout.weight_shape(n, k)
    assert tensors[layout.zeros].shape == layout.zeros_shape(n, k, group)
    assert tensors[layout.scales].shape == layout.scales_shape(n, k, group)


def test_no_zero_tensor_means_the_midpoint() -> None:
    layer = oracle.random_layer(16, 64, 32, symmetric=True)
    t = as_torch(oracle.gemm_tensors(layer))
    without = unpack(GEMM, t["qweight"], None, t["scales"], (16, 64), group_size=32)
    np.testing.assert_array_equal(without.dequantise().numpy(), layer.weight())
    assert without.zeros.unique().tolist() == [8]


@pytest.mark.parametrize(("n", "k", "group"), SHAPES)
def test_packed_gemm_is_what_the_published_unpacking_reads(n: int, k: int, group: int) -> None:
    layer = oracle.random_layer(n, k, group, seed=3)
    weight = Int4Weight(
        torch.from_numpy(layer.codes.astype(np.uint8)),
        torch.from_numpy(layer.zeros.astype(np.uint8)),
        torch.from_numpy(layer.scales),
        group,
    )
    packed = {name: tensor.numpy() for name, tensor in pack_gemm(weight).items()}
    assert packed["qweight"].dtype == np.int32
    np.testing.assert_array_equal(oracle.read_gemm(**packed, group_size=group), layer.weight())


def test_bfloat16_scales_stay_bfloat16() -> None:
    t = as_torch(oracle.gemm_tensors(oracle.random_layer(8, 64, 64)))
    got = unpack(GEMM, t["qweight"], t["qzeros"], t["scales"].to(torch.bfloat16), (8, 64), group_size=64)
    assert got.scales.dtype == torch.bfloat16


def test_fused_layers_keep_row_and_bias_order() -> None:
    parts = []
    for seed, n in enumerate((16, 8, 8)):
        layer = oracle.random_layer(n, 64, 32, seed=seed)
        t = as_torch(oracle.gemm_tensors(layer))
        plain = unpack(GEMM, t["qweight"], t["qzeros"], t["scales"], (n, 64), group_size=32)
        bias = torch.full((n,), float(seed)) if seed else None
        parts.append(Int4Weight(plain.codes, plain.zeros, plain.scales, 32, bias))
    fused = fuse(parts)
    assert isinstance(fused, Int4Weight)
    assert torch.equal(fused.dequantise(), torch.cat([p.dequantise() for p in parts]))
    assert fused.bias is not None
    assert fused.bias.tolist() == [0.0] * 16 + [1.0] * 8 + [2.0] * 8


def test_layers_of_unlike_groups_or_kinds_do_not_fuse() -> None:
    def part(group: int) -> Int4Weight:
        t = as_torch(oracle.gemm_tensors(oracle.random_layer(8, 64, group)))
        return unpack(GEMM, t["qweight"], t["qzeros"], t["scales"], (8, 64), group_size=group)

    assert fuse([part(32), part(32)]) is not None
    assert fuse([part(32), part(64)]) is None
    assert fuse([part(32), DenseWeight(torch.zeros(8, 64))]) is None
