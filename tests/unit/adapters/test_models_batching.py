"""What a step may not depend on: neighbours, chunking, padding, block order; and what it may not touch."""

from __future__ import annotations

import pytest
import torch
from builders import TinyCheckpoint, tiny_checkpoint
from stepper import Placed, Stepper, relative_error

from deepseek_tgi.adapters.base import LoadOptions
from deepseek_tgi.adapters.quantized import QuantizedModelAdapter
from deepseek_tgi.errors import RequestError

TEXTS = [[(7 * i + 3 * j + i * j) % 270 for j in range(n)] for i, n in enumerate((50, 33, 17, 16, 1))]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    return tiny_checkpoint(tmp_path_factory.mktemp("qwen2"), "qwen2", "awq-gemm", bias_scale=5.0)


@pytest.fixture(
    scope="module",
    params=["float32-auto", "bfloat16-auto", "float32-int8", "float32-float16", "float32-fp8", "float32-int4"],
)
def adapter(request: pytest.FixtureRequest, checkpoint: TinyCheckpoint) -> QuantizedModelAdapter:
    """The product's own choice of kernels, in each compute dtype and some cache formats."""
    dtype, cache = str(request.param).split("-")
    return QuantizedModelAdapter.get_model(str(checkpoint.path), options=LoadOptions(dtype=dtype, kv_cache_dtype=cache))


def assert_same(adapter: QuantizedModelAdapter, got: torch.Tensor, expected: torch.Tensor) -> None:
    """Bit for bit with the compiled kernels; torch's own matrix products pick another order for another row count."""
    if adapter.info.attention_impl == "paged-native":
        assert torch.equal(got, expected)
    else:
        assert relative_error(got, expected) < (2e-2 if adapter.info.dtype == "bfloat16" else 1e-3)


def test_a_request_gets_the_same_logits_alone_and_among_others(adapter: QuantizedModelAdapter) -> None:
    alone = [Stepper(adapter, seed=i).run(text, [len(text)]) for i, text in enumerate(TEXTS)]
    together = Stepper(adapter, seed=9).step([(Placed(), text) for text in TEXTS])
    for got, expected in zip(together, alone, strict=True):
        assert_same(adapter, got, expected)


@pytest.mark.parametrize("chunks", [[16, 16], [1, 15, 17], [33, 1, 8], [49]], ids=str)
def test_chunking_does_not_change_logits(adapter: QuantizedModelAdapter, chunks: list[int]) -> None:
    whole = Stepper(adapter, seed=1).run(TEXTS[0], [50])
    assert_same(adapter, Stepper(adapter, seed=2).run(TEXTS[0], chunks), whole)


def test_one_step_may_hold_prompts_chunks_and_decodes(adapter: QuantizedModelAdapter) -> None:
    stepper = Stepper(adapter)
    decoding, chunked, fresh = Placed(), Placed(), Placed()
    stepper.step([(decoding, TEXTS[0][:49])])
    stepper.step([(chunked, TEXTS[1][:20])])
    mixed = stepper.step([(fresh, TEXTS[2]), (decoding, TEXTS[0][49:]), (chunked, TEXTS[1][20:])])
    for got, text, start in zip(mixed, (TEXTS[2], TEXTS[0], TEXTS[1]), (0, 49, 20), strict=True):
        assert_same(adapter, got, Stepper(adapter, seed=5).run(text, [len(text)])[start:])


def test_only_the_wanted_rows_are_returned_and_are_the_same(adapter: QuantizedModelAdapter) -> None:
    stepper = Stepper(adapter)
    every = Stepper(adapter).run(TEXTS[0], [50])
    rows = [0, 17, 49]
    some = adapter.step(stepper.inputs([(Placed(), TEXTS[0])], rows), stepper.pool)
    assert some.shape == (3, adapter.info.vocab_size)
    assert_same(adapter, some, every[rows])
    none = adapter.step(stepper.inputs([(Placed(), TEXTS[0])], []), stepper.pool)
    assert none.shape == (0, adapter.info.vocab_size)


def test_a_step_writes_the_named_slots_and_no_other_byte(adapter: QuantizedModelAdapter) -> None:
    stepper = Stepper(adapter, num_blocks=8)
    bystander, writer = Placed(), Placed()
    stepper.step([(bystander, TEXTS[1])])
    stepper.slots(writer, 0, 40)
    before = stepper.pool.storage.clone()
    stepper.step([(writer, TEXTS[2])])
    after = stepper.pool.storage
    changed = {int(block) for block in (before != after).any(1).nonzero()}
    assert changed == set(writer.blocks[:2]), "17 tokens lie in the first two of its blocks"
    for layer in range(adapter.kv_layout.num_layers):
        k = stepper.pool.view(layer).k[writer.blocks[1]]  # [G, S, D]
        assert not bool(k[:, 1:].any()), "places behind the last token stay untouched"
        assert bool(k[:, 0].any())


