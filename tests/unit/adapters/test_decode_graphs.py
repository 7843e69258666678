"""Recorded decode steps, with a recorder that runs on a CPU: the same logits and pages as plain steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from deepseek_tgi.adapters.base import LoadOptions
from deepseek_tgi.adapters.decode_graphs import DecodeGraphs, GraphSpec, usual_buckets
from deepseek_tgi.adapters.gpu_steps import STRETCHES, GpuModel, GpuSteps
from deepseek_tgi.adapters.layers.part import AttentionPart
from deepseek_tgi.adapters.prompt_graphs import PromptGraphs, sizes_up_to
from deepseek_tgi.adapters.quantized import QuantizedModelAdapter
from deepseek_tgi.adapters.together import Together
from deepseek_tgi.core import ForwardInputs
from deepseek_tgi.errors import DeviceError, GenerationError
from deepseek_tgi.kernels.select import KernelSet, select_kernels
from deepseek_tgi.kv.pool import KVPool

CPU = torch.device("cpu")
VOCAB = 11


class Recorder:
    """Stands in for CUDA graphs: what was recorded runs again, on whatever its addresses hold by then."""

    def __init__(self, device: torch.device = CPU) -> None:
        self.replayed = 0

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        run()

        def replay() -> None:
            self.replayed += 1
            run()

        return replay


def decode_inputs(cached: Sequence[int], tables: torch.Tensor, block_size: int = 16) -> ForwardInputs:
    """One new token each for requests with `cached` tokens; ids differ by request and position."""
    count = len(cached)
    lens = torch.tensor(cached, dtype=torch.int32)
    blocks = tables.gather(1, (lens.long() // block_size).unsqueeze(1)).squeeze(1).long()
    return ForwardInputs(
        input_ids=(torch.arange(count) * 3 + lens) % VOCAB,
        positions=lens,
        slots=blocks * block_size + lens % block_size,
        cu_seqlens=torch.arange(count + 1, dtype=torch.int32),
        block_tables=tables,
        cache_lens=lens,
        logit_rows=torch.arange(count),
        max_seqlen=1,
        max_context=max(cached) + 1,
    )


def echo(inputs: ForwardInputs, logits: torch.Tensor) -> None:
    """A model whose logits are what it was given."""
    columns = (inputs.input_ids, inputs.slots, inputs.positions, inputs.cache_lens, inputs.block_tables.sum(1))
    logits.zero_()
    logits[:, : len(columns)] = torch.stack([column.float() for column in columns], 1)


def graphs_of(buckets: Sequence[int], recorder: Recorder | None = None) -> DecodeGraphs:
    return DecodeGraphs(GraphSpec(buckets, 4, 16, VOCAB), echo, CPU, recorder or Recorder())


def test_buckets_waste_at_most_a_fifth() -> None:
    for most in (1, 3, 8, 20, 100, 128, 200):
        buckets = usual_buckets(most)
        assert buckets[0] == 1
        assert buckets[-1] == most
        assert all(high - (low + 1) <= high / 5 for low, high in pairwise(buckets))


def test_the_first_are_recorded_at_once_and_the_rest_one_by_one() -> None:
    graphs = graphs_of((1, 2, 3, 4, 5, 6))
    graphs.record_first()
    assert graphs.recorded == [1, 2, 4, 6]
    assert graphs.bucket(3) == 4, "until its own is there"
    assert graphs.record_next()
    assert graphs.recorded == [1, 2, 4, 5, 6]
    assert graphs.record_next()
    assert not graphs.record_next()
    assert [graphs.bucket(rows) for rows in (1, 3, 5, 6)] == [1, 3, 5, 6]
    assert graphs.bucket(7) is None


def test_rows_reach_the_recorded_step_and_padding_writes_nowhere() -> None:
    recorder = Recorder()
    graphs = graphs_of((4,), recorder)
    graphs.record_first()
    tables = torch.tensor([[1, 2], [3, 4], [5, 6]], dtype=torch.int32)
    inputs = decode_inputs([5, 17, 30], tables)
    logits = graphs.run(inputs)
    assert logits is not None
    assert recorder.replayed == 1
    expected = [inputs.input_ids, inputs.slots, inputs.positions, inputs.cache_lens, tables.sum(1)]
    assert torch.equal(logits[:, :5], torch.stack([column.float() for column in expected], 1))
    assert logits.shape == (3, VOCAB)
    padding = graphs._logits[3]
    assert padding[:4].tolist() == [0, -1, 0, 0]


def test_tokens_that_only_the_device_knows_replace_the_inputs_own_and_stay_within_the_vocabulary() -> None:
    graphs = graphs_of((4,))
    graphs.record_first()
    inputs = decode_inputs([5, 17, 30, 2], torch.ones(4, 2, dtype=torch.int32))
    logits = graphs.run(inputs, torch.tensor([3.0, 0.0, float("nan"), 1e9]))
    assert logits is not None
    assert logits[:, 0].tolist() == [3, 0, 0, VOCAB - 1]
    assert logits[:, 1].tolist() == inputs.slots.tolist()


def test_fewer_rows_after_more_leave_no_row_behind() -> None:
    graphs = graphs_of((4,))
    graphs.record_first()
    graphs.run(decode_inputs([5, 6, 7, 8], torch.ones(4, 2, dtype=torch.int32)))
    graphs.run(decode_inputs([9], torch.ones(1, 2, dtype=torch.int32)))
    assert graphs._logits[1:4, 1].tolist() == [-1, -1, -1]


def test_the_best_tokens_of_a_step_come_with_it_and_with_no_other() -> None:
    recorder = Recorder()
    graphs = graphs_of((1, 4), recorder)
    graphs.record_first()
    tables = torch.ones(3, 2, dtype=torch.int32)
    logits = graphs.run(decode_inputs([5, 17, 30], tables))
    assert logits is not None
    assert recorder.replayed == 1, "found in the step's own recording"
    best = graphs.best_of(logits)
    assert best is not None
    exact = logits.double().numpy()
    assert best[0].tolist() == exact.argmax(1).tolist()
    assert best[2].tolist() == exact.max(1).tolist()
    np.testing.assert_allclose(best[1].numpy(), exact.max(1) - np.log(np.exp(exact).sum(1)), atol=1e-5)
    assert graphs.best_of(logits.clone()) is None
    assert graphs.best_of(logits[:2]) is None
    following = graphs.run(decode_inputs([9], tables[:1]))
    assert following is not None
    assert graphs.best_of(logits) is None, "of the last step alone"
    best = graphs.best_of(following)
    assert best is not None
    assert best[0].tolist() == following.argmax(1).tolist()


def test_what_is_recorded_in_between_leaves_no_best_tokens() -> None:
    graphs = graphs_of((1, 3, 6))
    graphs.record_first()
    logits = graphs.run(decode_inputs([5], torch.ones(1, 2, dtype=torch.int32)))
    assert logits is not None
    assert graphs.best_of(logits) is not None
    assert graphs.record_next()
    assert graphs.best_of(logits) is None


def test_block_tables_are_read_again_only_where_they_may_differ() -> None:
    graphs = graphs_of((2,))
    graphs.record_first()
    tables = torch.tensor([[1, 2], [3, 4]], dtype=torch.int32)
    assert graphs.run(decode_inputs([1, 1], tables))[:, 4].tolist() == [3, 7]  # type: ignore[index]
    tables[0, 0] = 9
    assert graphs.run(decode_inputs([1, 1], tables))[:, 4].tolist() == [11, 7]  # type: ignore[index]
    graphs._tables[0, 1] = 100
    assert graphs.run(decode_inputs([2, 2], tables))[0, 4] == 109, "untouched tables are not copied"  # type: ignore[index]
    assert graphs.run(decode_inputs([2, 2], tables.clone()))[0, 4] == 11  # type: ignore[index]


def test_what_is_no_decode_step_or_does_not_fit_is_left_to_the_model() -> None:
    graphs = graphs_of((2,))
    graphs.record_first()
    good = decode_inputs([1, 1], torch.ones(2, 4, dtype=torch.int32))
    assert graphs.run(good) is not None
    assert graphs.run(replace(good, max_seqlen=2)) is None
    assert graphs.run(replace(good, logit_rows=good.logit_rows[:1])) is None
    assert graphs.run(replace(good, max_context=65)) is None
    assert graphs.run(decode_inputs([1, 1, 1], torch.ones(3, 4, dtype=torch.int32))) is None


@pytest.fixture
def model(tiny_model_dir: Path) -> QuantizedModelAdapter:
    return QuantizedModelAdapter.get_model(
        str(tiny_model_dir), options=LoadOptions(device="cpu", kernels="torch", dtype="float32", num_threads=1)
    )


def recordable() -> KernelSet:
    """A set none of whose ops counts as asking the device: only names are looked at."""

    def other(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError

    return replace(select_kernels("cpu", wish="torch", num_threads=1), kv_write=other, paged_attention=other,
                   qkv_attention=other)  # fmt: skip


def steps_of(model: QuantizedModelAdapter, kernels: KernelSet, buckets: tuple[int, ...] | None = None) -> GpuSteps:
    gpu = GpuModel(model._decoder, kernels, model.info.vocab_size, model.kv_layout.block_size, buckets)
    return GpuSteps(gpu, CPU, Recorder)


def test_a_recorded_model_gives_the_plain_models_logits_and_pages(model: QuantizedModelAdapter) -> None:
    pools = [KVPool(model.kv_layout, 12) for _ in range(2)]
    steps = steps_of(model, recordable())
    steps.open_pool(pools[1], 5, 60)
    while steps.go_on_preparing():
        pass
    tables = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9]], dtype=torch.int32)
    for cached in ([0, 0, 0], [1, 1], [2], [1, 1, 1], [20, 33, 2], [21, 34, 3]):
        inputs = decode_inputs(cached, tables[: len(cached)])
        plain = model.step(inputs, pools[0])
        recorded = steps.step(inputs, pools[1])
        # Sums over contexts run over the tables' whole width here, and so in another order.
        torch.testing.assert_close(recorded, plain, atol=1e-4, rtol=1e-4)
        best = steps.best_of(recorded)
        assert best is not None
        assert best[0].tolist() == plain.argmax(-1).tolist()
        assert steps.best_of(plain) is None
        pages = [pool.storage.view(torch.float32) for pool in pools]
        torch.testing.assert_close(pages[1], pages[0], atol=1e-4, rtol=1e-4)
        assert torch.equal(pages[0] == 0, pages[1] == 0), "padding is stored nowhere"
    for pool in pools:
        pool.close()


def test_prompts_are_recorded_a_few_stretches_at_a_time(model: QuantizedModelAdapter) -> None:
    class Counting(Recorder):
        captured = 0

        def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
            Counting.captured += 1
            return super().__call__(run)

    gpu = GpuModel(model._decoder, recordable(), model.info.vocab_size, model.kv_layout.block_size, (1,))
    steps = GpuSteps(gpu, CPU, Counting)
    steps.open_pool(KVPool(model.kv_layout, 4), 1, 300)
    assert Counting.captured == 1, "what a model needs to be ready"
    pieces, before = [], 1
    while steps.go_on_preparing():
        pieces.append(Counting.captured - before)
        before = Counting.captured
    assert set(pieces) == {STRETCHES}, "neither a whole size nor one alone, for which there may be no gap"
    assert steps._prompts is not None
    assert steps._prompts.recorded == list(sizes_up_to(300))
    assert Counting.captured == 1 + len(sizes_up_to(300)) * stretches_of(model)


def test_another_pool_and_prompts_are_not_replayed(model: QuantizedModelAdapter) -> None:
    pool, other = KVPool(model.kv_layout, 4), KVPool(model.kv_layout, 4)
    steps = steps_of(model, recordable(), (1,))
    steps.open_pool(pool, 1, 32)
    inputs = decode_inputs([0], torch.tensor([[1, 2]], dtype=torch.int32))
    expected = model.step(inputs, KVPool(model.kv_layout, 4))
    torch.testing.assert_close(steps.step(inputs, other), expected, atol=1e-4, rtol=1e-4)
    assert not pool.storage.any(), "the recorded steps write to their own pool alone"
    torch.testing.assert_close(steps.step(inputs, pool), expected, atol=1e-4, rtol=1e-4)
    steps.close_pool()
    assert not steps.go_on_preparing()


def test_kernels_that_ask_the_device_are_said(model: QuantizedModelAdapter, caplog: pytest.LogCaptureFixture) -> None:
    steps = steps_of(model, select_kernels("cpu", wish="torch", num_threads=1))
    with caplog.at_level(logging.INFO):
        steps.open_pool(KVPool(model.kv_layout, 4), 4, 32)
    assert "not recorded in graphs: qkv_attention ask for values" in caplog.text
    assert steps.overhead_bytes(4, 32) == 0
    assert not steps.go_on_preparing()


def test_a_step_that_cannot_be_recorded_is_taken_as_it_is(
    model: QuantizedModelAdapter, caplog: pytest.LogCaptureFixture
) -> None:
    class Refusing(Recorder):
        def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")

    size = model.kv_layout.block_size
    steps = GpuSteps(GpuModel(model._decoder, recordable(), model.info.vocab_size, size), CPU, Refusing)
    pool = KVPool(model.kv_layout, 4)
    with caplog.at_level(logging.WARNING):
        steps.open_pool(pool, 2, 32)
    assert "not recorded in graphs, and slower: operation not permitted" in caplog.text
    inputs = decode_inputs([0], torch.tensor([[1, 2]], dtype=torch.int32))
    expected = model.step(inputs, KVPool(model.kv_layout, 4))
    assert torch.equal(steps.step(inputs, pool), expected)
    assert not steps.go_on_preparing()


def test_prompts_that_take_more_memory_than_was_planned_are_launched_as_ever(
    model: QuantizedModelAdapter, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = iter(range(0, 1 << 40, 1 << 28))
    monkeypatch.setattr(GpuSteps, "_reserved_bytes", lambda self: next(taken))
    steps, pool = steps_of(model, recordable(), (1,)), KVPool(model.kv_layout, 4)
    steps.open_pool(pool, 1, 32)
    opened = steps._prompts
    assert opened is not None
    with caplog.at_level(logging.WARNING):
        while steps.go_on_preparing():
            pass
    assert steps._prompts is None
    assert "short prompts are not recorded in graphs, and slower: they take " in caplog.text
    inputs = decode_inputs([0], torch.tensor([[1, 2]], dtype=torch.int32))
    expected = model.step(inputs, KVPool(model.kv_layout, 4))
    torch.testing.assert_close(steps.step(inputs, pool), expected, atol=1e-4, rtol=1e-4)


def test_a_device_that_fails_while_prompts_are_recorded_is_not_taken_for_a_slow_one(
    model: QuantizedModelAdapter, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, pool = steps_of(model, recordable(), (1,)), KVPool(model.kv_layout, 4)
    steps.open_pool(pool, 1, 32)

    def fail(self: object) -> bool:
        raise DeviceError("unspecified launch failure")

    monkeypatch.setattr(PromptGraphs, "record_next", fail)
    with pytest.raises(DeviceError, match="unspecified launch failure"):
        steps.go_on_preparing()
    assert "short prompts are not recorded" not in caplog.text


class Ranks:
    """The other ranks of a group: `others` is what they say to each question in turn, 1 once it is over."""

    def __init__(self, others: Sequence[int] = ()) -> None:
        self.others = list(others)
        self.asked: list[int] = []
        self.ended = ""
        self.rank, self.lost = 0, None

    def smallest(self, number: int) -> int:
        self.asked.append(number)
        return min(number, self.others.pop(0) if self.others else 1)

    def check(self) -> None: ...

    def together(self) -> Together:
        return Together(self)  # type: ignore[arg-type]

    def break_up(self, reason: str) -> None:
        self.ended = reason


class TwoRuns(Recorder):
    """Takes each step once before it is recorded; `fails` at that run of all."""

    fails = 0
    runs = 0

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        for _ in range(2):
            type(self).runs += 1
            if self.runs == self.fails:
                raise RuntimeError("out of memory")
            run()
        return run


def stretches_of(model: QuantizedModelAdapter) -> int:
    return sum(isinstance(part, AttentionPart) for part in model._decoder.parts) + 1


def opened(model: QuantizedModelAdapter, ranks: Ranks, fails: int = 0) -> tuple[GpuSteps, KVPool]:
    recorder = type("Failing", (TwoRuns,), {"fails": fails})
    gpu = GpuModel(model._decoder, recordable(), model.info.vocab_size, 16, (1, 2, 3), ranks)  # type: ignore[arg-type]
    steps, pool = GpuSteps(gpu, CPU, recorder), KVPool(model.kv_layout, 4)
    steps.open_pool(pool, 3, 32)
    return steps, pool


def test_ranks_record_all_sizes_or_none(model: QuantizedModelAdapter, caplog: pytest.LogCaptureFixture) -> None:
    ranks = Ranks()
    steps, _ = opened(model, ranks)
    assert steps._graphs is not None
    assert steps._graphs.recorded == [1, 2, 3]
    own = [1, 1, 1, 1, 1, 1]
    assert ranks.asked[: len(own)] == own, "all, what is needed, each size, and that none is left"
    assert steps._prompts is not None
    assert steps._prompts.recorded == list(sizes_up_to(3 * 32))
    stretches = len(steps._prompts.recorded) * stretches_of(model)
    assert ranks.asked[len(own) :] == [1] * (2 + stretches), "the same for prompts, each stretch of them"
    for others, fails, asked, why in (
        ([0], 0, [1], "another rank cannot record them"),
        ([1, 1, 1, 0], 0, [1, 1, 1, 1], "another rank cannot record them"),
        ([], 4, [1, 1, 1, 0], "out of memory"),  # what is recorded waits for nobody
    ):
        caplog.clear()
        ranks = Ranks(others)
        with caplog.at_level(logging.INFO):
            steps, _ = opened(model, ranks, fails)
        assert steps._graphs is None
        assert ranks.asked == asked
        assert not ranks.ended
        assert f": {why}" in caplog.text


def test_ranks_record_the_stretches_of_prompts_in_step(
    model: QuantizedModelAdapter, caplog: pytest.LogCaptureFixture
) -> None:
    decoding, runs = 6, 2 * 3  # questions and runs of what decodes
    for others, fails, taken, asked, why in (
        ([1] * (decoding + 1) + [1, 0], 0, 2 * 2, [1, 1, 1], "another rank cannot record them"),
        ([], runs + 4, 2 * 2, [1, 1, 0], "out of memory"),
    ):
        caplog.clear()
        ranks = Ranks(others)
        with caplog.at_level(logging.INFO):
            steps, _ = opened(model, ranks, fails)
        assert steps._graphs is not None, "decode steps are recorded all the same"
        assert steps._prompts is None
        assert ranks.asked[decoding:] == asked, "nobody goes on to an exchange that not all come to"
        assert steps._make_capture.runs == runs + taken  # type: ignore[attr-defined]
        assert f"slower: {why}" in caplog.text


def test_an_error_in_a_step_that_other_ranks_take_before_recording_is_fatal(model: QuantizedModelAdapter) -> None:
    ranks = Ranks()
    with (
        mock.patch.object(type(model._decoder), "step", side_effect=RuntimeError("out of memory")),
        pytest.raises(DeviceError, match="a step failed that other ranks are in: RuntimeError: out of memory"),
    ):
        opened(model, ranks)
    assert ranks.ended


def test_ids_and_slots_are_looked_at_before_they_are_moved(model: QuantizedModelAdapter) -> None:
    pool = KVPool(model.kv_layout, 4)
    steps = steps_of(model, recordable(), (1,))
    inputs = decode_inputs([0], torch.tensor([[1, 2]], dtype=torch.int32))
    with pytest.raises(GenerationError, match="slot 64, expected below 64"):
        steps.step(replace(inputs, slots=torch.tensor([64])), pool)


def test_the_plan_covers_what_is_held(model: QuantizedModelAdapter) -> None:
    steps = steps_of(model, recordable())
    steps.open_pool(KVPool(model.kv_layout, 4), 8, 64)
    graphs = steps._graphs
    assert graphs is not None
    held = [graphs._rows._memory, graphs._tables, graphs._offsets, graphs._logits, graphs._best]
    assert sum(tensor.nbytes for tensor in held) <= GraphSpec(usual_buckets(8), 4, 16, model.info.vocab_size).nbytes
    prompts = steps._prompts
    assert prompts is not None
    held += [prompts._hidden, prompts._scratch._memory]
    assert steps.overhead_bytes(8, 64) > sum(tensor.nbytes for tensor in held)
