"""The rules of `adapters.base` as cases: each takes a `Bench`, returns a detail text and raises `CaseError`.

Choice: a case compares a backend with itself in another arrangement (padded, batched, cached, alone), so it needs no
oracle and works for any model. Prevents: a check that only the bundled architecture can pass. What such a comparison
cannot see (a wrong weight, a temperature) is left to a backend's own tests against its source.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch

from deepseek_tgi.adapters.abi_checkpoint import HEAD_RELATIONS
from deepseek_tgi.adapters.abi_steps import Bench, CaseError, Piece, relative_error
from deepseek_tgi.adapters.base import ModelInfo
from deepseek_tgi.kv.layout import LatentLayout
from deepseek_tgi.kv.pool import KVPool

Case = Callable[[Bench], str]


def info_is_complete(bench: Bench) -> str:
    """`info` has a value of the right type in every field and does not change."""
    info = bench.adapter.info
    if not isinstance(info, ModelInfo):
        raise CaseError(f"info is a {type(info).__name__}, expected ModelInfo")
    empty = [
        name
        for name in ("model_id", "model_type", "dtype", "device_type", "quantization", "attention_impl")
        if not isinstance(getattr(info, name), str) or not getattr(info, name)
    ]
    counts = ("vocab_size", "max_position_embeddings", "weight_bytes")
    empty += [name for name in counts if not isinstance(getattr(info, name), int) or getattr(info, name) < 1]
    if empty:
        raise CaseError(f"info has no usable {', '.join(empty)}")
    if bench.adapter.tokenizer.vocab_size > info.vocab_size:
        raise CaseError(f"tokenizer has {bench.adapter.tokenizer.vocab_size} ids, the model only {info.vocab_size}")
    if bench.adapter.info != info:
        raise CaseError("info changed between two reads")
    return f"{info.model_type}, {info.quantization}, {info.dtype}"


def eos_from_checkpoint(bench: Bench) -> str:
    """`eos_token_ids` are those of `generation_config.json`, else of `config.json`."""
    ids = bench.adapter.eos_token_ids
    if not ids or not all(0 <= i < bench.adapter.info.vocab_size for i in ids):
        raise CaseError(f"eos_token_ids is {sorted(ids)}, expected ids below {bench.adapter.info.vocab_size}")
    for name in ("generation_config.json", "config.json"):
        file = Path(bench.model_id, name)
        listed = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id") if file.is_file() else None
        if listed is not None:
            expected = set(listed) if isinstance(listed, list) else {listed}
            if set(ids) != expected:
                raise CaseError(f"eos_token_ids is {sorted(ids)}, {name} says {sorted(expected)}")
            return f"{sorted(ids)} of {name}"
    return f"{sorted(ids)}; no file of the model to compare with"


def logits_shape(bench: Bench) -> str:
    """`forward` gives float32 `[B, S, V]`, finite, with V the model's own vocabulary."""
    logits = bench.forward([bench.prompts[1], bench.prompts[0][: len(bench.prompts[1])]])
    if not bool(torch.isfinite(logits).all()):
        raise CaseError("logits are not finite")
    return f"float32 {list(logits.shape)}"


def logits_raw(bench: Bench) -> str:
    """No softmax, no log-softmax, no shift: rows must not be normalised."""
    logits = bench.forward([bench.prompts[0]])[0].double()
    sums, totals, tops = logits.sum(-1), logits.logsumexp(-1), logits.amax(-1)
    if bool((logits >= 0).all()) and bool((sums - 1).abs().max() < 1e-2):
        raise CaseError("every row is positive and sums to 1: softmax was applied")
    if bool(totals.abs().max() < 1e-2):
        raise CaseError("exp of every row sums to 1: log-softmax was applied")
    if bool(tops.abs().max() < 1e-6):
        raise CaseError("the largest logit of every row is 0: rows are shifted by their maximum")
    if bool(logits.mean(-1).abs().max() < 1e-6 * float(logits.abs().max())):
        raise CaseError("every row has mean 0: rows are shifted by their mean")
    return f"row sums {float(sums.min()):.3g} to {float(sums.max()):.3g}"


def logits_linear(bench: Bench) -> str:
    """Head rows in a linear relation give logits in the same relation, whatever tokens came before."""
    if not bench.built:
        return "only for the built checkpoint"
    logits = bench.forward([bench.prompts[0]])[0]
    for a, b, factor in HEAD_RELATIONS:
        gap = float((logits[:, a] - factor * logits[:, b]).abs().max() / logits.abs().max())
        if not gap <= bench.tolerance:
            raise CaseError(f"logit {a} should be {factor:g} times logit {b}, off by {gap:.2g}: logits were processed")
    return f"{len(HEAD_RELATIONS)} relations hold"


