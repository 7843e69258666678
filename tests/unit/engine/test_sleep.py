"""An engine that sleeps and wakes: the same tokens as before, what it knew of prompts kept or dropped as wished.

The GPU is played by the CPU: steps go through `GpuSteps`, weights really leave their memory, graphs are recorded anew.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from builders import TinyCheckpoint, tiny_checkpoint
from engine_driver import Driver, PlenteousMemory, warmup_request
from oracles.greedy import GreedyOracle

from deepseek_tgi.adapters import gpu_steps
from deepseek_tgi.adapters.base import LoadOptions
from deepseek_tgi.adapters.gpu_steps import GpuModel, GpuSteps
from deepseek_tgi.adapters.parking import DeviceMemory, storages_of
from deepseek_tgi.adapters.quantized import QuantizedModelAdapter
from deepseek_tgi.engine import engine as engines
from deepseek_tgi.engine.config import EngineConfig
from deepseek_tgi.errors import NotReadyError, ResourceError
from deepseek_tgi.kernels.select import KernelSet, select_kernels

CPU = torch.device("cpu")
TEXT = "the cat sat on the mat and the dog sat beside it on the floor"
BLOCK = 16


class Recorder:
    """Stands in for CUDA graphs; counts what was recorded."""

    recorded = 0

    def __init__(self, device: torch.device) -> None:
        pass

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        Recorder.recorded += 1
        run()
        return run


def recordable() -> KernelSet:
    """A set none of whose ops counts as asking the device: only names are looked at."""

    def other(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError

    return replace(
        select_kernels("cpu", wish="torch", num_threads=1), kv_write=other, paged_attention=other, qkv_attention=other
    )


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"), "llama", "awq-gemm", seed=3)


@pytest.fixture(scope="module")
def oracle(checkpoint: TinyCheckpoint) -> GreedyOracle:
    return GreedyOracle(checkpoint.reference())


@pytest.fixture
def counts() -> Counter[str]:
    return Counter()


@pytest.fixture(params=["cpu", "played gpu"])
def driver(request: pytest.FixtureRequest, checkpoint: TinyCheckpoint, counts: Counter[str]) -> Driver:
    options = LoadOptions(dtype="float32", kv_cache_dtype="float32", kernels="torch", num_threads=1)
    adapter = QuantizedModelAdapter.get_model(str(checkpoint.path), options=options)
    if request.param == "played gpu":
        model = GpuModel(adapter._decoder, recordable(), adapter.info.vocab_size, BLOCK, (1, 2))
        adapter._gpu = GpuSteps(model, CPU, Recorder)

    def count(name: str, by: int) -> None:
        counts[name] += by

    return Driver(adapter, EngineConfig(max_batch_size=2), max_prefill=64, max_total=128, counter=count)


def says(driver: Driver, oracle: GreedyOracle, text: str = TEXT, **changes: Any) -> tuple[int, ...]:
    """Blocks of a request that was run, whose tokens are those of transformers."""
    request = driver.request(text, 8, **changes)
    (found,) = driver.run(request)
    assert found.ids == oracle.greedy(driver.adapter.tokenizer.encode(text), 8)
    return request.blocks


def claiming(driver: Driver, blocks: tuple[int, ...]) -> dict[str, Any]:
    """A request as a router makes it that believes the first two blocks hold its prompt."""
    prompt = len(driver.adapter.tokenizer.encode(TEXT))
    assert prompt > 2 * BLOCK
    own = [driver.free.pop() for _ in range(-(-(prompt + 7) // BLOCK) - 2)]
    return {"blocks": [*blocks[:2], *own], "cache_len": 2 * BLOCK}


@pytest.mark.parametrize("keep_pages", [False, True], ids=["pages dropped", "pages kept"])
def test_what_woke_says_the_same_and_knows_prompts_where_pages_were_kept(
    driver: Driver, oracle: GreedyOracle, counts: Counter[str], keep_pages: bool
) -> None:
    blocks = says(driver, oracle)
    held = driver.engine.facts()
    driver.engine.sleep(keep_pages)
    assert driver.engine.facts().cache_bytes == (held.cache_bytes if keep_pages else 0)
    driver.engine.wake()
    assert driver.engine.facts() == held
    counts.clear()
    says(driver, oracle, **claiming(driver, blocks))
    assert counts["prefix_tokens_reused"] == (2 * BLOCK if keep_pages else 0)
    assert counts["prefix_tokens_rejected"] == (0 if keep_pages else 2 * BLOCK)


@pytest.mark.parametrize("keep_pages", [False, True], ids=["pages dropped", "pages kept"])
@pytest.mark.parametrize("driver", ["played gpu"], indirect=True)
def test_a_gpus_weights_leave_it_and_graphs_are_recorded_anew(
    driver: Driver, oracle: GreedyOracle, keep_pages: bool
) -> None:
    says(driver, oracle)
    storages = storages_of(driver.adapter._decoder.weights, (), CPU)
    weight_bytes = sum(storage.nbytes() for storage in storages)
    addresses = [storage.data_ptr() for storage in storages]
    freed = driver.engine.sleep(keep_pages)
    assert freed >= weight_bytes >= driver.adapter.info.weight_bytes
    assert sum(storage.nbytes() for storage in storages) == 0
    in_between = [torch.ones(1 << 20) for _ in range(8)]  # so that nothing comes back to where it was by chance
    before = Recorder.recorded
    driver.engine.wake()
    assert Recorder.recorded == before + 2
    assert [storage.data_ptr() for storage in storages] != addresses
    del in_between
    says(driver, oracle)
    while driver.engine.go_on_preparing():
        pass
    assert Recorder.recorded > before + 2, "short prompts, once nothing runs"
    says(driver, oracle)


def test_nothing_runs_while_it_sleeps(driver: Driver, oracle: GreedyOracle) -> None:
    with pytest.raises(NotReadyError, match="does not sleep"):
        driver.engine.wake()
    request = driver.request(TEXT, 8)
    batch = driver.prefill(7, request).batch
    assert batch is not None
    driver.engine.sleep(keep_pages=True)
    assert not driver.engine.holds(None)
    with pytest.raises(NotReadyError, match="wake it first"):
        driver.prefill(8, driver.request(TEXT, 2))
    with pytest.raises(NotReadyError, match="wake it first"):
        driver.engine.warmup([warmup_request(64)], None, 64, 128)
    assert not driver.engine.go_on_preparing()
    driver.engine.health()
    driver.engine.wake()
    says(driver, oracle)


@pytest.mark.parametrize("driver", ["played gpu"], indirect=True)
@pytest.mark.parametrize("keep_pages", [False, True], ids=["pages dropped", "pages kept"])
def test_weights_that_find_no_room_stay_and_the_engine_serves_on(
    driver: Driver, oracle: GreedyOracle, monkeypatch: pytest.MonkeyPatch, keep_pages: bool
) -> None:
    class Full(DeviceMemory):
        def host(self, num_bytes: int) -> torch.Tensor:
            raise ResourceError("host memory: none")

    says(driver, oracle)
    monkeypatch.setattr(gpu_steps, "DeviceMemory", Full)
    with pytest.raises(ResourceError):
        driver.engine.sleep(keep_pages)
    says(driver, oracle)


@pytest.mark.parametrize("driver", ["played gpu"], indirect=True)
def test_room_on_the_host_is_looked_for_first(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = driver.adapter.info.weight_bytes
    monkeypatch.setattr(driver.adapter, "_info", replace(driver.adapter.info, device_type="cuda"))
    monkeypatch.setattr(engines, "memory_of", lambda device: PlenteousMemory(needed - 1))
    with pytest.raises(ResourceError, match=f"weights of {needed} bytes are to sleep there, {needed - 1} are"):
        driver.engine.sleep()
