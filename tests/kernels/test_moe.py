"""Grouped experts: every implementation against numpy in float64, and the promises on batches, threads and memory."""

from __future__ import annotations

import math
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from oracles import kernels as oracle

from deepseek_tgi.errors import ConfigError, GenerationError
from deepseek_tgi.kernels.common import ComputeDtype
from deepseek_tgi.kernels.compiler import BuildError, find_compiler
from deepseek_tgi.kernels.moe import Expert, Packed, PackedExperts
from deepseek_tgi.kernels.moe.grouped import GroupedMoe
from deepseek_tgi.kernels.moe.native import MoeOp
from deepseek_tgi.kernels.route import GroupRank, Routing, Scoring
from deepseek_tgi.kernels.select import KernelSet, native_kernels

HIDDEN, INNER, SHARED = 96, 40, 104  # outputs either side of the 32-wide tile, groups padded and not
KINDS = ("g32", "g16", "bfloat16", "float32", "fp8", "ordered")

Numpy = oracle.Array


@dataclass(frozen=True)
class Layer:
    """Experts as one set of kernels holds them, and as float64 matrices `(gate_up, down)`."""

    packed: PackedExperts
    matrices: list[tuple[Numpy, Numpy]]
    shared: tuple[Numpy, Numpy] | None


def matrix(kernels: KernelSet, shape: tuple[int, int], kind: str, seed: int) -> tuple[Packed, Numpy]:
    """A random weight whose products stay near 1, packed and as it is meant."""
    g = torch.Generator().manual_seed(seed)
    n, k = shape
    if kind in {"bfloat16", "float32"}:
        dense = (torch.randn(n, k, generator=g) / math.sqrt(k)).to(getattr(torch, kind))
        if kind == "float32" and kernels.compute_dtype is ComputeDtype.BFLOAT16:
            dense = dense.bfloat16()  # what packing makes of it, by contract
        return kernels.pack_dense(dense), dense.double().numpy()
    if kind == "fp8":
        codes = torch.randn(n, k, generator=g).to(torch.float8_e4m3fn)
        scales = (torch.rand(n, -(-k // 32), generator=g) + 0.5) / math.sqrt(k)
        wide = codes.double() * scales.double().repeat_interleave(32, 1)[:, :k]
        return kernels.pack_fp8(codes, scales, 32), wide.numpy()
    size = math.gcd(16 if kind == "g16" else 32, k)
    codes = torch.randint(0, 16, (n, k), generator=g, dtype=torch.uint8)
    zeros = torch.randint(6, 10, (n, k // size), generator=g, dtype=torch.uint8)
    scales = ((torch.rand(n, k // size, generator=g) + 0.5) * 0.2 / math.sqrt(k)).half()
    return kernels.pack_int4(codes, zeros, scales, size), oracle.int4_weight(
        plain(codes), plain(zeros), plain(scales), size
    )


def plain(tensor: torch.Tensor) -> Numpy:
    """The numbers of a tensor."""
    numbers: Numpy = tensor.float().numpy()
    return numbers


def expert(kernels: KernelSet, kind: str, inner: int, seed: int) -> tuple[Expert, tuple[Numpy, Numpy]]:
    """One expert; `ordered`: INT4 whose inputs are stored in another order."""
    gate_up, meant = matrix(kernels, (2 * inner, HIDDEN), kind, 2 * seed)
    down, below = matrix(kernels, (HIDDEN, inner), kind, 2 * seed + 1)
    if kind != "ordered":
        return Expert(gate_up, down), (meant, below)
    order = torch.randperm(HIDDEN, generator=torch.Generator().manual_seed(seed))
    in_file_order = np.empty_like(meant)
    in_file_order[:, order.numpy()] = meant
    return Expert(gate_up, down, order.int()), (in_file_order, below)


def layer(kernels: KernelSet, kinds: tuple[str, ...], num_experts: int, shared: str | None) -> Layer:
    """`num_experts` experts, of the kinds in turn."""
    made = [expert(kernels, kinds[i % len(kinds)], INNER, i) for i in range(num_experts)]
    own = expert(kernels, shared, SHARED, 1000) if shared else None
    packed = kernels.pack_experts([e for e, _ in made], None if own is None else own[0])
    return Layer(packed, [m for _, m in made], None if own is None else own[1])


def choices(rows: int, num_experts: int, top_k: int, seed: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    """Random ids, all different in a row, and weights."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.rand(rows, num_experts, generator=g).argsort(1)[:, :top_k].to(torch.int32).contiguous()
    return ids, torch.rand(rows, top_k, generator=g)


def run(kernels: KernelSet, packed: PackedExperts, x: torch.Tensor, ids: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """What the op adds to nothing."""
    out = torch.zeros_like(x)
    kernels.moe(x, ids, w, packed, out)
    return out


def expert_bound(x: Numpy, weights: tuple[Numpy, Numpy], eps: float) -> Numpy:
    """How far one expert's output may be off if each product is off by `eps` of the sum of its terms' sizes."""
    gate_up, down = weights
    gate, up = np.split(x @ gate_up.T, 2, axis=1)
    gate_size, up_size = np.split(abs(x) @ abs(gate_up).T, 2, axis=1)
    # silu's slope is below 1.1, and |silu(gate)| <= |gate|.
    gated = eps * (1.1 * gate_size * (abs(up) + eps * up_size) + abs(gate) * up_size + abs(gate * up))
    bound: Numpy = (gated + eps * abs(gate * up)) @ abs(down).T
    return bound


def bound(kernels: KernelSet, made: Layer, x: Numpy, ids: Numpy, weights: Numpy) -> Numpy:
    """Bound on the error of each element. `eps` as for the linear ops: see `tolerance` of test_int4_linear."""
    eps = 4 * math.sqrt(max(HIDDEN, SHARED)) * 2**-24
    if kernels.compute_dtype is ComputeDtype.BFLOAT16:
        eps = 2**-8 if kernels.name == "native" else 4 * 2**-8
    total = np.full(x.shape, 1e-12) if made.shared is None else 1e-12 + expert_bound(x, made.shared, eps)
    for t, chosen in enumerate(ids):
        for j, e in enumerate(chosen):
            total[t] += abs(weights[t, j]) * expert_bound(x[t : t + 1], made.matrices[int(e)], eps)[0]
    return total


def check(kernels: KernelSet, made: Layer, rows: int, ids: torch.Tensor, weights: torch.Tensor) -> None:
    """Compare with float64; the op adds to what is there."""
    x, before = torch.randn(rows, HIDDEN), torch.randn(rows, HIDDEN)
    out = before.clone()
    kernels.moe(x, ids, weights, made.packed, out)
    wide = plain(x), plain(ids), plain(weights)
    expected = before.double().numpy() + oracle.experts(*wide, matrices=made.matrices, shared=made.shared)
    # Every addend of a sum rounds once more, at the size of the sum so far.
    slack = (ids.shape[1] + 2) * 2**-24 * (abs(expected) + 10)
    assert (abs(out.numpy() - expected) <= bound(kernels, made, *wide) + slack).all()


@pytest.mark.parametrize("rows", [0, 1, 3, 33, 130], ids=lambda t: f"T{t}")
@pytest.mark.parametrize(("num_experts", "top_k"), [(1, 1), (5, 3), (16, 8)], ids=str)
def test_equals_every_chosen_expert_in_float64(any_kernels: KernelSet, num_experts: int, top_k: int, rows: int) -> None:
    rows = min(rows, 10) if any_kernels.name == "reference" else rows
    made = layer(any_kernels, ("g32",), num_experts, "g32")
    check(any_kernels, made, rows, *choices(rows, num_experts, top_k))


@pytest.mark.parametrize("shared", [None, "g16", "float32", "ordered"], ids=lambda s: f"shared-{s}")
@pytest.mark.parametrize("kinds", [*((kind,) for kind in KINDS), KINDS], ids="-".join)
def test_experts_may_be_stored_in_any_form_and_differ(
    any_kernels: KernelSet, kinds: tuple[str, ...], shared: str | None
) -> None:
    made = layer(any_kernels, kinds, 6, shared)
    check(any_kernels, made, 7, *choices(7, 6, 2))


def test_64_experts_of_which_one_takes_every_token_and_some_take_none(native: KernelSet) -> None:
    made = layer(native, ("g32", "g16"), 64, "g32")
    ids, weights = choices(101, 20, 6)
    ids[:, 2] = 63  # of 64, only 0 .. 19 and 63 are chosen
    check(native, made, 101, ids, weights)


@pytest.mark.parametrize("kinds", [("g32", "g16"), KINDS], ids="-".join)
def test_a_row_has_the_same_bits_alone_and_in_a_batch(native: KernelSet, kinds: tuple[str, ...]) -> None:
    made = layer(native, kinds, 12, "g32")
    x, (ids, weights) = torch.randn(230, HIDDEN), choices(230, 12, 4)
    whole = run(native, made.packed, x, ids, weights)
    for begin, end in ((0, 1), (7, 10), (100, 105), (113, 229)):
        part = run(native, made.packed, x[begin:end], ids[begin:end], weights[begin:end])
        assert torch.equal(part, whole[begin:end]), (begin, end)


@pytest.mark.parametrize("rows", [1, 5, 130], ids=lambda t: f"T{t}")
def test_one_call_has_the_bits_of_its_parts(native: KernelSet, rows: int) -> None:
    made = layer(native, KINDS, 12, "g32")
    x, (ids, weights) = torch.randn(rows, HIDDEN), choices(rows, 12, 4)
    parts = GroupedMoe(native.int4_linear, native.dense_linear, native.silu_mul)
    out, expected = torch.randn(rows, HIDDEN), torch.empty(rows, HIDDEN)
    expected.copy_(out)
    parts(x, ids, weights, made.packed, expected)
    native.moe(x, ids, weights, made.packed, out)
    assert torch.equal(out, expected)


def test_bits_do_not_depend_on_threads(native: KernelSet) -> None:
    assert isinstance(native.moe, MoeOp)
    x, (ids, weights) = torch.randn(60, HIDDEN), choices(60, 12, 4)
    expected = run(native, layer(native, KINDS, 12, "g32").packed, x, ids, weights)
    for threads in (1, 3, 8):
        other = native_kernels(native.moe.library, native.compute_dtype, threads, "test")
        assert torch.equal(run(other, layer(other, KINDS, 12, "g32").packed, x, ids, weights), expected), threads


def test_more_choices_than_are_worked_on_at_once_change_no_bits(native: KernelSet) -> None:
    # 8,000 choices of some 5 kB each: more than the 32 MB that one wave takes; and the shared expert's by themselves.
    kernels = native
    parts = [(matrix(kernels, (2 * 256, 512), "g32", 2 * i)[0], matrix(kernels, (512, 256), "g32", 2 * i + 1)[0])
             for i in range(9)]  # fmt: skip
    packed = kernels.pack_experts([Expert(*p) for p in parts[:8]], Expert(*parts[8]))
    x, (ids, weights) = torch.randn(2000, 512), choices(2000, 8, 4)
    assert packed.scratch_floats(2000, 4) * 4 < 2000 * 5 * 4000, "the bound is a wave's, not that of every choice"
    whole = run(kernels, packed, x, ids, weights)
    for begin, end in ((0, 2), (1000, 1040), (1999, 2000)):
        part = run(kernels, packed, x[begin:end], ids[begin:end], weights[begin:end])
        assert torch.equal(part, whole[begin:end]), (begin, end)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_a_number_stays_in_its_row(native: KernelSet, bad: float) -> None:
    made = layer(native, KINDS, 12, "g32")
    x, (ids, weights) = torch.randn(9, HIDDEN), choices(9, 12, 4)
    clean = run(native, made.packed, x, ids, weights)
    x[2, 70] = bad
    weights[5] = math.nan
    out = run(native, made.packed, x, ids, weights)
    assert out[2].isnan().all()
    assert out[5].isnan().all()
    kept = [0, 1, 3, 4, 6, 7, 8]
    assert torch.equal(out[kept], clean[kept])


def test_a_row_of_failed_routing_reaches_the_output_as_nan(any_kernels: KernelSet) -> None:
    made = layer(any_kernels, ("g32",), 8, None)
    logits = torch.randn(3, 8)
    logits[1, 4] = math.nan
    routing = Routing(8, 2, Scoring.SOFTMAX, GroupRank.NONE, 1, 1, normalise=False, scale=1.0)
    out = run(any_kernels, made.packed, torch.randn(3, HIDDEN), *any_kernels.route(logits, None, routing))
    assert out[1].isnan().all()
    assert out[[0, 2]].isfinite().all()


@pytest.mark.parametrize("chosen", ["spread", "one expert"])
@pytest.mark.parametrize("rows", [1, 2, 97, 300], ids=lambda t: f"T{t}")
def test_scratch_of_the_stated_size_is_enough_and_its_contents_do_not_matter(
    any_kernels: KernelSet, rows: int, chosen: str
) -> None:
    if any_kernels.name == "reference":
        pytest.skip("takes none")
    made = layer(any_kernels, KINDS, 8, "ordered")
    x, (ids, weights) = torch.randn(rows, HIDDEN), choices(rows, 8, 3)
    if chosen == "one expert":
        ids, weights = choices(rows, 5, 3)
        ids[:, 1] = 5
    expected = run(any_kernels, made.packed, x, ids, weights)
    floats = made.packed.scratch_floats(rows, 3)
    scratch = torch.full((floats + 64,), math.nan)
    scratch[floats:] = 7.0
    out = torch.zeros_like(x)
    any_kernels.moe(x, ids, weights, made.packed, out, scratch=scratch[:floats])
    assert torch.equal(out, expected)
    assert (scratch[floats:] == 7.0).all()
    with pytest.raises(GenerationError, match="scratch"):
        any_kernels.moe(x, ids, weights, made.packed, out, scratch=scratch[: floats - 1])


UNREAD = """
import torch
from deepseek_tgi.kernels.common import ComputeDtype
from deepseek_tgi.kernels.compiler import BuildError, find_compiler
from deepseek_tgi.kernels.moe import Expert
from deepseek_tgi.kernels.select import select_kernels

kernels = select_kernels("cpu", ComputeDtype.BFLOAT16, "native", 2)
def weight(n, k):
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8)
    zeros = torch.randint(0, 16, (n, k // 32), dtype=torch.uint8)
    return kernels.pack_int4(codes, zeros, torch.rand(n, k // 32).half(), 32)
experts = kernels.pack_experts([Expert(weight(128, 64), weight(64, 64)) for _ in range(32)])
chosen = [3, 8, 30]
for index, expert in enumerate(experts.experts):
    if index not in chosen:
        for struct in (expert.gate_up.struct, expert.down.struct):
            struct.codes = struct.scales = struct.zeros = 8  # an address that no process may read
for rows in (1, 2, 40):
    ids = torch.tensor([chosen] * rows, dtype=torch.int32)
    out = torch.zeros(rows, 64)
    kernels.moe(torch.randn(rows, 64), ids, torch.ones(rows, 3), experts, out)
    assert out.isfinite().all() and out.abs().sum() > 0
print("read what was chosen only")
"""


def test_an_expert_that_no_token_chose_is_never_read() -> None:
    try:
        find_compiler()
    except BuildError as error:
        pytest.skip(str(error))
    done = subprocess.run([sys.executable, "-c", UNREAD], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "read what was chosen only\n", done.stderr


def test_each_chosen_expert_runs_once_for_all_its_tokens(kernels: KernelSet) -> None:
    made = layer(kernels, ("g32",), 12, None)
    ran: Counter[int] = Counter()

    def counted(x: torch.Tensor, w: Packed, *operands: torch.Tensor | None) -> torch.Tensor:
        ran[id(w)] += 1
        return kernels.int4_linear(x, w, *operands)  # type: ignore[arg-type]

    grouped = GroupedMoe(counted, kernels.dense_linear, kernels.silu_mul)  # type: ignore[arg-type]
    ids, weights = choices(200, 7, 4)
    grouped(torch.randn(200, HIDDEN), ids, weights, made.packed, torch.zeros(200, HIDDEN))
    assert ran == {id(w): 1 for e in made.packed.experts[:7] for w in (e.gate_up, e.down)}


def test_bytes_are_those_of_all_weights(kernels: KernelSet) -> None:
    packed = layer(kernels, ("g32", "ordered"), 4, "float32").packed
    shared = packed.shared
    assert shared is not None
    linears = [w for e in (*packed.experts, shared) for w in (e.gate_up, e.down)]
    assert packed.nbytes == sum(w.nbytes for w in linears) + 2 * HIDDEN * 4  # and two orders


def test_packing_names_the_expert_that_does_not_fit(kernels: KernelSet) -> None:
    good = expert(kernels, "g32", INNER, 0)[0]
    narrow = expert(kernels, "g32", SHARED, 0)[0]
    with pytest.raises(ConfigError, match="expert 1"):
        kernels.pack_experts([good, Expert(good.gate_up, narrow.down)])
    with pytest.raises(ConfigError, match="order"):
        kernels.pack_experts([Expert(good.gate_up, good.down, torch.zeros(HIDDEN, dtype=torch.int32))])
    with pytest.raises(ConfigError, match="order"):
        kernels.pack_experts([Expert(good.gate_up, good.down, torch.arange(HIDDEN))])


def test_operands_that_do_not_fit_are_refused(kernels: KernelSet) -> None:
    packed = layer(kernels, ("g32",), 4, None).packed
    x, (ids, weights), out = torch.randn(3, HIDDEN), choices(3, 4, 2), torch.zeros(3, HIDDEN)
    for operands, name in (
        ((x[:, :90], ids, weights, packed, out), "x"),
        ((x.double(), ids, weights, packed, out), "x"),
        ((x, ids.long(), weights, packed, out), "ids"),
        ((x, ids[:2], weights, packed, out), "ids"),
        ((x, ids, weights[:, :1], packed, out), "weights"),
        ((x, ids, weights, packed, out[:2]), "out"),
    ):
        with pytest.raises(GenerationError, match=f"moe: got {name} "):
            kernels.moe(*operands)
