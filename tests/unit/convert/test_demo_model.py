"""The training of the bundled model at toy scale: its arithmetic, its rounding, its balance and its text."""

from __future__ import annotations

import itertools
import json
import random
from array import array
from pathlib import Path

import pytest
import torch

from deepseek_tgi.adapters.quantized import QuantizedModelAdapter
from deepseek_tgi.convert.demo_model import checkpoint, corpus, facts, filters
from deepseek_tgi.convert.demo_model.model import DemoModel, Experts, fake_quantise
from deepseek_tgi.convert.demo_model.muon import orthogonalise
from deepseek_tgi.convert.demo_model.pack import pack
from deepseek_tgi.convert.demo_model.shape import ModelShape
from deepseek_tgi.convert.demo_model.tokenizer import render, save_tokenizer, train_tokenizer
from deepseek_tgi.convert.demo_model.train import Plan, targets_of, train
from deepseek_tgi.convert.rtn import quantise_matrix

SHAPE = ModelShape(
    vocab_size=300, hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=3,
    num_attention_heads=2, q_lora_rank=32, kv_lora_rank=32, n_routed_experts=8, num_experts_per_tok=3,
    max_position_embeddings=64,
)  # fmt: skip


@pytest.fixture(scope="module")
def model() -> DemoModel:
    torch.manual_seed(3)
    made = DemoModel(SHAPE)
    for layer in made.layers:
        if isinstance(layer.mlp, Experts):
            layer.mlp.bias.normal_(0, 0.3)  # decides the choice of experts in many rows
    return made


@pytest.fixture(scope="module")
def folder(model: DemoModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy model as it is written, with a tokenizer of its own."""
    path = tmp_path_factory.mktemp("demo")
    checkpoint.save(model, path, bos_id=0, eos_id=1)
    save_tokenizer(train_tokenizer((render(d) for d in corpus.own_documents(300, 1)), 300), path, 64)
    return path


def test_the_training_model_computes_what_transformers_does(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ours = checkpoint.load(folder)
    ids = torch.randint(4, 300, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        want, got = theirs(ids).logits, ours(ids)[0]
    assert float((got - want).abs().max()) <= 1e-4 * float(want.abs().max())


def test_a_written_model_is_served_with_the_same_logits(folder: Path) -> None:
    from deepseek_tgi.adapters.base import LoadOptions

    adapter = QuantizedModelAdapter.get_model(str(folder), options=LoadOptions(dtype="float32"))
    ids = torch.randint(4, 300, (2, 33), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        want = checkpoint.load(folder)(ids)[0]
    assert float((adapter.forward(ids) - want).abs().max()) <= 1e-4 * float(want.abs().max())


def test_rounding_in_training_is_the_writers() -> None:
    weight = torch.randn(24, 96, generator=torch.Generator().manual_seed(2)) * 0.1
    weight[3] = 0.0
    weight[4] = weight[4].abs() + 0.5  # a range that does not hold zero
    assert torch.equal(fake_quantise(weight, 32), quantise_matrix(weight, 32).dequantise())


def test_rounding_lets_gradients_pass_unchanged() -> None:
    weight = torch.randn(4, 32, requires_grad=True)
    (fake_quantise(weight, 32) * torch.arange(32.0)).sum().backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.arange(32.0).expand(4, 32))


def test_balancing_moves_load_to_the_idle_expert() -> None:
    torch.manual_seed(0)
    model = DemoModel(SHAPE)
    experts = [layer.mlp for layer in model.layers if isinstance(layer.mlp, Experts)]
    ids = torch.randint(0, 300, (8, 64))
    with torch.no_grad():
        before = model(ids)[1]
        for _ in range(200):
            model.balance(model(ids)[1], 5e-3)
        after = model(ids)[1]
    for mlp, load in zip(experts, before, strict=True):
        assert mlp.bias[load.argmin()] > 0 > mlp.bias[load.argmax()]
    assert float(after.std(1).max()) < 0.5 * float(before.std(1).max())


def test_a_users_words_are_not_learned() -> None:
    bos, eos, user, assistant = 0, 1, 2, 3
    ids = torch.tensor([[bos, user, 10, 11, assistant, 12, 13, eos, user, 14, assistant, 15]])
    learned = targets_of(ids, user, assistant)[0].tolist()
    assert [t for t in learned if t >= 0 and t in (10, 11, 14)] == []
    assert [t for t in learned if t in (12, 13, 15)] == [12, 13, 15]


def test_orthogonalised_matrices_have_singular_values_near_one() -> None:
    stack = torch.randn(3, 16, 40, generator=torch.Generator().manual_seed(4))
    values = torch.linalg.svdvals(orthogonalise(stack))
    assert 0.5 < float(values.min()) <= float(values.max()) < 1.5


def test_a_short_training_lowers_the_loss_before_and_after_rounding() -> None:
    torch.manual_seed(0)
    model = DemoModel(SHAPE)
    tokens = (torch.arange(20_000) % 23 + 4).to(torch.int16)
    first = _loss(model, tokens)
    said: list[str] = []
    steps = 40
    plan = Plan(steps, batch_tokens=512, length=32, compiled=False, clock=itertools.count().__next__)
    train(model, tokens, plan, said.append, lambda: None)
    assert any("rounded" in line for line in said)
    assert _loss(model, tokens) < first - 0.2


def _loss(model: DemoModel, tokens: torch.Tensor) -> float:
    ids = tokens[:650].view(10, 65).to(torch.int64)
    with torch.no_grad():
        logits = model(ids[:, :-1], rounded=True)[0]
    return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()))


def test_text_that_repeats_itself_or_strays_is_not_kept() -> None:
    good = filters.sentences("A cat is a small animal. It likes milk and sleeps a lot.")
    assert filters.is_clean(good, ("cat",))
    assert not filters.is_clean(good, ("horse",)), "does not speak of what was asked"
    assert not filters.is_clean(["The the cat sleeps."], ("cat",))
    assert not filters.is_clean(["A cat can run.", "A cat can hop.", "A cat can nap."], ("cat",))
    assert filters.is_circular(["A window is a window."])
    assert filters.sentences("One is done. Two is cut off in the")[-1].startswith("One")


def test_our_own_documents_depend_on_the_seed_alone() -> None:
    first = [render(d) for d in corpus.own_documents(60, 7)]
    assert first == [render(d) for d in corpus.own_documents(60, 7)]
    assert first != [render(d) for d in corpus.own_documents(60, 8)]


def test_facts_are_asked_and_answered() -> None:
    pairs = list(facts.questions(400, random.Random(0)))
    assert len(pairs) == 400
    assert all(question.strip() and answer[-1] in ".!?" for question, answer in pairs)


def test_packed_files_hold_every_document_once(tmp_path: Path) -> None:
    documents = list(corpus.own_documents(200, 5))
    tokenizer = train_tokenizer((render(d) for d in documents), 400)
    lengths = sorted(len(tokenizer.encode(render(d), add_special_tokens=False).ids) for d in documents)
    counts = pack(documents, tokenizer, tmp_path, random.Random(0))
    stored: array[int] = array("H")
    for path in tmp_path.glob("*.bin"):
        stored.frombytes(path.read_bytes())
    assert len(stored) == sum(lengths) == sum(counts.values())
    marks = json.loads((tmp_path / "ids.json").read_text())
    assert stored.count(marks["bos"]) == 200
