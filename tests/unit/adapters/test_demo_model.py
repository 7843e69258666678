"""The bundled model: what the package carries, and how close its INT4 weights and low-bit caches are to its twin."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from oracles import demo_twin

from deepseek_tgi.adapters.base import LoadOptions
from deepseek_tgi.adapters.hub import resolve_folder
from deepseek_tgi.adapters.quantized import QuantizedModelAdapter
from deepseek_tgi.text.chat_template import load_chat_template

MAX_BYTES = 12_000_000


@pytest.fixture(scope="module")
def folder() -> Path:
    return resolve_folder("demo")


@pytest.fixture(scope="module")
def twin() -> dict[str, torch.Tensor]:
    return demo_twin.read()


def load(folder: Path, cache: str) -> QuantizedModelAdapter:
    return QuantizedModelAdapter.get_model(str(folder), options=LoadOptions(dtype="float32", kv_cache_dtype=cache))


def test_the_package_carries_no_more_than_it_may(folder: Path) -> None:
    assert sum(path.stat().st_size for path in folder.iterdir()) <= MAX_BYTES


def test_it_is_the_architecture_its_card_says(folder: Path) -> None:
    info = load(folder, "auto").info
    assert (info.model_type, info.quantization, info.max_position_embeddings) == ("deepseek_v3", "awq-gemm-g32", 2048)


def test_its_tokenizer_is_read_as_transformers_reads_it(folder: Path) -> None:
    from transformers import AutoTokenizer

    theirs, ours = AutoTokenizer.from_pretrained(folder), load(folder, "auto").tokenizer
    for text in (
        "What is the capital of France?",
        "  two  spaces, caf\u00e9\n\nand \u65e5\u672c",
        "<｜User｜>Hi<｜Assistant｜>",
    ):
        assert ours.encode(text) == theirs(text).input_ids
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi!"}]
    template = load_chat_template(folder)
    assert template is not None
    rendered = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert template.render(messages, None) == rendered


# Mean of KL(twin || served) over the positions a model of chats is trained on, nats. Rounding
# the weights costs 0.009 here, mostly where a story may go on in many ways; no cache adds to it visibly.
@pytest.mark.parametrize(
    ("cache", "bound"), [("float32", 0.012), ("int8", 0.012), ("fp8_e4m3fn", 0.015), ("int4", 0.02)]
)
def test_the_served_model_says_what_its_twin_says(
    cache: str, bound: float, folder: Path, twin: dict[str, torch.Tensor]
) -> None:
    adapter = load(folder, cache)
    divergences, agreeing, total = [], 0, 0
    for number in range(len(demo_twin.texts())):
        tokens = twin[f"ids.{number}"].to(torch.int64)
        answer = demo_twin.first_learned(tokens)
        logits = adapter.forward(tokens.unsqueeze(0))[0, answer:]
        ids = twin[f"top_ids.{number}"][answer:].to(torch.int64)
        want = (twin[f"top.{number}"] - twin[f"lse.{number}"].unsqueeze(1))[answer:]
        got = logits.log_softmax(-1).gather(1, ids)
        divergences.append((want.exp() * (want - got)).sum(1).abs())
        agreeing += int((logits.argmax(-1) == ids[:, 0]).sum())
        total += ids.shape[0]
    mean = float(torch.cat(divergences).mean())
    print(f"{cache}: mean KL {mean:.5f}, same first choice {agreeing} of {total}")
    assert mean <= bound
    assert agreeing >= 0.87 * total


def test_simple_questions_get_the_twins_own_answers(folder: Path, twin: dict[str, torch.Tensor]) -> None:
    adapter = load(folder, "auto")
    for number in (0, 2):  # one sentence each, with no two ways to go on
        tokens = twin[f"ids.{number}"].to(torch.int64)
        answer = demo_twin.first_learned(tokens)
        ids = tokens[: answer + 1].tolist()
        while len(ids) < len(tokens) and ids[-1] not in adapter.eos_token_ids:
            ids.append(int(adapter.forward(torch.tensor([ids]))[0, -1].argmax()))
        assert ids == tokens[: len(ids)].tolist(), adapter.tokenizer.decode(ids)
