"""The small real model: greedy text against `transformers` on the dequantised weights, and what an INT8 cache costs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from held_out import loss_on, prose, windows
from oracles.awq import read_gemm
from safetensors import safe_open
from stepper import Placed, Stepper

from deepseek_tgi.adapters.base import LoadOptions
from deepseek_tgi.adapters.quantized import QuantizedModelAdapter
from deepseek_tgi.kv.layout import KVMode

pytestmark = pytest.mark.timeout(900)  # seconds each where nothing else runs

NEW_TOKENS = 64
PLAIN = (
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n",
    "Water boils at",
    "The three laws of motion are",
    "Dear Sir or Madam,\n\nI am writing to",
    "1, 2, 3, 4, 5,",
    "Q: What is the largest planet?\nA:",
)
QUESTIONS = (
    "What is the capital of France?",
    "Explain why the sky is blue.",
    "Write a haiku about autumn leaves.",
    "How do I reverse a list in Python?",
    "List three uses of copper.",
    "Who wrote Romeo and Juliet?",
    "What is 12 times 7?",
    "Give me a short recipe for pancakes.",
    "Summarise the plot of Cinderella in two sentences.",
    "What causes tides?",
    "Translate 'good morning' into Spanish.",
    "Name a mammal that lays eggs.",
)


@pytest.fixture(scope="module")
def reference(real_model_dir: Path) -> Any:
    """`transformers`' model with the weights the checkpoint stands for, unpacked by the format oracle."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = json.loads((real_model_dir / "config.json").read_text())
    group = config.pop("quantization_config")["group_size"]
    with safe_open(real_model_dir / "model.safetensors", "pt") as file:
        dense = {
            name: file.get_tensor(name).float()
            for name in file.keys()  # noqa: SIM118 - a reader, not a dict
            if not name.endswith((".qweight", ".qzeros", ".scales"))
        }
        for name in [n.removesuffix(".qweight") for n in file.keys() if n.endswith(".qweight")]:  # noqa: SIM118
            words, zeros, scales = (file.get_tensor(f"{name}.{s}").numpy() for s in ("qweight", "qzeros", "scales"))
            dense[f"{name}.weight"] = torch.from_numpy(read_gemm(words, zeros, scales, group))
    factory: Any = AutoModelForCausalLM
    model = factory.from_config(AutoConfig.for_model(**config), dtype=torch.float32).eval()
    missing, unexpected = model.load_state_dict(dense, strict=False)
    assert not unexpected, unexpected
    assert set(missing) <= {"lm_head.weight"}, missing
    return model


def prompts(adapter: QuantizedModelAdapter) -> list[list[int]]:
    chats = [f"<|im_start|>user\n{q}<|im_end|>\n<|im_start|>assistant\n" for q in QUESTIONS]
    return [adapter.tokenizer.encode(text, add_special_tokens=False) for text in (*PLAIN, *chats)]


def greedy(adapter: QuantizedModelAdapter, texts: list[list[int]]) -> list[tuple[list[int], torch.Tensor]]:
    """Each text with `NEW_TOKENS` more (end marks ignored), and the logits `[NEW_TOKENS, V]` they were taken from."""
    stepper = Stepper(adapter, num_blocks=400)
    placed, grown = [Placed() for _ in texts], [list(text) for text in texts]
    rows: list[list[torch.Tensor]] = [[] for _ in texts]
    work = list(zip(placed, texts, strict=True))
    for _ in range(NEW_TOKENS):
        for text, kept, logits in zip(grown, rows, stepper.step(work), strict=True):
            kept.append(logits[-1])
            text.append(int(logits[-1].argmax()))
        work = [(place, text[-1:]) for place, text in zip(placed, grown, strict=True)]
    return [(text, torch.stack(kept)) for text, kept in zip(grown, rows, strict=True)]


@pytest.mark.parametrize(
    ("dtype", "error_bound", "tie"),
    # Largest difference of any of 63 million logits (their spread is 6): summation order alone, or an 8-bit mantissa
    # in the cache and in the products' inputs as well. A tie is a gap far below the reference's own rounding.
    [("float32", 5e-4, 1e-3), ("auto", 1.0, 0.1)],
)
@torch.no_grad()
def test_greedy_text_equals_transformers_up_to_near_ties(
    real_model_dir: Path, reference: Any, dtype: str, error_bound: float, tie: float
) -> None:
    adapter = QuantizedModelAdapter.get_model(str(real_model_dir), options=LoadOptions(dtype=dtype))
    texts = prompts(adapter)
    assert len(texts) == 20
    worst, diverged = 0.0, 0
    for text, logits in greedy(adapter, texts):
        # Given the same tokens before, greedy decoding of the reference takes the arg-max of these rows.
        expected = reference(torch.tensor([text[:-1]])).logits[0, -NEW_TOKENS:]
        worst = max(worst, float((logits - expected).abs().max()))
        for row, token in zip(expected, text[-NEW_TOKENS:], strict=True):
            gap = float(row.max() - row[token])
            diverged += gap > 0
            assert gap <= tie, "not a near-tie: the reference clearly prefers another token"
    print(f"{dtype}: largest logit error {worst:.2e}, {diverged} of {20 * NEW_TOKENS} tokens differ at near-ties")
    assert worst <= error_bound
    assert diverged <= (0 if dtype == "float32" else 12), "one token in a hundred"


HELD_OUT_TOKENS = 20 * 1024


@pytest.mark.slow
def test_an_int8_cache_changes_perplexity_by_less_than_a_thousandth(real_model_dir: Path) -> None:
    adapter = QuantizedModelAdapter.get_model(str(real_model_dir))
    ids = adapter.tokenizer.encode(prose(), add_special_tokens=False)[:HELD_OUT_TOKENS]
    assert len(ids) >= 20_000
    exact, quantised = (loss_on(adapter, mode, windows(ids, 1024)).perplexity for mode in (KVMode.FLOAT32, KVMode.INT8))
    print(f"perplexity over {len(ids)} tokens: float32 cache {exact:.4f}, int8 cache {quantised:.4f}")
    assert abs(quantised / exact - 1) <= 1e-3
    layout = adapter.kv_layout.with_mode(KVMode.INT8)
    # 30 layers, 3 heads, keys and values of 64 bytes each with a float16 scale and zero each.
    assert layout.bytes_per_token == 30 * 3 * (2 * 64 + 2 * 4) == 12_240
    assert layout.with_mode(KVMode.FLOAT32).bytes_per_token == 46_080
