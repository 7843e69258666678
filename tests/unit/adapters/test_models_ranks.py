"""Two ranks against one: the same logits within rounding, the same bits on both ranks, for every family and format."""

from __future__ import annotations

import gc
import threading
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from builders import TinySpec
from engine_driver import Collected, Driver, PlenteousMemory, warmup_request
from ranks import FAMILIES, on_ranks, sharded, write_model
from stepper import Stepper, relative_error

from deepseek_tgi.adapters import quantized
from deepseek_tgi.adapters.base import LoadOptions
from deepseek_tgi.adapters.parallel import RankGroup
from deepseek_tgi.adapters.quantized import QuantizedModelAdapter
from deepseek_tgi.adapters.rank_processes import Process
from deepseek_tgi.core import CachedBatch, SamplingParams, StopRule
from deepseek_tgi.engine.engine import Engine, EngineConfig, WarmupResult
from deepseek_tgi.errors import CheckpointError, ResourceError

TEXT = [(11 * i + 5) % 270 for i in range(40)]
CHUNKS = [17, 9]
SUM_ORDER = 2e-5
"""Float32 sums of a few hundred terms taken in another order, through two layers."""


def alone(folder: Path, **options: Any) -> torch.Tensor:
    adapter = QuantizedModelAdapter.get_model(str(folder), options=LoadOptions(dtype="float32", **options))
    return Stepper(adapter).run(TEXT, CHUNKS)


def together(folder: Path, world_size: int = 2, **options: Any) -> torch.Tensor:
    """Logits of rank 0, once every rank was seen to have the same bits."""
    with sharded(folder, world_size, dtype="float32", **options) as adapters:
        logits = on_ranks(world_size, lambda rank: Stepper(adapters[rank]).run(TEXT, CHUNKS))
    for other in logits[1:]:
        assert torch.equal(other, logits[0]), "ranks that differ by a bit choose other tokens one day"
    return logits[0]


@pytest.mark.parametrize(
    ("name", "kernels"), [*((name, "native") for name in FAMILIES), ("llama", "torch"), ("deepseek_v3", "torch")]
)
def test_two_ranks_give_the_logits_of_one(tmp_path: Path, name: str, kernels: str) -> None:
    write_model(tmp_path, FAMILIES[name])
    assert relative_error(together(tmp_path, kernels=kernels), alone(tmp_path, kernels=kernels)) <= SUM_ORDER


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("llama", TinySpec("awq-gemm", group_size=128)),
        ("llama 9/3", TinySpec("awq-gemm", group_size=32)),
        ("qwen2", TinySpec("awq-gemm", group_size=-1, bias_scale=8.0)),
        ("qwen2", TinySpec("awq-gemv", group_size=64, bias_scale=8.0)),
        ("qwen3", TinySpec("compressed-tensors", group_size=32)),
        ("llama 9/3", TinySpec("awq-gemm", group_size=-1)),
        ("deepseek_v2", TinySpec("awq-gemm", group_size=64)),
        ("deepseek_v3", TinySpec("awq-gemm", group_size=32)),
        ("qwen2", TinySpec("gptq", group_size=32, bias_scale=8.0)),
        ("llama", TinySpec("gptq", group_size=64, ordered=True)),
        ("deepseek_v2", TinySpec("gptq", group_size=32, ordered=True)),
        ("qwen2", TinySpec("ct-ordered", group_size=32)),
        ("llama", TinySpec("fp8", block=(64, 64))),
        ("deepseek_v3", TinySpec("fp8", block=(64, 64))),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{value.quant}-{value.group_size}",
)
def test_quantised_weights_are_split_between_groups(tmp_path: Path, name: str, spec: TinySpec) -> None:
    write_model(tmp_path, FAMILIES[name], spec)
    assert relative_error(together(tmp_path, kernels="native"), alone(tmp_path, kernels="native")) <= SUM_ORDER


@pytest.mark.parametrize("world_size", [3, 4])
def test_more_ranks_than_key_heads_or_an_odd_number(tmp_path: Path, world_size: int) -> None:
    name = "llama 9/3" if world_size == 3 else "llama"
    write_model(tmp_path, FAMILIES[name])
    assert (
        relative_error(together(tmp_path, world_size, kernels="torch"), alone(tmp_path, kernels="torch")) <= SUM_ORDER
    )


PROMPT = "The quick brown fox jumps over the lazy dog, and then it jumps back again."
DRAWN = SamplingParams(do_sample=True, temperature=0.9, top_k=40, top_p=0.95, repetition_penalty=1.1, seed=7)
NEW = 64


def converse(driver: Driver) -> tuple[dict[int, Collected], list[CachedBatch | None]]:
    """Greedy and drawn requests that join late, a prompt cut in chunks, and a stored prefix that is used again."""
    stop = StopRule(NEW, ignore_eos=True)
    first = driver.request(PROMPT, stop=stop)
    drawn = driver.request(PROMPT[10:], stop=stop, sampling=DRAWN)
    batches = [driver.prefill(0, first, drawn).batch]
    batches += [driver.decode(0).batch for _ in range(3)]
    cut = driver.request(PROMPT * 2, stop=stop, chunk_len=20)
    batches.append(driver.prefill(1, cut, cached=batches[-1]).batch)
    shared = list(first.blocks[:2])
    fresh = [driver.free.pop() for _ in range(len(first.blocks) - 2)]
    again = driver.request(PROMPT, blocks=shared + fresh, stop=stop, cache_len=2 * driver.block_size)
    batches.append(driver.prefill(2, again, cached=batches[-1]).batch)
    while batches[-1] is not None:
        batches.append(driver.decode(batches[-1].id).batch)
    return driver.results, batches


