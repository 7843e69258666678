"""Routing: every implementation against a float64 restatement, bit for bit on the choices, and cases worked by hand."""

from __future__ import annotations

import math

import pytest
import torch
from oracles.routing import Choice, Gate
from oracles.routing import route as written_out

from deepseek_tgi.errors import GenerationError
from deepseek_tgi.kernels.route import GroupRank, Routing, Scoring
from deepseek_tgi.kernels.select import KernelSet

ALSO = ("emulated",)
"""See `conftest`: the GPU's kernels as well."""
GATES = {
    "V2-Lite": Gate(64, 6),
    "V2": Gate(160, 6, "softmax", "group_limited_greedy", 8, 3, False, 16.0),
    "V3": Gate(256, 8, "sigmoid", "noaux_tc", 8, 4, True, 2.5),
    "scaled-only": Gate(16, 4, "sigmoid", "noaux_tc", 4, 2, False, 2.5),
    "normalised-only": Gate(16, 4, "softmax", "group_limited_greedy", 4, 2, True, 1.0),
    "both": Gate(16, 4, "softmax", "greedy", 1, 1, True, 16.0),
    "neither": Gate(17, 5, "sigmoid", "greedy"),
    "one-expert": Gate(1, 1, "sigmoid", "noaux_tc", 1, 1, True, 2.5),
    "groups-of-one": Gate(8, 3, "sigmoid", "noaux_tc", 8, 5, True, 1.0),
    "all-of-them": Gate(12, 12, "softmax", "group_limited_greedy", 3, 3, True, 1.0),
}
NEAR = 1e-6
"""Scores are within 8 * 2**-24 in float32; what is decided by less than this may go either way."""


def routing(gate: Gate) -> Routing:
    """The kernel's form of a gate."""
    return Routing(
        gate.n_routed_experts, gate.num_experts_per_tok, Scoring(gate.scoring_func), GroupRank(gate.topk_method),
        gate.n_group, gate.topk_group, gate.norm_topk_prob, gate.routed_scaling_factor,
    )  # fmt: skip


def expected(logits: torch.Tensor, bias: torch.Tensor | None, gate: Gate) -> list[Choice]:
    """The restatement's choice for every row."""
    return [written_out(row, None if bias is None else bias.numpy(), gate) for row in logits.numpy()]


def close(weights: torch.Tensor, choice: Choice) -> bool:
    """Equal to float32's rounding: an exponential within 2 ulp, then at most ten more roundings."""
    return torch.allclose(weights.double(), torch.tensor(choice.weights, dtype=torch.float64), rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize("rows", [0, 1, 7, 200], ids=lambda t: f"T{t}")
@pytest.mark.parametrize("name", GATES)
def test_choices_equal_the_float64_restatement_bit_for_bit(
    kernels: KernelSet, name: str, rows: int, biased: bool
) -> None:
    if rows == 200 and kernels.name == "reference":
        rows = 20
    gate = GATES[name]
    logits = torch.randn(rows, gate.n_routed_experts) * 2
    bias = torch.randn(gate.n_routed_experts) if biased else None
    ids, weights = kernels.route(logits, bias, routing(gate))
    assert (ids.dtype, ids.shape) == (torch.int32, (rows, gate.num_experts_per_tok))
    compared = 0
    for row, choice in enumerate(expected(logits, bias, gate)):
        if choice.margin > NEAR:
            compared += 1
            assert ids[row].tolist() == choice.ids, row
            assert close(weights[row], choice), row
    assert compared >= 0.95 * rows


@pytest.mark.parametrize(
    ("method", "chosen"),
    # Groups of two: ranked by their best 0 (0.90) and 2 (0.85) win, by their best two 1 (1.60) and 3 (1.50).
    [("group_limited_greedy", [0, 4]), ("noaux_tc", [2, 3])],
)
def test_groups_rank_by_the_rule_of_their_generation(kernels: KernelSet, method: str, chosen: list[int]) -> None:
    scores = [0.90, 0.01, 0.81, 0.79, 0.85, 0.02, 0.76, 0.74]
    logits = torch.tensor([[math.log(s / (1 - s)) for s in scores]])
    ids, weights = kernels.route(logits, None, routing(Gate(8, 2, "sigmoid", method, 4, 2)))
    assert ids.tolist() == [chosen]
    assert torch.allclose(weights, torch.tensor([[scores[e] for e in chosen]]), rtol=1e-5)


def test_greedy_takes_the_best_whatever_their_group(kernels: KernelSet) -> None:
    scores = [0.30, 0.01, 0.05, 0.02, 0.28, 0.04, 0.20, 0.10]
    logits = torch.tensor([scores]).log()
    ids, weights = kernels.route(logits, None, routing(Gate(8, 3, "softmax", "greedy")))
    assert ids.tolist() == [[0, 4, 6]]
    assert torch.allclose(weights, torch.tensor([[0.30, 0.28, 0.20]]), rtol=1e-5)


@pytest.mark.parametrize("normalised", [False, True], ids=["raw", "normalised"])
def test_the_bias_chooses_and_does_not_weigh(kernels: KernelSet, normalised: bool) -> None:
    bias = torch.tensor([0.0, 0.0, 100.0, 0.0])
    gate = Gate(4, 2, "sigmoid", "noaux_tc", 1, 1, normalised, 2.5)
    ids, weights = kernels.route(torch.zeros(1, 4), bias, routing(gate))
    assert ids.tolist() == [[2, 0]]
    # Every score is 1/2: raw 0.5 * 2.5, normalised 0.5 * 2.5 as well, whatever the bias.
    assert torch.allclose(weights, torch.full((1, 2), 1.25))


def test_an_expert_outside_the_best_groups_never_wins_over_a_negative_score(kernels: KernelSet) -> None:
    # With their bias every score is below 0; group 1 has the best two, so its worst expert beats all of group 0.
    bias = torch.tensor([-0.9, -3.0, -0.95, -2.0])
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0]])
    ids, _ = kernels.route(logits, bias, routing(Gate(4, 2, "sigmoid", "noaux_tc", 2, 1)))
    assert ids.tolist() == [[2, 3]]


