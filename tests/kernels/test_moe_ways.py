"""How the layers of published models are computed on an H200: what lends them fast kernels must not go lost unseen."""

from __future__ import annotations

from typing import Any, cast

import pytest

from deepseek_tgi.kernels.cuda.machine import Machine
from deepseek_tgi.kernels.moe.shape import FEW, LayerShape, OneWay, SortedWay, StreamWay

H200 = Machine(cast("Any", None), 132, 90)
LAYERS = {
    "V2-Lite": {"experts": 64, "top_k": 6, "pieces": 2, "hidden": 2048, "inner": 1408},
    "V2": {"experts": 160, "top_k": 6, "pieces": 2, "hidden": 5120, "inner": 1536},
    "V3": {"experts": 256, "top_k": 8, "pieces": 1, "hidden": 7168, "inner": 2048},
}


@pytest.mark.parametrize("group", [64, 128])
@pytest.mark.parametrize("model", LAYERS)
@pytest.mark.parametrize("tokens", [2, 16, 32])
def test_a_few_tokens_stream_their_weights(model: str, group: int, tokens: int) -> None:
    layer = LayerShape(group=group, bfloat16_scales=False, **LAYERS[model])
    way = layer.way(tokens, H200)
    assert isinstance(way, StreamWay)
    # With what is fixed in the source, whose largest part is the groups' list, a block has 227 KiB.
    assert all(spec.shared_bytes <= 199 << 10 for spec in layer.stream_specs(way, 132))


@pytest.mark.parametrize("group", [64, 128])
def test_a_token_has_kernels_of_its_own(group: int) -> None:
    layer = LayerShape(group=group, bfloat16_scales=False, **LAYERS["V2-Lite"])
    assert isinstance(layer.way(1, H200), OneWay)


@pytest.mark.parametrize("capability", [80, 86, 89, 120])
@pytest.mark.parametrize("model", LAYERS)
def test_two_tokens_ask_for_no_more_memory_than_a_block_has(model: str, capability: int) -> None:
    layer = LayerShape(group=128, bfloat16_scales=False, **LAYERS[model])
    way = layer.way(2, Machine(cast("Any", None), 80, capability))
    assert isinstance(way, SortedWay)
    wanted = max(layer.product(name, way)[0].shared_bytes for name in ("moe_gate_up", "moe_down"))
    assert wanted <= (163 if capability == 80 else 99) << 10
    assert (way is FEW) == (model != "V3" or capability == 80)
