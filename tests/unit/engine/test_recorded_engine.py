"""An engine as it runs on a GPU, with a recorder in the place of CUDA graphs: steps ahead, padding, spare work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_driver import Driver

from deepseek_tgi.adapters.base import LoadOptions
from deepseek_tgi.adapters.gpu_steps import GpuModel, GpuSteps
from deepseek_tgi.adapters.quantized import QuantizedModelAdapter
from deepseek_tgi.core import HEALTH_REQUEST_ID, SamplingParams, StopRule
from deepseek_tgi.engine.config import EngineConfig
from deepseek_tgi.kernels.select import select_kernels
from deepseek_tgi.logits.pipeline import Choosing, SamplingPlan

CPU = torch.device("cpu")
PROMPTS = ("one two the stop", "is Par one", "the the the two", "stop")


class Recorder:
    """Runs again what it recorded; nothing keeps what an earlier run wrote."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        run()
        return run


@pytest.fixture
def recorded(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    """An engine whose adapter takes its steps as it would on a GPU."""

    def other(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError

    adapter = load(tiny_model_dir)
    kernels = replace(
        select_kernels("cpu", wish="torch", num_threads=1), kv_write=other, paged_attention=other, qkv_attention=other
    )
    model = GpuModel(adapter._decoder, kernels, adapter.info.vocab_size, adapter.kv_layout.block_size)
    adapter._gpu = GpuSteps(model, CPU, Recorder)
    driver = Driver(adapter, EngineConfig(max_batch_size=6))
    runner = driver.engine._runner
    assert runner is not None
    runner._runs_ahead = True
    yield driver
    driver.engine.close()


def test_choices_without_wishes_are_those_that_were_recorded(
    recorded: Driver, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Driver(load(tiny_model_dir))
    stop = StopRule(12, ignore_eos=True)
    wishes = [SamplingParams(), SamplingParams(temperature=0.7, seed=3)]
    expected = [plain.run(plain.request(PROMPTS[0], stop=stop, sampling=wish))[0].ids for wish in wishes]
    given: list[tuple[bool, bool]] = []
    begin = SamplingPlan.begin

    def noted(plan: SamplingPlan, logits: torch.Tensor, best: torch.Tensor | None = None) -> Choosing:
        given.append((len(logits) == 1, best is not None))
        return begin(plan, logits, best)

    monkeypatch.setattr(SamplingPlan, "begin", noted)
    alone = recorded.request(PROMPTS[0], stop=stop)
    assert recorded.run(alone)[0].ids == expected[0]
    assert given == [(True, False), *[(True, True)] * 11], "the prompt's own is chosen apart"
    both = [recorded.request(PROMPTS[0], stop=stop, sampling=wish) for wish in wishes]
    assert [result.ids for result in recorded.run(*both)] == expected


def load(folder: Path) -> QuantizedModelAdapter:
    return QuantizedModelAdapter.get_model(
        str(folder), options=LoadOptions(device="cpu", kernels="torch", dtype="float32", num_threads=1)
    )


def test_whatever_comes_between_steps_each_request_gets_its_own_text(recorded: Driver, tiny_model_dir: Path) -> None:
    plain = Driver(load(tiny_model_dir))
    stops = [StopRule(9 + i, ignore_eos=True) for i in range(len(PROMPTS))]
    wishes = [SamplingParams(), SamplingParams(temperature=0.8, seed=7), SamplingParams(repetition_penalty=1.3)]
    wishes.append(SamplingParams())
    expected = [
        plain.run(plain.request(text, stop=stop, sampling=wish))[0].ids
        for text, stop, wish in zip(PROMPTS, stops, wishes, strict=True)
    ]
    requests = [
        recorded.request(text, stop=stop, sampling=wish)
        for text, stop, wish in zip(PROMPTS, stops, wishes, strict=True)
    ]
    batch = recorded.prefill(0, requests[0], requests[1]).batch
    assert batch is not None
    recorded.decode(batch.id)
    assert recorded.engine.go_on_preparing(), "more batch sizes are recorded while nothing runs"
    batch = recorded.decode(batch.id).batch
    assert batch is not None
    batch = recorded.prefill(2, requests[2], cached=batch).batch
    assert batch is not None
    recorded.decode(batch.id)
    liveness = replace(
        recorded.request("a", 1, blocks=[0], id=HEALTH_REQUEST_ID),
        slots=(0,),
        truncate=1,
        stop=StopRule(1, ignore_eos=True),
    )
    recorded.engine.prefill(HEALTH_REQUEST_ID, [liveness], None)
    batch = recorded.decode(batch.id).batch
    assert batch is not None
    other = recorded.prefill(3, requests[3]).batch
    assert other is not None
    batch = recorded.decode(batch.id, other.id).batch
    while recorded.engine.go_on_preparing():
        pass
    recorded.finish(batch)
    assert [recorded.results[request.id].ids for request in requests] == expected
