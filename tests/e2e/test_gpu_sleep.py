"""Sleep and wake on a GPU: its memory really free meanwhile, weights back bit for bit, graphs recorded anew."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from builders import tiny_checkpoint
from engine_driver import Driver

from deepseek_tgi.adapters.base import LoadOptions
from deepseek_tgi.adapters.parking import DeviceMemory, storages_of
from deepseek_tgi.adapters.quantized import QuantizedModelAdapter
from deepseek_tgi.engine.config import EngineConfig
from deepseek_tgi.errors import ResourceError

pytestmark = pytest.mark.gpu

GPU = LoadOptions(device="cuda")
MODELS = ("demo", "deepseek_v2", "qwen3")
TEXT = "The capital of France is a city where people like to walk along the river and read books in the sun"
SPARE_BYTES = 128 << 20
"""What kernels and torch keep of their own, cuBLAS's workspaces of 32 MiB a stream above all; less than what sleeps."""
CACHE_BYTES = 512 << 20


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    if request.param == "demo":
        return "demo"
    return str(tiny_checkpoint(tmp_path_factory.mktemp("model") / request.param, request.param, "awq-gemm").path)


@pytest.fixture
def counts() -> Counter[str]:
    return Counter()


@pytest.fixture
def driver(model: str, counts: Counter[str]) -> Iterator[Driver]:
    gc.collect()
    torch.cuda.empty_cache()

    def count(name: str, by: int) -> None:
        counts[name] += by

    adapter = QuantizedModelAdapter.get_model(model, options=GPU)
    settings = EngineConfig(max_batch_size=4, kv_memory_bytes=CACHE_BYTES)
    driver = Driver(adapter, settings, max_prefill=64, max_total=128, counter=count)
    yield driver
    driver.engine.close()


def said(driver: Driver) -> tuple[list[int], list[float]]:
    """Tokens of two requests that decode together, and their log-probabilities to the bit."""
    ids: list[int] = []
    logprobs: list[float] = []
    for found in driver.run(driver.request(TEXT, 8), driver.request(TEXT[4:60], 8)):
        ids += found.ids
        logprobs += found.logprobs
    return ids, logprobs


def free_bytes() -> int:
    torch.cuda.synchronize()
    return int(torch.cuda.mem_get_info()[0])


def filled() -> list[torch.Tensor]:
    """All of the GPU's memory that can be had, in ever smaller pieces."""
    held: list[torch.Tensor] = []
    size = 1 << 36
    while size >= 2 << 20:
        try:
            held.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            size //= 2
    return held


@pytest.mark.parametrize("keep_pages", [False, True], ids=["pages dropped", "pages kept"])
def test_weights_come_back_bit_for_bit(driver: Driver, counts: Counter[str], keep_pages: bool) -> None:
    before = said(driver)
    model = driver.adapter._gpu._model
    storages = storages_of(model.decoder.weights, (model.kernels,), torch.device("cuda:0"))
    bits = [torch.empty(0, dtype=torch.uint8, device="cuda").set_(storage).cpu() for storage in storages]
    for _ in range(3):
        freed = driver.engine.sleep(keep_pages)
        assert freed >= driver.adapter.info.weight_bytes
        assert all(storage.nbytes() == 0 for storage in storages)
        driver.engine.wake()
        for storage, want in zip(storages, bits, strict=True):
            assert torch.equal(torch.empty(0, dtype=torch.uint8, device="cuda").set_(storage).cpu(), want)
        assert said(driver) == before
    while driver.engine.go_on_preparing():
        pass
    assert said(driver) == before


def test_the_drivers_memory_is_free_meanwhile(driver: Driver) -> None:
    said(driver)
    awake = free_bytes()
    freed = driver.engine.sleep()
    assert freed >= CACHE_BYTES * 0.9
    assert free_bytes() - awake > freed - SPARE_BYTES
    assert torch.cuda.memory_allocated() < SPARE_BYTES
    driver.engine.wake()
    assert free_bytes() - awake < SPARE_BYTES


def test_what_sleeps_on_the_host_is_pinned_and_let_go_of() -> None:
    memory = DeviceMemory(torch.device("cuda:0"))
    for _ in range(3):  # the same pages may be pinned again only if they were let go of
        host = memory.host(16 << 20)
        assert host.is_pinned()
        there = torch.randint(0, 256, (16 << 20,), dtype=torch.uint8, device="cuda")
        memory.copy(there, host)
        memory.settle()
        assert torch.equal(host, there.cpu())
        del host


def test_a_gpu_that_others_filled_is_asked_again(driver: Driver) -> None:
    before = said(driver)
    driver.engine.sleep()
    others = filled()
    with pytest.raises(ResourceError):
        driver.engine.wake()
    del others
    torch.cuda.empty_cache()
    driver.engine.wake()
    assert said(driver) == before