def conversation(adapter: Any, rank: int = 0, world_size: int = 1) -> Any:
    config = EngineConfig(rank=rank, world_size=world_size, use_prefix_caching=True)
    return converse(Driver(adapter, config, max_prefill=64, max_total=300))


@pytest.mark.parametrize(
    ("name", "cache"),
    [
        *((name, "float32") for name in ("llama 9/3", "qwen2", "qwen3", "deepseek_v2", "deepseek_v3")),
        ("llama 9/3", "int8"),
        ("deepseek_v3", "int8"),
    ],
)
def test_two_ranks_say_what_one_says_and_each_request_is_reported_once(tmp_path: Path, name: str, cache: str) -> None:
    write_model(tmp_path, FAMILIES[name], TinySpec("awq-gemm", group_size=32))
    options: dict[str, Any] = {"dtype": "float32", "kernels": "native", "kv_cache_dtype": cache}
    expected, _ = conversation(QuantizedModelAdapter.get_model(str(tmp_path), options=LoadOptions(**options)))
    with sharded(tmp_path, **options) as adapters:
        (zero, batches), (one, others) = on_ranks(2, lambda rank: conversation(adapters[rank], rank, 2))
    assert batches == others, "the same batches, with the same ids, sizes and presence"
    assert (zero.keys(), one.keys()) == ({0, 2}, {1, 3})
    found = zero | one
    assert {number: found[number].ids for number in sorted(found)} == {n: c.ids for n, c in expected.items()}
    assert [len(c.ids) for c in found.values()] == [NEW] * 4
    assert found[3].ids == found[0].ids, "a used prefix changes nothing"
    for number, collected in expected.items():
        assert found[number].logprobs == pytest.approx(collected.logprobs, abs=1e-4 if cache == "float32" else 5e-2)


def warm(adapter: Any, rank: int, available: int) -> WarmupResult | str:
    """Limits of warm-up on a machine that `rank` sees so much memory of, or the error."""
    engine = Engine(adapter, EngineConfig(rank=rank, world_size=2), memory=PlenteousMemory(available))
    try:
        return engine.warmup([warmup_request(64)], None, 64, 300)
    except ResourceError as error:
        return str(error)


def test_ranks_have_as_many_blocks_as_the_one_with_least_memory_or_refuse_together(tmp_path: Path) -> None:
    write_model(tmp_path, FAMILIES["llama 9/3"])  # a cache twice as wide on rank 0
    with sharded(tmp_path, kernels="native", dtype="float32") as adapters:
        widths = [adapter.kv_layout.bytes_per_token for adapter in adapters]
        assert widths[0] == 2 * widths[1]
        free = [[6 << 20, 1 << 30], [1 << 30, 6 << 20], [1 << 30, 1 << 30], [1 << 30, 1 << 16]]
        found = [on_ranks(2, lambda rank, b=both: warm(adapters[rank], rank, b[rank])) for both in free]  # type: ignore[misc]
    assert all(zero == one for zero, one in found[:3])
    scarce, mirrored, plenty, short = (zero for zero, _ in found)
    assert isinstance(scarce, WarmupResult)
    assert isinstance(plenty, WarmupResult)
    assert scarce == mirrored
    assert scarce.max_supported_total_tokens < plenty.max_supported_total_tokens
    assert isinstance(short, str)
    assert found[3][0] == found[3][1], "no rank waits for one that has given up"


def test_each_rank_takes_its_share_of_the_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path, FAMILIES["llama"])
    taken = []
    select = quantized.select_kernels
    monkeypatch.setattr(quantized, "usable_threads", lambda: 5)

    def noted(*arguments: Any) -> Any:
        taken.append(arguments[3])
        return select(*arguments)

    monkeypatch.setattr(quantized, "select_kernels", noted)
    for wish in (0, 3):
        with sharded(tmp_path, kernels="torch", num_threads=wish):
            pass
    assert taken == [2, 2, 3, 3], "a wish is for each rank"


def test_a_load_that_fails_on_one_rank_leaves_the_others_and_keeps_nothing(tmp_path: Path) -> None:
    write_model(tmp_path, FAMILIES["llama"])
    on_gpus = mock.Mock()
    made: list[weakref.ref[RankGroup]] = []
    watching: list[threading.Thread] = []

    def join(*_: object) -> RankGroup:
        group = RankGroup(None, 0, [Process.own()] * 2, 60.0, on_gpus)
        assert group._watch is not None
        made.append(weakref.ref(group))
        watching.append(group._watch._thread)
        return group

    def failing() -> None:
        options = LoadOptions(rank=0, world_size=2, dtype="float32")
        with pytest.raises(CheckpointError, match="cut short"):
            QuantizedModelAdapter.get_model(str(tmp_path), options=options)

    with (
        mock.patch.object(quantized, "join", join),
        mock.patch.object(quantized, "_share"),
        mock.patch.object(quantized, "load_decoder", side_effect=CheckpointError("cut short")),
    ):
        failing()
    on_gpus.abort.assert_called_once()
    assert not watching[0].is_alive()
    gc.collect()
    assert made[0]() is None