def test_stored_bytes_of_a_token_do_not_depend_on_batch_or_chunking(adapter: QuantizedModelAdapter) -> None:
    if adapter.info.attention_impl != "paged-native":
        pytest.skip("promised for the compiled kernels only")
    stored = []
    for chunks in ([50], [20, 30], [1] * 50):
        stepper, sequence, at = Stepper(adapter, seed=len(chunks)), Placed(), 0
        for size in chunks:
            stepper.step([(sequence, TEXTS[0][at : at + size]), (Placed(), TEXTS[2][:3])])
            at += size
        slots = torch.tensor(stepper.slots(sequence, 0, 50))
        stored.append([stepper.pool.read(layer, slots) for layer in range(adapter.kv_layout.num_layers)])
    for other in stored[1:]:
        for (k, v), (k0, v0) in zip(other, stored[0], strict=True):
            assert torch.equal(k, k0)
            assert torch.equal(v, v0)


def test_logits_belong_to_the_caller(adapter: QuantizedModelAdapter) -> None:
    stepper = Stepper(adapter)
    first = stepper.step([(Placed(), TEXTS[2])])[0]
    kept = first.clone()
    stepper.step([(Placed(), TEXTS[3])])
    assert torch.equal(first, kept)
    first -= 1.0  # an engine's logits processors work in place


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_on_either_side_gives_the_same_logits(adapter: QuantizedModelAdapter, side: str) -> None:
    width = max(len(t) for t in TEXTS)
    ids = torch.full((len(TEXTS), width), adapter.pad_token_id)
    mask = torch.zeros_like(ids)
    for row, text in enumerate(TEXTS):
        place = slice(0, len(text)) if side == "right" else slice(width - len(text), width)
        ids[row, place] = torch.tensor(text)
        mask[row, place] = 1
    logits = adapter.forward(ids, mask)
    assert logits.shape == (len(TEXTS), width, adapter.info.vocab_size)
    for row, text in enumerate(TEXTS):
        assert_same(adapter, logits[row][mask[row].bool()], adapter.forward(torch.tensor([text]))[0])
        assert not bool(logits[row][~mask[row].bool()].any()), "padded places hold zeros"


def test_what_stands_in_padded_places_does_not_matter(adapter: QuantizedModelAdapter) -> None:
    ids, mask = adapter.collate(TEXTS[:3])
    noise = torch.where(mask.bool(), ids, 123456789)
    assert torch.equal(adapter.forward(ids, mask), adapter.forward(noise, mask))


def test_a_checkpoint_without_pad_token_batches_and_falls_back_to_eos(adapter: QuantizedModelAdapter) -> None:
    assert adapter.tokenizer.pad_token_id is None
    assert adapter.pad_token_id == min(adapter.eos_token_ids)
    ids, mask = adapter.collate([TEXTS[0], TEXTS[3], []])
    logits = adapter.forward(ids, mask)
    assert_same(adapter, logits[1, :16], adapter.forward(torch.tensor([TEXTS[3]]))[0])
    assert not bool(logits[2].any()), "a row without tokens is all padding"


def test_an_empty_batch_gives_no_logits(adapter: QuantizedModelAdapter) -> None:
    assert adapter.forward(torch.zeros(0, 4, dtype=torch.int64)).shape == (0, 4, adapter.info.vocab_size)
    assert adapter.forward(torch.zeros(2, 0, dtype=torch.int64)).shape == (2, 0, adapter.info.vocab_size)


@pytest.mark.parametrize(
    ("ids", "mask", "message"),
    [
        (torch.zeros(4, dtype=torch.int64), None, r"\[B, S\]"),
        (torch.zeros(1, 4), None, "integers"),
        (torch.zeros(1, 4, dtype=torch.int64), torch.ones(1, 3), "attention_mask"),
        (torch.zeros(1, 4, dtype=torch.int64), torch.full((1, 4), 0.5), "0 and 1"),
        (torch.tensor([[1, 320]]), None, "0 to 319"),
        (torch.tensor([[-1, 3]]), None, "0 to 319"),
    ],
    ids=["1-d", "floats", "mask-shape", "soft-mask", "id-too-large", "id-negative"],
)
def test_input_that_does_not_fit_is_refused(
    adapter: QuantizedModelAdapter, ids: torch.Tensor, mask: torch.Tensor | None, message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        adapter.forward(ids, mask)
