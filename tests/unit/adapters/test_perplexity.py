"""What low-bit caches cost in perplexity: the bundled model on held-out text, and a qwen2 with huge constant keys."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from held_out import DEMO_WINDOW, HELD, Loss, held_windows, loss_on, outside_turns
from key_bias import own_text, write_checkpoint
from tiny_tokenizer import write_tokenizer

from deepseek_tgi.adapters.base import LoadOptions
from deepseek_tgi.adapters.hub import resolve_folder
from deepseek_tgi.adapters.quantized import QuantizedModelAdapter
from deepseek_tgi.kv.layout import KVMode

LIMITS = [(KVMode.INT8, 0.001), (KVMode.FP8, 0.01), (KVMode.INT4, 0.01)]
"""Largest relative change of perplexity."""


def load(folder: Path, mode: KVMode) -> QuantizedModelAdapter:
    options = LoadOptions(dtype="float32", kernels="native", kv_cache_dtype=mode.value)
    return QuantizedModelAdapter.get_model(str(folder), options=options)


Measure = Callable[[KVMode], Loss]


@pytest.fixture(scope="module")
def demo() -> Measure:
    """The loss of the bundled model, over some 17,000 predicted tokens."""
    folder = resolve_folder("demo")
    tokenizer = load(folder, KVMode.FLOAT32).tokenizer
    marks = [tokenizer.encode(mark, add_special_tokens=False)[0] for mark in ("<｜User｜>", "<｜Assistant｜>")]
    pieces = held_windows(HELD, DEMO_WINDOW, 42 * DEMO_WINDOW)
    assert sum(map(len, pieces)) >= 20_000
    return cache(lambda mode: loss_on(load(folder, mode), mode, pieces, counts=outside_turns(*marks)))


@pytest.fixture(scope="module")
def biased(tmp_path_factory: pytest.TempPathFactory) -> Measure:
    """The loss of the synthetic model on what it says itself."""
    folder = write_checkpoint(tmp_path_factory.mktemp("bias") / "model")
    write_tokenizer(folder)
    pieces = own_text(load(folder, KVMode.FLOAT32))
    return cache(lambda mode: loss_on(load(folder, mode), mode, pieces))


@pytest.mark.parametrize(("mode", "limit"), LIMITS, ids=lambda value: str(getattr(value, "value", value)))
def test_the_bundled_model_predicts_held_out_text_as_well(demo: Measure, mode: KVMode, limit: float) -> None:
    check(demo, mode, limit)


@pytest.mark.parametrize(("mode", "limit"), LIMITS, ids=lambda value: str(getattr(value, "value", value)))
def test_huge_constant_keys_survive(biased: Measure, mode: KVMode, limit: float) -> None:
    check(biased, mode, limit)


def check(measure: Measure, mode: KVMode, limit: float) -> None:
    exact = measure(KVMode.FLOAT32).perplexity
    change = measure(mode).perplexity / exact - 1
    print(f"{mode.value}: perplexity {exact:.4f}, change {change:+.3%}")
    assert abs(change) <= limit
