"""Capacity follows measured memory, keeps the router's inequalities, and says what is missing."""

from __future__ import annotations

import re
from pathlib import Path
from unittest.mock import Mock

import pytest
from engine_driver import PlenteousMemory, warmup_request
from scripted import ScriptedAdapter

from deepseek_tgi.core import SamplingParams, StopRule
from deepseek_tgi.engine.engine import Engine, EngineConfig
from deepseek_tgi.engine.warming import Warming
from deepseek_tgi.engine.warmup import Limits, workspace_bytes
from deepseek_tgi.errors import ConfigError, NotReadyError, ResourceError

PREFILL = 64


@pytest.fixture
def adapter(tmp_path: Path) -> ScriptedAdapter:
    return ScriptedAdapter.in_folder(tmp_path, max_position=512)


def engine_with(adapter: ScriptedAdapter, available: int, **config: object) -> Engine:
    return Engine(adapter, EngineConfig(**config), memory=PlenteousMemory(available))  # type: ignore[arg-type]


def base(adapter: ScriptedAdapter) -> int:
    return workspace_bytes(adapter, Limits(None, PREFILL, None), EngineConfig())


def test_given_limits_are_echoed(adapter: ScriptedAdapter) -> None:
    result = engine_with(adapter, 1 << 30).warmup([warmup_request(PREFILL)], 100, PREFILL, 300)
    assert (result.max_input_tokens, result.max_total_tokens) == (100, 300)