def _padded(bench: Bench, left: bool) -> str:
    long, short = bench.prompts[0], bench.prompts[1]
    gap = len(long) - len(short)
    alone = bench.forward([short])[0]
    worst = ""
    for filler in (bench.adapter.pad_token_id, long[0]):
        row = [filler] * gap + list(short) if left else list(short) + [filler] * gap
        places = slice(gap, None) if left else slice(0, len(short))
        mask = torch.ones(2, len(long), dtype=torch.int64)
        mask[1] = 0
        mask[1, places] = 1
        both = bench.forward([long, row], mask)
        worst = bench.require_close(both[1, places], alone, "the padded row against the row alone")
        bench.require_close(both[0], bench.forward([long])[0], "the full row against the row alone")
        if bool(both[1][mask[1] == 0].abs().max() != 0):
            raise CaseError("padded places hold logits, expected 0")
    return worst


def padding_right(bench: Bench) -> str:
    """A row padded on the right gives the logits of the row alone; what fills the padding does not matter."""
    return _padded(bench, left=False)


def padding_left(bench: Bench) -> str:
    """A row padded on the left does too: positions count tokens, not columns."""
    return _padded(bench, left=True)


def mask_none(bench: Bench) -> str:
    """No mask means no padding."""
    prompt = bench.prompts[0]
    ones = torch.ones(1, len(prompt), dtype=torch.int64)
    return bench.require_close(bench.forward([prompt], ones), bench.forward([prompt]), "a mask of ones against none")


def batch_without_pad_token(bench: Bench) -> str:
    """Rows of different length can be batched whether or not the tokenizer has a pad token."""
    pad = bench.adapter.pad_token_id
    if not 0 <= pad < bench.adapter.info.vocab_size:
        raise CaseError(f"pad_token_id is {pad}, expected an id below {bench.adapter.info.vocab_size}")
    ids, mask = bench.adapter.collate(bench.prompts)
    logits = bench.adapter.forward(ids, mask)
    for row, prompt in enumerate(bench.prompts):
        bench.require_close(logits[row, : len(prompt)].cpu(), bench.forward([prompt])[0], f"row {row} of the batch")
    return "no pad token" if bench.adapter.tokenizer.pad_token_id is None else f"pad token {pad}"


def causal(bench: Bench) -> str:
    """A token's logits do not depend on what comes after it."""
    prompt = bench.prompts[0]
    half = len(prompt) // 2
    return bench.require_close(
        bench.forward([prompt])[0, :half], bench.forward([prompt[:half]])[0], "the first half against the half alone"
    )


def repeatable(bench: Bench) -> str:
    """The same input gives the same bits."""
    first, second = bench.forward([bench.prompts[0]]), bench.forward([bench.prompts[0]])
    if not torch.equal(first, second):
        raise CaseError(f"two equal calls differ by {relative_error(second, first):.2g} of the largest logit")
    return "bit-identical"


def _contexts(pool: KVPool, slots: torch.Tensor) -> torch.Tensor:
    """What every layer holds at `slots`, as numbers: keys with values, or latents with rotary keys."""
    read = pool.read_latents if isinstance(pool.layout, LatentLayout) else pool.read
    return torch.stack([torch.cat(read(layer, slots), dim=-1) for layer in range(pool.layout.num_layers)])


def layout_matches_pool(bench: Bench) -> str:
    """`kv_layout` is what was asked for, and every layer stores something finite at the slots named."""
    layout = bench.adapter.kv_layout
    if layout.block_size != bench.options.block_size:
        raise CaseError(f"block_size {bench.options.block_size} was asked for, kv_layout has {layout.block_size}")
    wish = bench.options.kv_cache_dtype
    if wish not in ("auto", layout.mode.value):
        raise CaseError(f"kv_cache_dtype {wish} was asked for, kv_layout has {layout.mode.value}")
    pool = bench.pool()
    prompt = bench.prompts[0]
    if pool.nbytes != pool.num_blocks * layout.bytes_per_block or pool.storage.numel() != pool.nbytes:
        raise CaseError(f"{pool.num_blocks} blocks take {pool.storage.numel()} bytes, kv_layout says {pool.nbytes}")
    slots = torch.arange(layout.block_size, layout.block_size + len(prompt))
    before = _contexts(pool, slots)
    bench.step(pool, [Piece(prompt, bench.blocks_for(len(prompt)))])
    after = _contexts(pool, slots)
    idle = [layer for layer in range(layout.num_layers) if torch.equal(before[layer], after[layer])]
    if idle or not bool(torch.isfinite(after).all()):
        raise CaseError(f"nothing stored in layers {idle}" if idle else "stored keys or values are not finite")
    return f"{layout.mode.value}, {layout.bytes_per_token} bytes a token"
