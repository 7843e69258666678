"""Cases about `step` and the paged cache: who may write where, and what a context may consist of."""

from __future__ import annotations

from itertools import pairwise

import torch

from deepseek_tgi.adapters.abi_steps import Bench, CaseError, Piece
from deepseek_tgi.kv.pool import KVPool


def step_agrees_with_forward(bench: Bench) -> str:
    """A prefill and token-by-token decode give the rows of `forward`."""
    prompt = bench.prompts[0]
    want = bench.forward([prompt])[0]
    pool, blocks = bench.pool(), bench.blocks_for(len(prompt))
    half = len(prompt) // 2
    parts = [bench.step(pool, [Piece(prompt[:half], blocks)])]
    parts += [bench.step(pool, [Piece([prompt[at]], blocks, at)]) for at in range(half, len(prompt))]
    return bench.require_close(torch.cat(parts), want, "prefill and decode against forward")


def chunks_agree(bench: Bench) -> str:
    """A prompt fed in uneven chunks gives the rows of one prefill."""
    prompt = bench.prompts[0]
    blocks = bench.blocks_for(len(prompt))
    want = bench.step(bench.pool(), [Piece(prompt, blocks)])
    pool = bench.pool()
    cuts = [0, 1, 6, len(prompt) - 2, len(prompt)]
    parts = [bench.step(pool, [Piece(prompt[a:b], blocks, a)]) for a, b in pairwise(cuts) if b > a]
    return bench.require_close(torch.cat(parts), want, "chunks against one prefill")


def blocks_in_any_order(bench: Bench) -> str:
    """Which blocks hold a context, and in what order, changes nothing."""
    prompt = bench.prompts[2]
    straight = bench.blocks_for(len(prompt))
    shuffled = [7, 3, 11, 5, 9, 2][: len(straight)]
    runs = []
    for blocks in (straight, shuffled):
        pool = bench.pool()
        bench.step(pool, [Piece(prompt[:-1], blocks)])
        runs.append(bench.step(pool, [Piece(prompt[-1:], blocks, len(prompt) - 1)]))
    return bench.require_close(runs[1], runs[0], f"blocks {shuffled} against {straight}")


def logit_rows_only(bench: Bench) -> str:
    """Only the rows asked for come back, in their order."""
    prompt = bench.prompts[0]
    blocks = bench.blocks_for(len(prompt))
    every = bench.step(bench.pool(), [Piece(prompt, blocks)])
    rows = [1, 4, len(prompt) - 1]
    return bench.require_close(bench.step(bench.pool(), [Piece(prompt, blocks)], rows), every[rows], f"rows {rows}")


def _mixed(bench: Bench) -> tuple[KVPool, list[Piece]]:
    """A prefill, a decode and a later chunk of three requests, and a pool with what the last two have stored."""
    a, b, c = bench.prompts
    size = bench.adapter.kv_layout.block_size
    second = 1 + len(bench.blocks_for(len(a)))
    third = second + len(bench.blocks_for(len(b)))
    tables = [bench.blocks_for(len(a)), bench.blocks_for(len(b), second), bench.blocks_for(len(c), third)]
    pool = bench.pool()
    bench.step(pool, [Piece(b[:-1], tables[1]), Piece(c[:size], tables[2])])
    return pool, [Piece(a, tables[0]), Piece(b[-1:], tables[1], len(b) - 1), Piece(c[size:], tables[2], size)]


def rows_are_independent(bench: Bench) -> str:
    """A request's logits do not depend on the other requests of the step."""
    pool, pieces = _mixed(bench)
    together = bench.step(pool, pieces)
    alone = torch.cat([bench.step(_mixed(bench)[0], [piece]) for piece in pieces])
    return bench.require_close(together, alone, "requests together against each alone")


def writes_only_its_slots(bench: Bench) -> str:
    """Every byte of the pool outside the slots named is as before, neighbours and block 0 included."""
    compared = 0
    for chosen in ([0], [1], [2], [0, 1, 2]):
        pool, every = _mixed(bench)
        if not torch.equal(pool.storage[0], bench.pool().storage[0]):
            raise CaseError("block 0 was written, which belongs to the router's health request")
        pieces = [every[i] for i in chosen]
        before = pool.storage.clone()
        bench.step(pool, pieces)
        stray = before != pool.storage
        for piece in pieces:
            _allow(pool, stray, piece)
        if bool(stray.any()):
            block, byte = (int(i) for i in stray.nonzero()[0])
            raise CaseError(f"{int(stray.sum())} bytes changed outside the slots, first byte {byte} of block {block}")
        compared += pool.nbytes
    _leaves_stored_tokens_alone(bench)
    return f"{compared} bytes compared"


def _leaves_stored_tokens_alone(bench: Bench) -> None:
    """A slot of -1 is not written: the token is stored already, and read from where its block table leads."""
    pool, every = _mixed(bench)
    last = every[1]
    first = bench.step(pool, [last])
    before = pool.storage.clone()
    again = bench.step(pool, [last], stored=True)
    if not torch.equal(before, pool.storage):
        raise CaseError(f"{int((before != pool.storage).sum())} bytes changed for a token whose slot is -1")
    bench.require_close(again, first, "a token with slot -1 against the same token when it was stored")


def _allow(pool: KVPool, stray: torch.Tensor, piece: Piece) -> None:
    """Clear the marks of all bytes that belong to the piece's slots, in every layer and section."""
    size = pool.layout.block_size
    for position in range(piece.start, piece.start + len(piece.tokens)):
        block, offset = piece.blocks[position // size], position % size
        for layer in range(pool.layout.num_layers):
            for section in pool.layout.sections(layer):
                heads, slots, width = section.shape
                part = stray[block, section.offset_bytes : section.offset_bytes + section.size_bytes]
                part.view(heads, slots, width * section.item_bytes)[:, offset] = False


def forward_leaves_no_trace(bench: Bench) -> str:
    """`forward` uses a cache of its own: a step before and after it gives the same bits."""
    prompt = bench.prompts[0]
    blocks = bench.blocks_for(len(prompt))
    pool = bench.pool()
    bench.step(pool, [Piece(prompt[:-1], blocks)])
    last = Piece(prompt[-1:], blocks, len(prompt) - 1)
    before = bench.step(pool, [last])
    bench.forward([bench.prompts[1]])
    if not torch.equal(before, bench.step(pool, [last])):
        raise CaseError("the same step gives other logits after a forward")
    return "bit-identical"


def workspace_is_bounded(bench: Bench) -> str:
    """`workspace_bytes` is a whole number that grows with tokens and rows, and covers at least the logits."""
    ask = bench.adapter.workspace_bytes
    small, more_tokens, more_rows = ask(16, 1), ask(512, 1), ask(512, 64)
    if not all(isinstance(n, int) for n in (small, more_tokens, more_rows)):
        raise CaseError("workspace_bytes is not an int")
    if not 0 < small <= more_tokens <= more_rows:
        raise CaseError(f"workspace_bytes falls: {small}, {more_tokens}, {more_rows} for growing work")
    logits = 64 * bench.adapter.info.vocab_size * 4
    if more_rows < logits:
        raise CaseError(f"workspace_bytes(512, 64) is {more_rows}, the logits alone take {logits}")
    return f"{more_rows} bytes for 512 tokens and 64 rows"
