"""How well an adapter predicts text it has not seen, with its cache in any number format; no engine involved.

Imported by tests as `held_out` and by benchmarks as `tests.held_out`, so it needs nothing else of the tests.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from deepseek_tgi.adapters.base import ModelAdapter
from deepseek_tgi.core import ForwardInputs
from deepseek_tgi.kv.layout import KVMode
from deepseek_tgi.kv.pool import KVPool


@dataclass(frozen=True, slots=True)
class Loss:
    """Negative log-likelihood, in nats a token, over `num_tokens` predicted tokens."""

    nats: float
    num_tokens: int

    @property
    def perplexity(self) -> float:
        """Choices as good as an even bet among so many."""
        return math.exp(self.nats)


def prose() -> str:
    """English that comes with Python and that no small model was tuned on: the interpreter's own help texts."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


@torch.no_grad()
def loss_on(adapter: ModelAdapter, mode: KVMode, ids: Sequence[int], window: int = 1024, chunk: int = 256) -> Loss:
    """The loss on `ids`, cut into windows that know nothing of each other, the cache in `mode`.

    A window is computed in steps of `chunk` tokens, so that most of what a token sees has been through the cache's
    format; the first token of a window is not predicted. Raises what the adapter raises.
    """
    layout = adapter.kv_layout.with_mode(mode)
    pool = KVPool(layout, -(-window // layout.block_size))
    total, count = 0.0, 0
    try:
        for start in range(0, len(ids), window):
            piece = ids[start : start + window]
            for at, inputs in _steps(piece, chunk, layout.block_size):
                logits = adapter.step(inputs, pool)
                targets = torch.tensor(piece[at + 1 : at + chunk + 1])
                if len(targets):
                    losses = torch.nn.functional.cross_entropy(logits[: len(targets)], targets, reduction="none")
                    total += float(losses.double().sum())
                    count += len(targets)
    finally:
        pool.close()
    return Loss(total / count, count)


def _steps(ids: Sequence[int], chunk: int, block_size: int) -> Iterator[tuple[int, ForwardInputs]]:
    """One sequence in the first blocks of a pool, step by step, every row's logits wanted."""
    table = torch.arange(-(-len(ids) // block_size), dtype=torch.int32).unsqueeze(0)
    for at in range(0, len(ids), chunk):
        tokens = torch.tensor(ids[at : at + chunk])
        positions = torch.arange(at, at + len(tokens))
        yield (
            at,
            ForwardInputs(
                input_ids=tokens,
                positions=positions.int(),
                slots=positions,
                cu_seqlens=torch.tensor([0, len(tokens)], dtype=torch.int32),
                block_tables=table,
                cache_lens=torch.tensor([at], dtype=torch.int32),
                logit_rows=torch.arange(len(tokens)),
                max_seqlen=len(tokens),
                max_context=at + len(tokens),
            ),
        )
