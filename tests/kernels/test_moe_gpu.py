"""Experts, routing and row operations on a GPU, at the sizes of DeepSeek-V2-Lite and V3: against float64."""

from __future__ import annotations

import pytest
import torch
from oracles.routing import Gate
from oracles.routing import route as written_out

from deepseek_tgi.kernels.common import Int4Tensors, PackedInt4
from deepseek_tgi.kernels.cuda.machine import machine_of
from deepseek_tgi.kernels.dense_linear.cuda import CudaDense, DenseOps
from deepseek_tgi.kernels.expert_choice.cuda import CudaChooseExperts, Parts, unfit
from deepseek_tgi.kernels.moe import Expert
from deepseek_tgi.kernels.moe.cuda import CudaMoe
from deepseek_tgi.kernels.moe.cuda_experts import CudaExperts
from deepseek_tgi.kernels.rms_norm.cuda import CudaRmsNorm
from deepseek_tgi.kernels.route import GroupRank, Routing, Scoring
from deepseek_tgi.kernels.route.cuda import CudaRoute
from deepseek_tgi.kernels.silu_mul.cuda import CudaSiluMul

pytestmark = pytest.mark.gpu

EXPERTS, TOP, HIDDEN, INNER, SHARED = 64, 6, 2048, 1408, 2816


