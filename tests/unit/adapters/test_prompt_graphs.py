"""Steps with prompts whose stretches between attentions are recorded, with a recorder that runs on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from builders import tiny_checkpoint

from deepseek_tgi.adapters.base import LoadOptions
from deepseek_tgi.adapters.layers.part import AttentionPart
from deepseek_tgi.adapters.prompt_graphs import MOST_PADDING, SIZES, PromptGraphs, sizes_up_to
from deepseek_tgi.adapters.quantized import QuantizedModelAdapter
from deepseek_tgi.core import ForwardInputs
from deepseek_tgi.kv.pool import KVPool, LayerByLayer

CPU = torch.device("cpu")
BLOCK = 16


def record(run: Callable[[], None]) -> Callable[[], None]:
    """As CUDA graphs, of which each work is run once before it is recorded."""
    run()
    return run


@pytest.fixture(scope="module", params=["llama", "deepseek_v2", "deepseek_v3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> QuantizedModelAdapter:
    folder = tiny_checkpoint(tmp_path_factory.mktemp("tiny") / request.param, request.param, "awq-gemm").path
    options = LoadOptions(device="cpu", kernels="torch", dtype="float32", num_threads=1)
    return QuantizedModelAdapter.get_model(str(folder), options=options)


def step_of(tokens: Sequence[int], cached: Sequence[int], every_row: bool = False) -> ForwardInputs:
    """Requests of so many new tokens behind so many cached ones; ids differ by request and position."""
    columns = max(-(-(n + c) // BLOCK) for n, c in zip(tokens, cached, strict=True))
    tables = torch.arange(1, 1 + columns * len(tokens), dtype=torch.int32).view(len(tokens), columns)
    positions = torch.cat([torch.arange(c, c + n) for n, c in zip(tokens, cached, strict=True)])
    owners = torch.repeat_interleave(torch.arange(len(tokens)), torch.tensor(tokens))
    starts = torch.tensor([0, *torch.tensor(tokens).cumsum(0).tolist()], dtype=torch.int32)
    rows = torch.arange(len(positions)) if every_row else starts[1:].long() - 1
    return ForwardInputs(
        input_ids=(owners * 3 + positions) % 11,
        positions=positions.int(),
        slots=tables[owners, positions // BLOCK].long() * BLOCK + positions % BLOCK,
        cu_seqlens=starts,
        block_tables=tables,
        cache_lens=torch.tensor(cached, dtype=torch.int32),
        logit_rows=rows,
        max_seqlen=max(tokens),
        max_context=max(n + c for n, c in zip(tokens, cached, strict=True)),
    )


def pools_of(model: QuantizedModelAdapter) -> tuple[KVPool, KVPool]:
    """Two with the same codes, finite in every format."""
    first, second = (KVPool(model.kv_layout, 40) for _ in range(2))
    first.storage.random_(0x30, 0x40, generator=torch.Generator().manual_seed(0))
    second.storage.copy_(first.storage)
    return first, second


def graphs_of(model: QuantizedModelAdapter, sizes: Sequence[int]) -> PromptGraphs:
    graphs = PromptGraphs(model._decoder, sizes, CPU, record)
    while graphs.record_next():
        pass
    return graphs


STEPS = [
    ([32], [0]), ([5], [0]), ([20, 1, 1], [0, 30, 7]), ([1, 40, 1], [9, 3, 0]), ([64], [16]), ([33], [0]),
    ([1] * 20, [3] * 20),
]  # fmt: skip


@pytest.mark.parametrize("every_row", [False, True], ids=["last", "every"])
def test_a_recorded_step_gives_the_plain_ones_logits_and_pages(model: QuantizedModelAdapter, every_row: bool) -> None:
    graphs = graphs_of(model, (32, 64))
    plain_pool, pool = pools_of(model)
    for _ in range(2):  # rows that are over hold nothing of the steps before
        for tokens, cached in STEPS:
            inputs = step_of(tokens, cached, every_row)
            plain = model.step(inputs, plain_pool)
            graphs._scratch._memory.fill_(float("nan"))
            recorded = graphs.run(inputs, LayerByLayer(pool))
            assert recorded is not None
            if sum(tokens) in graphs.recorded:
                assert torch.equal(recorded, plain)
                assert torch.equal(pool.storage, plain_pool.storage)
            # Products of other numbers of rows may add up in another order.
            torch.testing.assert_close(recorded, plain, atol=1e-4, rtol=1e-4)
            pages = [own.storage.view(torch.float32) for own in (pool, plain_pool)]
            torch.testing.assert_close(pages[0], pages[1], atol=1e-4, rtol=1e-4)


def test_steps_that_nothing_is_recorded_for_are_left_to_the_model(model: QuantizedModelAdapter) -> None:
    graphs = graphs_of(model, (32, 128))
    pages = LayerByLayer(pools_of(model)[1])
    assert graphs.run(step_of([129], [0]), pages) is None
    assert graphs.run(step_of([128 - MOST_PADDING - 1], [0]), pages) is None
    assert graphs.run(step_of([128 - MOST_PADDING], [0]), pages) is not None
    assert graphs.run(step_of([32], [0]), pages) is not None


def test_sizes_are_recorded_one_by_one_and_only_what_steps_may_have() -> None:
    assert sizes_up_to(1) == SIZES[:2]
    assert sizes_up_to(10_000) == SIZES
    for most in (1, 40, 100, 200, 5000):
        sizes = sizes_up_to(most)
        for tokens in range(1, min(most, SIZES[-1]) + 1):
            assert any(tokens <= size <= tokens + MOST_PADDING for size in sizes), (most, tokens)


def test_the_largest_are_recorded_first(model: QuantizedModelAdapter) -> None:
    graphs = PromptGraphs(model._decoder, (32, 96, 64), CPU, record)
    order = []
    while graphs.record_next():
        order += [size for size in graphs.recorded if size not in order]
    assert order == [96, 64, 32]
    assert not graphs.record_next()


def stretches_of(model: QuantizedModelAdapter) -> int:
    return sum(isinstance(part, AttentionPart) for part in model._decoder.parts) + 1


def test_stretches_are_recorded_one_by_one_while_steps_are_taken(model: QuantizedModelAdapter) -> None:
    captured = 0

    def counting(run: Callable[[], None]) -> Callable[[], None]:
        nonlocal captured
        captured += 1
        return record(run)

    graphs = PromptGraphs(model._decoder, (32, 64), CPU, counting)
    plain_pool, pool = pools_of(model)
    for done in range(1, 2 * stretches_of(model) + 1):
        assert graphs.record_next()
        assert captured == done, "who comes meanwhile waits for one"
        inputs = step_of([64], [0])
        recorded = graphs.run(inputs, LayerByLayer(pool))
        assert (recorded is None) == (done < stretches_of(model)), "no step goes through part of a model"
        if recorded is not None:
            assert torch.equal(recorded, model.step(inputs, plain_pool))
    assert not graphs.record_next()
    assert graphs.recorded == [32, 64]


def test_a_size_that_cannot_be_recorded_is_left_out(model: QuantizedModelAdapter) -> None:
    left = stretches_of(model)

    def failing_once(run: Callable[[], None]) -> Callable[[], None]:
        nonlocal left
        left -= 1
        if not left:
            raise RuntimeError("out of memory")
        return record(run)

    graphs = PromptGraphs(model._decoder, (32, 64), CPU, failing_once)
    for _ in range(stretches_of(model) - 1):
        graphs.record_next()
    with pytest.raises(RuntimeError, match="out of memory"):
        graphs.record_next()
    while graphs.record_next():
        pass
    assert graphs.recorded == [32]


def test_other_ranks_are_waited_for_in_the_first_run_of_a_stretch_alone(model: QuantizedModelAdapter) -> None:
    entered = 0

    @contextmanager
    def guard() -> Iterator[None]:
        nonlocal entered
        entered += 1
        yield

    graphs = PromptGraphs(model._decoder, (32,), CPU, record, guard)
    while graphs.record_next():
        pass
    stretches = stretches_of(model)
    assert entered == stretches
    graphs.run(step_of([32], [0]), LayerByLayer(pools_of(model)[0]))
    assert entered == stretches