def test_a_group_of_one_expert_ranks_by_that_expert(kernels: KernelSet) -> None:
    logits = torch.tensor([[0.1, -4.0, 2.0, 0.5]])
    ids, _ = kernels.route(logits, None, routing(Gate(4, 2, "sigmoid", "noaux_tc", 4, 2)))
    assert ids.tolist() == [[2, 3]]


@pytest.mark.parametrize("method", ["greedy", "group_limited_greedy", "noaux_tc"])
def test_of_equal_experts_and_groups_the_lower_comes_first(kernels: KernelSet, method: str) -> None:
    gate = Gate(32, 5, "sigmoid", method, *((1, 1) if method == "greedy" else (8, 2)))
    ids, _ = kernels.route(torch.ones(3, 32), None, routing(gate))
    assert ids.tolist() == [[0, 1, 2, 3, 4]] * 3
    logits = torch.zeros(1, 32)
    logits[0, [9, 11, 21, 23]] = 1.0  # two groups alike, before all others
    ids, _ = kernels.route(logits, None, routing(gate))
    assert ids.tolist() == [[9, 11, 21, 23, 8 if method != "greedy" else 0]]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["V2-Lite", "V2", "V3"])
def test_a_row_that_is_not_finite_fails_alone_with_ids_in_range(kernels: KernelSet, name: str, bad: float) -> None:
    gate = GATES[name]
    logits = torch.randn(5, gate.n_routed_experts)
    clean_ids, clean_weights = kernels.route(logits, None, routing(gate))
    logits[2, 7] = bad
    ids, weights = kernels.route(logits, None, routing(gate))
    assert weights[2].isnan().all()
    assert ids[2].tolist() == list(range(gate.num_experts_per_tok))
    kept = [0, 1, 3, 4]
    assert torch.equal(ids[kept], clean_ids[kept])
    assert torch.equal(weights[kept], clean_weights[kept])


@pytest.mark.parametrize("size", [1e3, 1e30])
@pytest.mark.parametrize("name", ["V2-Lite", "V2", "V3"])
def test_large_logits_give_finite_weights(kernels: KernelSet, name: str, size: float) -> None:
    gate = GATES[name]
    ids, weights = kernels.route(torch.randn(4, gate.n_routed_experts) * size, None, routing(gate))
    assert weights.isfinite().all()
    assert all(len(set(row)) == gate.num_experts_per_tok for row in ids.tolist())
    assert int(ids.min()) >= 0
    assert int(ids.max()) < gate.n_routed_experts


@pytest.mark.parametrize("name", ["V2", "V3"])
def test_a_row_has_the_same_bits_alone_and_in_a_batch(native: KernelSet, name: str) -> None:
    gate = GATES[name]
    logits, bias = torch.randn(100, gate.n_routed_experts), torch.randn(gate.n_routed_experts)
    ids, weights = native.route(logits, bias, routing(gate))
    for row in (0, 41, 99):
        own_ids, own_weights = native.route(logits[row : row + 1], bias, routing(gate))
        assert torch.equal(own_ids, ids[row : row + 1])
        assert torch.equal(own_weights, weights[row : row + 1])


def test_results_go_where_they_are_wanted(kernels: KernelSet) -> None:
    gate = GATES["V3"]
    logits = torch.randn(3, gate.n_routed_experts)
    fresh = kernels.route(logits, None, routing(gate))
    out = (torch.full((3, 8), -1, dtype=torch.int32), torch.full((3, 8), math.nan))
    given = kernels.route(logits, None, routing(gate), out)
    assert given[0] is out[0]
    assert given[1] is out[1]
    assert torch.equal(out[0], fresh[0])
    assert torch.equal(out[1], fresh[1])


def test_operands_that_do_not_fit_are_refused(kernels: KernelSet) -> None:
    plan, logits = routing(Gate(8, 2, "sigmoid", "noaux_tc", 4, 2)), torch.randn(3, 8)
    ids, weights = torch.empty(3, 2, dtype=torch.int32), torch.empty(3, 2)
    for operands, name in (
        ((logits[:, :7], None, plan), "logits"),
        ((logits.double(), None, plan), "logits"),
        ((torch.randn(8, 3).t(), None, plan), "logits"),
        ((logits, torch.zeros(7), plan), "bias"),
        ((logits, None, plan, (ids.long(), weights)), "ids"),
        ((logits, None, plan, (ids, weights[:2])), "weights"),
        ((logits, None, routing(Gate(8, 3, "sigmoid", "noaux_tc", 8, 2))), "more experts"),
    ):
        with pytest.raises(GenerationError, match=name):
            kernels.route(*operands)
