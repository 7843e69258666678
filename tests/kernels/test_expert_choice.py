"""Norm, router and choice of experts in one launch, emulated: against numpy in float64 and the written-out gate."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import torch
from emulation.emulated import EmulatedPrograms
from oracles.routing import Gate
from oracles.routing import route as written_out

from deepseek_tgi.kernels.cuda.machine import Machine
from deepseek_tgi.kernels.dense_linear.cuda import CudaDense
from deepseek_tgi.kernels.expert_choice.cuda import CudaChooseExperts, Parts
from deepseek_tgi.kernels.route import GroupRank, Routing, Scoring

NOTHING = cast("Any", None)
OP = CudaChooseExperts(Machine(EmulatedPrograms(), 3, 90), Parts(NOTHING, NOTHING, NOTHING))
GREEDY = Routing(6, 3, Scoring.SOFTMAX, GroupRank.NONE, 1, 1, False, 1.0)
LIMITED = Routing(64, 6, Scoring.SIGMOID, GroupRank.BEST_TWO, 8, 3, True, 2.5)
V3 = Routing(256, 8, Scoring.SIGMOID, GroupRank.BEST_TWO, 8, 4, True, 2.5)


def chosen(
    hidden: torch.Tensor, routing: Routing, *, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Normed rows, ids and weights, and the gate's weight."""
    tokens, width = hidden.shape
    g = torch.Generator().manual_seed(5)
    gate = torch.randn(routing.num_experts, width, generator=g) * width**-0.5
    norm = torch.rand(width, generator=g) + 0.5
    normed = torch.full((tokens, width), float("nan"), dtype=torch.bfloat16)
    ids = torch.full((tokens, routing.top_k), -1, dtype=torch.int32)
    weights = torch.full((tokens, routing.top_k), float("nan"))
    logits = torch.full((tokens, routing.num_experts), float("nan"))
    OP(
        hidden, CudaDense(gate), routing, norm_weight=norm, eps=1e-6, bias=bias, normed=normed, logits=logits,
        out=(ids, weights),
    )  # fmt: skip
    wide = hidden.double()
    wanted = wide / (wide.square().mean(1, keepdim=True) + 1e-6).sqrt() * norm.double()
    assert ((normed.double() - wanted).abs() <= wanted.abs() * 2.0**-8 * 1.01 + 1e-30).all()
    return normed, ids, weights, gate


@pytest.mark.parametrize("tokens", [1, 3, 17])  # as many of a cluster: one, or four, the last one short
@pytest.mark.parametrize("routing", [GREEDY, LIMITED])
@pytest.mark.parametrize("width", [96, 2180])  # less than a warp's columns; several runs a thread, the last one short
def test_tokens_go_where_the_gate_written_out_sends_them(tokens: int, routing: Routing, width: int) -> None:
    g = torch.Generator().manual_seed(tokens)
    hidden = torch.randn(tokens, width, generator=g) * 3
    bias = torch.randn(routing.num_experts, generator=g) * 0.1 if routing is LIMITED else None
    normed, ids, weights, gate = chosen(hidden, routing, bias=bias)
    logits = normed.double().numpy() @ gate.double().numpy().T
    said = Gate(
        routing.num_experts, routing.top_k, routing.scoring.value, routing.group_rank.value, routing.num_groups,
        routing.top_groups, routing.normalise, routing.scale,
    )  # fmt: skip
    for row in range(tokens):
        choice = written_out(logits[row], None if bias is None else bias.numpy(), said)
        assert choice.margin > 1e-6
        assert ids[row].tolist() == choice.ids
        assert np.allclose(weights[row].numpy(), choice.weights, rtol=1e-5)


def test_a_token_has_the_same_bits_in_every_batch() -> None:
    hidden = torch.randn(17, 256, generator=torch.Generator().manual_seed(1))
    alone, few, many = (chosen(hidden[:count], LIMITED) for count in (1, 3, 17))
    for some in (few, many):
        for one, other in zip(alone[:3], some[:3], strict=True):
            assert torch.equal(one[0], other[0])


def test_a_broken_row_spoils_itself_alone() -> None:
    hidden = torch.randn(3, 96, generator=torch.Generator().manual_seed(2))
    _, ids, weights, _ = chosen(hidden, GREEDY)
    hidden[1, 5] = float("nan")
    normed = torch.empty(3, 96, dtype=torch.bfloat16)
    some = torch.empty(3, 3, dtype=torch.int32), torch.empty(3, 3)
    gate = torch.randn(6, 96, generator=torch.Generator().manual_seed(5)) * 96**-0.5
    norm = torch.ones(96)
    OP(
        hidden, CudaDense(gate), GREEDY, norm_weight=norm, eps=1e-6, bias=None, normed=normed,
        logits=torch.empty(3, 6), out=some,
    )  # fmt: skip
    assert some[0][1].tolist() == [0, 1, 2]
    assert some[1][1].isnan().all()
    assert some[1][[0, 2]].isfinite().all()
    assert weights.isfinite().all()
    assert ids.shape == (3, 3)


@pytest.mark.parametrize(
    ("routing", "tokens", "width", "dtype", "said"),
    [
        (GREEDY, 65, 96, torch.float32, None),
        (GREEDY, 2, 96, torch.bfloat16, "not kept in float32"),
        (GREEDY, 2, 98, torch.float32, "6 experts over 98 inputs"),
        (V3, 2, 7168, torch.float32, "256 experts over 7168 inputs"),
    ],
    ids=["prompt", "rounded", "odd", "V3"],
)
def test_what_the_kernel_does_not_know_goes_through_the_parts_which_is_told_once(
    routing: Routing, tokens: int, width: int, dtype: torch.dtype, said: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[str] = []
    parts = Parts(*(lambda *_, name=name: calls.append(name) for name in ("norm", "gate", "route")))  # type: ignore[arg-type]
    op = CudaChooseExperts(OP.machine, parts)
    with caplog.at_level("INFO"):
        for _ in range(2):
            op(
                torch.zeros(tokens, width), CudaDense(torch.zeros(routing.num_experts, width, dtype=dtype)), routing,
                norm_weight=torch.ones(width), eps=1e-6, bias=None,
                normed=torch.empty(tokens, width, dtype=torch.bfloat16),
                logits=torch.empty(tokens, routing.num_experts),
                out=(torch.empty(tokens, routing.top_k, dtype=torch.int32), torch.empty(tokens, routing.top_k)),
            )  # fmt: skip
    assert calls == ["norm", "gate", "route"] * 2
    assert [said in message for message in caplog.messages] == [True] if said else not caplog.messages