@pytest.mark.parametrize("spare_blocks", [6, 7, 17, 18, 34, 1000])
@pytest.mark.parametrize("given", [(None, None), (50, None), (None, 80)])
def test_chosen_limits_keep_the_routers_inequalities(
    adapter: ScriptedAdapter, spare_blocks: int, given: tuple[int | None, int | None]
) -> None:
    layout = adapter.kv_layout
    engine = engine_with(adapter, base(adapter) + 2 * spare_blocks * layout.bytes_per_block)
    result = engine.warmup([warmup_request(PREFILL)], given[0], PREFILL, given[1])
    blocks = result.max_supported_total_tokens // layout.block_size
    assert result.max_input_tokens < result.max_total_tokens <= min(512, result.max_supported_total_tokens)
    assert result.max_supported_total_tokens >= PREFILL
    assert result.max_total_tokens - 1 <= (blocks - 1) * layout.block_size
    # Never more than the half that it may take, nor than full-length requests can use.
    assert blocks <= min(spare_blocks, 1 + 16 * -(-(given[1] or 512) // layout.block_size))


@pytest.mark.parametrize(
    ("available", "words"),
    [(0, "worst-case step needs"), (None, "worst-case step needs"), (-1, "needs 33 blocks")],
    ids=["nothing", "exactly the workspace", "one block too few"],
)
def test_too_little_memory_says_what_is_needed_what_is_there_and_what_helps(
    adapter: ScriptedAdapter, available: int | None, words: str
) -> None:
    page = adapter.kv_layout.bytes_per_block
    amount = {0: 0, None: base(adapter), -1: base(adapter) + 2 * 32 * page}[available]
    with pytest.raises(ResourceError, match=words) as caught:
        engine_with(adapter, amount).warmup([warmup_request(PREFILL)], None, PREFILL, 512)
    message = str(caught.value)
    assert len(re.findall(r"\d+ bytes|\d+ are available", message)) >= 2
    for flag in ("--max-batch-prefill-tokens", "--max-total-tokens", "--kv-memory", "--kv-cache-dtype int8"):
        assert flag in message
    assert not adapter.steps, "nothing may be tried that cannot fit"


def test_memory_by_size_is_taken_whole_or_refused(adapter: ScriptedAdapter) -> None:
    page = adapter.kv_layout.bytes_per_block
    engine = engine_with(adapter, base(adapter) + 100 * page, kv_memory_bytes=90 * page)
    assert engine.warmup([warmup_request(PREFILL)], None, PREFILL, 512).max_supported_total_tokens == 90 * 16
    greedy = engine_with(adapter, base(adapter) + 100 * page, kv_memory_bytes=101 * page)
    with pytest.raises(ResourceError, match=f"{101 * page} bytes were asked for; {100 * page} are available"):
        greedy.warmup([warmup_request(PREFILL)], None, PREFILL, 512)


@pytest.mark.parametrize(
    "limits",
    [(512, 64, None), (300, 64, 300), (0, 64, 300), (None, 0, None), (None, 64, 513), (None, 64, 1)],
)
def test_limits_that_cannot_be_are_refused(
    adapter: ScriptedAdapter, limits: tuple[int | None, int, int | None]
) -> None:
    with pytest.raises(ConfigError, match="expected"):
        engine_with(adapter, 1 << 30).warmup([warmup_request(64)], *limits)


def test_without_chunking_prompts_fit_one_prefill(adapter: ScriptedAdapter) -> None:
    engine = engine_with(adapter, 1 << 30, prefill_chunking=False)
    assert not engine.info().support_chunking
    assert engine.warmup([warmup_request(PREFILL)], None, PREFILL, None).max_input_tokens == PREFILL
    with pytest.raises(ConfigError, match="PREFILL_CHUNKING"):
        engine.warmup([warmup_request(PREFILL)], PREFILL + 1, PREFILL, None)


def test_the_worst_case_is_really_run(adapter: ScriptedAdapter) -> None:
    requests = [warmup_request(40), warmup_request(24, stop=StopRule(200, ignore_eos=True), sampling=SamplingParams())]
    engine_with(adapter, 1 << 30, request_logprobs=True).warmup(requests, 40, PREFILL, 300)
    assert [s.counts for s in adapter.steps] == [[40, 24], [1, 1]]
    assert adapter.steps[0].num_logit_rows == PREFILL


def test_a_measured_peak_above_the_declared_one_counts(adapter: ScriptedAdapter) -> None:
    class Growing(PlenteousMemory):
        calls = 0

        def peak_bytes(self) -> int:
            self.calls += 1
            return self.calls * (1 << 29)

    small = Engine(adapter, memory=Growing(base(adapter) + (1 << 28)))
    with pytest.raises(ResourceError, match="worst-case step needs"):
        small.warmup([warmup_request(PREFILL)], None, PREFILL, 128)


def test_what_a_step_keeps_of_its_workspace_counts_once(adapter: ScriptedAdapter) -> None:
    page = adapter.kv_layout.bytes_per_block
    workspace = base(adapter)

    class Keeping(PlenteousMemory):
        def available_bytes(self) -> int:
            return self.available - self.resident_bytes()

        def resident_bytes(self) -> int:
            return workspace // 2 if adapter.steps else 0

    engine = Engine(adapter, EngineConfig(kv_memory_bytes=100 * page), memory=Keeping(workspace + 100 * page))
    assert engine.warmup([warmup_request(PREFILL)], None, PREFILL, 512).max_supported_total_tokens == 100 * 16


@pytest.mark.parametrize(("device", "share"), [("cpu", 500), ("cuda:1", 1000)])
def test_ranks_share_a_machines_memory_and_have_a_gpu_each(device: str, share: int) -> None:
    placed = Mock(info=Mock(device=device), ranks=None)
    assert Warming(placed, EngineConfig(world_size=2), PlenteousMemory(1000), Mock(), Mock())._available() == share


def test_warming_up_again_starts_afresh(adapter: ScriptedAdapter) -> None:
    engine = engine_with(adapter, 1 << 30)
    first = engine.warmup([warmup_request(PREFILL)], None, PREFILL, None)
    assert engine.warmup([warmup_request(PREFILL)], None, PREFILL, None) == first


def test_before_warmup_nothing_runs(adapter: ScriptedAdapter) -> None:
    engine = engine_with(adapter, 1 << 30)
    engine.health()
    with pytest.raises(NotReadyError, match="Warmup"):
        engine.prefill(0, [warmup_request(4)], None)