class KeptInt4(PackedInt4):
    """A random INT4 weight on the device, as it was stored."""

    def __init__(self, rows: int, columns: int, size: int) -> None:
        codes = torch.randint(0, 16, (rows, columns), dtype=torch.uint8, device="cuda")
        zeros = torch.randint(0, 16, (rows, columns // size), dtype=torch.uint8, device="cuda")
        scales = ((torch.rand(rows, columns // size, device="cuda") + 0.5) * 0.1 / columns**0.5).half()
        self.own = Int4Tensors(codes, zeros, scales, size)
        super().__init__(rows, columns, size, 0)

    def tensors(self) -> Int4Tensors:
        return self.own

    def dequantise(self) -> torch.Tensor:
        own = self.own
        groups = own.codes.view(self.out_features, -1, self.group_size).double() - own.zeros.double().unsqueeze(-1)
        return (groups * own.scales.double().unsqueeze(-1)).view(self.out_features, -1)


@pytest.fixture(scope="module", params=[128, 64])
def layer(request: pytest.FixtureRequest) -> tuple[CudaExperts, list[Expert]]:
    size = request.param
    everyone = [Expert(KeptInt4(2 * i, HIDDEN, size), KeptInt4(HIDDEN, i, size)) for i in [INNER] * EXPERTS + [SHARED]]
    return CudaExperts(everyone[:-1], everyone[-1]), everyone


def added(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, everyone: list[Expert]) -> torch.Tensor:
    """What the layer adds, in float64."""
    out = torch.zeros(x.shape, dtype=torch.float64, device="cuda")
    for index, expert in enumerate(everyone):
        routed = index < len(everyone) - 1
        shares = (weights * (ids == index)).sum(1).double() if routed else out.new_ones(len(x))
        rows = shares.nonzero().squeeze(1)
        assert isinstance(expert.gate_up, PackedInt4)
        assert isinstance(expert.down, PackedInt4)
        gate, up = (x[rows].double() @ expert.gate_up.dequantise().t()).chunk(2, 1)
        inner = gate / (1 + (-gate).exp()) * up
        out[rows] += shares[rows, None] * (inner @ expert.down.dequantise().t())
    return out


# Either side of each switch of tiles: 32 tokens, 7 and 17 pairs an expert, the most that are computed together.
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 9, 16, 32, 33, 74, 75, 181, 182, 2048, 2053])
def test_experts(layer: tuple[CudaExperts, list[Expert]], tokens: int) -> None:
    experts, everyone = layer
    assert experts.dense is None
    op = CudaMoe(machine_of(torch.device("cuda:0")))
    x = torch.randn(tokens, HIDDEN, device="cuda").bfloat16()
    ids = torch.rand(tokens, EXPERTS, device="cuda").argsort(1)[:, :TOP].int().contiguous()
    weights = torch.rand(tokens, TOP, device="cuda")
    scratch = torch.full((experts.scratch_floats(tokens, TOP),), float("nan"), device="cuda")
    first, second = torch.zeros(tokens, HIDDEN, device="cuda"), torch.zeros(tokens, HIDDEN, device="cuda")
    op(x, ids, weights, experts, first, scratch=scratch)
    op(x, ids, weights, experts, second, scratch=scratch)
    assert torch.equal(first, second), "two runs differ"
    wanted = added(x, ids, weights, everyone)
    # The gated activations are rounded to bfloat16: half a unit each, added up like noise.
    assert (first - wanted).norm() < 2**-8 * wanted.norm()
    assert (first - wanted).abs().max() < 2**-6 * wanted.abs().max()
    again = torch.zeros(tokens, HIDDEN, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again.zero_()
        op(x, ids, weights, experts, again, scratch=scratch)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(first, again), "a graph's replay differs"


@pytest.mark.parametrize("tokens", [9, 31, 32, 130])
@pytest.mark.parametrize("skew", ["one expert", "none shared"])
def test_experts_that_all_tokens_choose(layer: tuple[CudaExperts, list[Expert]], skew: str, tokens: int) -> None:
    experts, everyone = layer
    x = torch.randn(tokens, HIDDEN, device="cuda").bfloat16()
    ids = torch.arange(TOP, device="cuda").repeat(tokens, 1)
    if skew == "none shared":
        ids = (torch.arange(tokens, device="cuda").unsqueeze(1) * TOP + ids) % EXPERTS
    ids = ids.int().contiguous()
    weights = torch.rand(tokens, TOP, device="cuda")
    out = torch.zeros(tokens, HIDDEN, device="cuda")
    CudaMoe(machine_of(torch.device("cuda:0")))(x, ids, weights, experts, out)
    wanted = added(x, ids, weights, everyone)
    assert (out - wanted).norm() < 2**-8 * wanted.norm()


def test_few_tokens_whose_experts_have_more_than_a_group_of_them(layer: tuple[CudaExperts, list[Expert]]) -> None:
    """All blocks must agree on which of an expert's tokens stand together."""
    experts, everyone = layer
    x = torch.randn(32, HIDDEN, device="cuda").bfloat16()
    weights = torch.rand(32, TOP, device="cuda")
    for _ in range(10):
        ids = (torch.rand(32, EXPERTS, device="cuda") + torch.arange(EXPERTS, device="cuda") / 80).argsort(1)[:, :TOP]
        ids = ids.int().contiguous()
        assert ids.flatten().bincount().max() > 8
        scratch = torch.full((experts.scratch_floats(32, TOP),), float("nan"), device="cuda")
        out = torch.zeros(32, HIDDEN, device="cuda")
        CudaMoe(machine_of(torch.device("cuda:0")))(x, ids, weights, experts, out, scratch=scratch)
        wanted = added(x, ids, weights, everyone)
        assert (out - wanted).norm() < 2**-8 * wanted.norm()


@pytest.mark.parametrize("tokens", [2, 4, 17, 32])
@pytest.mark.parametrize(("width", "inner", "shared", "size"), [(5120, 1536, 3072, 64), (7168, 2048, 2048, 128)])
def test_few_tokens_at_the_widths_of_v2_and_v3(width: int, inner: int, shared: int, size: int, tokens: int) -> None:
    everyone = [Expert(KeptInt4(2 * i, width, size), KeptInt4(width, i, size)) for i in [inner] * 12 + [shared]]
    experts = CudaExperts(everyone[:-1], everyone[-1])
    x = torch.randn(tokens, width, device="cuda").bfloat16()
    ids = torch.rand(tokens, 12, device="cuda").argsort(1)[:, :8].int().contiguous()
    weights = torch.rand(tokens, 8, device="cuda")
    scratch = torch.full((experts.scratch_floats(tokens, 8),), float("nan"), device="cuda")
    out = torch.zeros(tokens, width, device="cuda")
    CudaMoe(machine_of(torch.device("cuda:0")))(x, ids, weights, experts, out, scratch=scratch)
    wanted = added(x, ids, weights, everyone)
    assert (out - wanted).norm() < 2**-8 * wanted.norm()


GATES = {
    "V2-Lite": Gate(64, 6),
    "V2": Gate(160, 6, "softmax", "group_limited_greedy", 8, 3, False, 16.0),
    "V3": Gate(256, 8, "sigmoid", "noaux_tc", 8, 4, True, 2.5),
}


def routing_of(gate: Gate) -> Routing:
    return Routing(
        gate.n_routed_experts, gate.num_experts_per_tok, Scoring(gate.scoring_func), GroupRank(gate.topk_method),
        gate.n_group, gate.topk_group, gate.norm_topk_prob, gate.routed_scaling_factor,
    )  # fmt: skip


@pytest.mark.parametrize("name", GATES)
def test_choices_equal_the_float64_restatement(name: str) -> None:
    gate = GATES[name]
    routing = routing_of(gate)
    logits, bias = torch.randn(300, gate.n_routed_experts) * 2, torch.randn(gate.n_routed_experts)
    op = CudaRoute(machine_of(torch.device("cuda:0")).programs)
    ids, weights = (t.cpu() for t in op(logits.cuda(), bias.cuda(), routing))
    compared = 0
    for row, numbers in enumerate(logits.numpy()):
        choice = written_out(numbers, bias.numpy(), gate)
        if choice.margin > 1e-6:
            compared += 1
            assert ids[row].tolist() == choice.ids
            assert torch.allclose(weights[row].double(), torch.tensor(choice.weights, dtype=torch.float64), rtol=2e-6)
    assert compared >= 285


@pytest.mark.parametrize("tokens", [1, 2, 16, 17, 64])
@pytest.mark.parametrize(
    ("gate", "width", "together"),
    [
        (GATES["V2-Lite"], HIDDEN, True),
        (Gate(64, 6, "sigmoid", "noaux_tc", 8, 3, True, 2.5), 1028, True),
        (Gate(61, 5), 3076, True),
        (GATES["V3"], 7168, False),
    ],
    ids=["V2-Lite", "limited", "odd", "V3"],
)
def test_norm_router_and_choice_in_one_launch(gate: Gate, width: int, together: bool, tokens: int) -> None:
    torch.manual_seed(tokens)
    machine, routing = machine_of(torch.device("cuda:0")), routing_of(gate)
    parts = Parts(
        CudaRmsNorm(machine.programs, torch.bfloat16), DenseOps(machine).dense_linear, CudaRoute(machine.programs)
    )
    op = CudaChooseExperts(machine, parts)
    assert (unfit(routing, width) is None) == together
    weight = CudaDense(torch.randn(routing.num_experts, width, device="cuda") * width**-0.5)
    hidden, norm = torch.randn(tokens, width, device="cuda") * 3, torch.rand(width, device="cuda") + 0.5
    bias = torch.randn(routing.num_experts, device="cuda") * 0.1 if gate.topk_method == "noaux_tc" else None

    def run() -> list[torch.Tensor]:
        normed = torch.full((tokens, width), float("nan"), dtype=torch.bfloat16, device="cuda")
        ids = torch.full((tokens, routing.top_k), -1, dtype=torch.int32, device="cuda")
        weights = torch.full((tokens, routing.top_k), float("nan"), device="cuda")
        op(
            hidden, weight, routing, norm_weight=norm, eps=1e-6, bias=bias, normed=normed,
            logits=torch.empty(tokens, routing.num_experts, device="cuda"), out=(ids, weights),
        )  # fmt: skip
        return [normed, ids, weights]

    first = run()
    assert all(map(torch.equal, first, run()))
    wide = hidden.double()
    wanted = wide / (wide.square().mean(1, keepdim=True) + 1e-6).sqrt() * norm.double()
    assert ((first[0].double() - wanted).abs() <= wanted.abs() * 2**-8 * 1.01 + 1e-30).all()
    logits = (first[0].double() @ weight.weight.double().t()).cpu().numpy()
    compared = 0
    for row in range(tokens):
        choice = written_out(logits[row], None if bias is None else bias.double().cpu().numpy(), gate)
        if choice.margin > 1e-5:
            compared += 1
            assert first[1][row].tolist() == choice.ids
            made = torch.tensor(choice.weights, dtype=torch.float64)
            assert torch.allclose(first[2][row].cpu().double(), made, rtol=1e-5)
    assert compared >= 0.9 * tokens


@pytest.mark.parametrize("width", [1536, 4096, 7168, 4100])
@pytest.mark.parametrize("size", [1.0, 1e15, 1e-15])  # squares beyond what float16 or a careless sum would hold
def test_norm_and_gated_activation(width: int, size: float) -> None:
    programs = machine_of(torch.device("cuda:0")).programs
    x, weight = torch.randn(33, width, device="cuda") * size, torch.rand(width, device="cuda") + 0.5
    out = torch.full((33, width), float("nan"), dtype=torch.bfloat16, device="cuda")
    CudaRmsNorm(programs, torch.bfloat16)(x, weight, 1e-6, out)
    wide = x.double()
    wanted = wide / (wide.square().mean(1, keepdim=True) + 1e-6).sqrt() * weight.double()
    assert ((out.double() - wanted).abs() <= wanted.abs() * 2**-8 * 1.01 + 1e-30).all()
    gate_up = torch.randn(33, 2 * width, device="cuda").bfloat16()
    gate, up = gate_up.double().chunk(2, 1)
    got = CudaSiluMul(programs)(gate_up).double()
    wanted = gate / (1 + (-gate).exp()) * up
    assert ((got - wanted).abs() <= wanted.abs() * 2**-8 * 1.01 + 1e-30).all()
