"""Shards that run for the whole session: the real backend behind a window for each cache format, and a scripted one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from backend_window import install
from otlp_collector import Collector
from scripted_texts import write_fallback_model, write_scripted_model
from shard_bench import Bench

if TYPE_CHECKING:
    from builders import TinyCheckpoint
    from oracles.greedy import GreedyOracle

KV_MEMORY = {"float32": "4MiB", "bfloat16": "2MiB", "int8": "2MiB"}
"""256 blocks of the tiny model each: room for eight full-length requests, and soon full."""
SCRIPTED_KV_MEMORY = "8MiB"


@pytest.fixture(scope="session")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment in which a child finds the two test backends through their entry points."""
    return install(tmp_path_factory.mktemp("site"))


def _watched(
    tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint_awq: TinyCheckpoint, stranger: dict[str, str], mode: str
) -> Iterator[Bench]:
    own = {
        "DEEPSEEK_TGI_KV_CACHE_DTYPE": mode,
        "DEEPSEEK_TGI_KV_MEMORY": KV_MEMORY[mode],
        "REQUEST_LOGPROBS": "1",
    }
    folder = tmp_path_factory.mktemp(mode)
    bench = Bench.open(folder, tiny_checkpoint_awq.path, "watched", stranger | own, ("--dtype", "float32"))
    yield bench
    bench.close()


@pytest.fixture(scope="session")
def float32_bench(
    tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint_awq: TinyCheckpoint, stranger: dict[str, str]
) -> Iterator[Bench]:
    """Cache in float32: nothing is rounded, so outputs are compared exactly."""
    yield from _watched(tmp_path_factory, tiny_checkpoint_awq, stranger, "float32")


@pytest.fixture(scope="session")
def bfloat16_bench(
    tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint_awq: TinyCheckpoint, stranger: dict[str, str]
) -> Iterator[Bench]:
    """Cache in bfloat16."""
    yield from _watched(tmp_path_factory, tiny_checkpoint_awq, stranger, "bfloat16")


@pytest.fixture(scope="session")
def int8_bench(
    tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint_awq: TinyCheckpoint, stranger: dict[str, str]
) -> Iterator[Bench]:
    """Quantised cache."""
    yield from _watched(tmp_path_factory, tiny_checkpoint_awq, stranger, "int8")


@pytest.fixture
def portable(
    tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint_awq: TinyCheckpoint, stranger: dict[str, str]
) -> Iterator[Bench]:
    """The real backend as it runs where nothing can be compiled."""
    own = {"DEEPSEEK_TGI_KERNELS": "torch", "DEEPSEEK_TGI_KV_CACHE_DTYPE": "float32", "DEEPSEEK_TGI_KV_MEMORY": "4MiB"}
    folder = tmp_path_factory.mktemp("portable")
    bench = Bench.open(folder, tiny_checkpoint_awq.path, "watched", stranger | own, ("--dtype", "float32"))
    yield bench
    bench.close()


@pytest.fixture(scope="session")
def scripted_bench(tmp_path_factory: pytest.TempPathFactory, stranger: dict[str, str]) -> Iterator[Bench]:
    """No model: logits by script or by history, byte-level tokenizer."""
    folder = tmp_path_factory.mktemp("scripted")
    model = write_scripted_model(folder / "model")
    own = {"DEEPSEEK_TGI_KV_MEMORY": SCRIPTED_KV_MEMORY, "REQUEST_LOGPROBS": "1"}
    bench = Bench.open(folder, model, "scripted", stranger | own)
    yield bench
    bench.close()


@pytest.fixture(scope="session")
def collector() -> Iterator[Collector]:
    """An OTLP endpoint that keeps what it is sent."""
    collector = Collector.start()
    yield collector
    collector.stop()


@pytest.fixture(scope="session")
def plain_bench(
    tmp_path_factory: pytest.TempPathFactory, stranger: dict[str, str], collector: Collector
) -> Iterator[Bench]:
    """Scripted with a Llama-2 style tokenizer; prompt logprobs off, traces on, a wide prefill budget."""
    folder = tmp_path_factory.mktemp("plain")
    model = write_fallback_model(folder / "model")
    own = {"DEEPSEEK_TGI_KV_MEMORY": SCRIPTED_KV_MEMORY, "OTEL_BSP_SCHEDULE_DELAY": "100"}
    argv = ("--otlp-endpoint", collector.url)
    bench = Bench.open(folder, model, "scripted", stranger | own, argv, max_prefill_tokens=4096)
    yield bench
    bench.close()


@pytest.fixture(scope="session")
def oracle(tiny_checkpoint_awq: TinyCheckpoint) -> GreedyOracle:
    """`transformers` on the dequantised weights."""
    from oracles.greedy import GreedyOracle

    return GreedyOracle(tiny_checkpoint_awq.reference())


@pytest.fixture
def shard(float32_bench: Bench) -> Iterator[Bench]:
    """The real backend with an exact cache, and no batch left over from another test."""
    yield from _fresh(float32_bench)


@pytest.fixture(params=["float32", "bfloat16", "int8"])
def any_cache(request: pytest.FixtureRequest) -> Iterator[Bench]:
    """The real backend, once for each cache format."""
    yield from _fresh(request.getfixturevalue(f"{request.param}_bench"))


@pytest.fixture
def int8(int8_bench: Bench) -> Iterator[Bench]:
    """The real backend with a quantised cache."""
    yield from _fresh(int8_bench)


@pytest.fixture
def plain(plain_bench: Bench) -> Iterator[Bench]:
    """The scripted backend as the launcher starts it without `--enable-prefill-logprobs`."""
    yield from _fresh(plain_bench)


@pytest.fixture
def scripted(scripted_bench: Bench) -> Iterator[Bench]:
    """The scripted backend."""
    yield from _fresh(scripted_bench)


def _fresh(bench: Bench) -> Iterator[Bench]:
    bench.client.clear()
    bench.withdraw()
    yield bench
    bench.withdraw()
    assert bench.shard.process.poll() is None, f"the shard died:\n{bench.shard.words()}"
