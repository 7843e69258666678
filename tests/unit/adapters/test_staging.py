"""Moving a step's inputs: one packed copy, and what is checked before it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from deepseek_tgi.adapters.devices import resolve_device
from deepseek_tgi.adapters.staging import FIELDS, STRETCHES, InputStage, check_values
from deepseek_tgi.core import ForwardInputs
from deepseek_tgi.errors import ConfigError, GenerationError


def some_inputs(seed: int, requests: int = 3, columns: int = 5) -> ForwardInputs:
    draw = torch.Generator().manual_seed(seed)
    tokens = 2 * requests

    def numbers(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.randint(0, 90, shape, dtype=dtype, generator=draw)

    return ForwardInputs(
        input_ids=numbers((tokens,), torch.int64),
        positions=numbers((tokens,), torch.int32),
        slots=numbers((tokens,), torch.int64),
        cu_seqlens=numbers((requests + 1,), torch.int32),
        block_tables=numbers((requests, columns), torch.int32),
        cache_lens=numbers((requests,), torch.int32),
        logit_rows=numbers((requests,), torch.int64),
        max_seqlen=2,
        max_context=90,
    )


def same(a: ForwardInputs, b: ForwardInputs) -> bool:
    return all(torch.equal(getattr(a, name), getattr(b, name)) for name in FIELDS)


def test_what_arrives_is_what_was_sent() -> None:
    stage = InputStage(torch.device("cpu"))
    for seed, (requests, columns) in enumerate([(3, 5), (1, 1), (2, 4000), (7, 3), (64, 2048)]):
        sent = some_inputs(seed, requests, columns)
        got = stage.move(sent)
        assert same(got, sent)
        assert (got.max_seqlen, got.max_context) == (2, 90)
        assert all(getattr(got, name).data_ptr() != getattr(sent, name).data_ptr() for name in FIELDS)


def test_a_strided_block_table_is_packed_dense() -> None:
    wide = torch.arange(40, dtype=torch.int32).view(4, 10)
    sent = replace(some_inputs(0, 4), block_tables=wide[:, 2:7])
    got = InputStage(torch.device("cpu")).move(sent)
    assert torch.equal(got.block_tables, wide[:, 2:7])
    assert got.block_tables.is_contiguous()


def test_a_step_is_not_overwritten_by_the_next_ones() -> None:
    stage = InputStage(torch.device("cpu"))
    sent = [some_inputs(seed) for seed in range(STRETCHES)]
    got = [stage.move(inputs) for inputs in sent]
    assert all(same(a, b) for a, b in zip(got, sent, strict=True))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"input_ids": torch.tensor([0, 100])}, "ids from 0 to 100, expected 0 to 99"),
        ({"input_ids": torch.tensor([-1, 5])}, "ids from -1 to 5"),
        ({"slots": torch.tensor([3, 64])}, "slot 64, expected below 64"),
    ],
)
def test_values_that_no_kernel_looks_at_are_refused(change: dict[str, torch.Tensor], complaint: str) -> None:
    good = replace(some_inputs(0), input_ids=torch.tensor([0, 99]), slots=torch.tensor([-1, 63]))
    check_values(good, 100, 64)
    with pytest.raises(GenerationError, match=complaint):
        check_values(replace(good, **change), 100, 64)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wish", "rank", "world", "gpus", "expected"),
    [
        ("auto", 0, 1, 0, "cpu"),
        ("auto", 0, 1, 1, "cuda:0"),
        ("auto", 1, 2, 1, "cpu"),
        ("auto", 1, 2, 2, "cuda:1"),
        ("cpu", 0, 1, 8, "cpu"),
        ("cuda", 0, 1, 1, "cuda:0"),
        ("cuda:3", 0, 1, 4, "cuda:3"),
        ("cuda:2", 1, 2, 4, "cuda:3"),
    ],
)
def test_a_rank_has_a_device_of_its_own(
    monkeypatch: pytest.MonkeyPatch, wish: str, rank: int, world: int, gpus: int, expected: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert resolve_device(wish, rank, world) == torch.device(expected)


@pytest.mark.parametrize(
    ("wish", "complaint"), [("tpu", "expected auto"), ("cuda:x", "expected auto"), ("cuda", "sees")]
)
def test_devices_that_cannot_be_had_are_refused(monkeypatch: pytest.MonkeyPatch, wish: str, complaint: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=complaint):
        resolve_device(wish)
