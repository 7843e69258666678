"""How well an adapter predicts text it has not seen, with its cache in any number format; no engine involved.

Imported by tests as `held_out` and by benchmarks as `tests.held_out`, so it needs nothing else of the tests.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from deepseek_tgi.adapters.base import ModelAdapter
from deepseek_tgi.core import ForwardInputs
from deepseek_tgi.kv.layout import KVMode
from deepseek_tgi.kv.pool import KVPool

HELD = Path(__file__).parent / "oracles" / "demo_held"
"""Token files that were kept out of the bundled model's training: the first windows of each kind of text."""
DEMO_WINDOW = 513
"""512 predicted tokens, as the losses are that its training reports."""


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


def windows(ids: Sequence[int], size: int) -> list[Sequence[int]]:
    """`ids` cut into pieces of `size` that know nothing of each other."""
    return [ids[start : start + size] for start in range(0, len(ids), size)]


def every_token(piece: Sequence[int]) -> list[bool]:
    """All tokens count."""
    return [True] * len(piece)


def outside_turns(user: int, assistant: int) -> Callable[[Sequence[int]], list[bool]]:
    """All tokens count but those from a `user` mark to the next `assistant` mark, which no training asked for."""

    def counts(piece: Sequence[int]) -> list[bool]:
        kept, asking = [], False
        for token in piece:
            asking = asking or token == user
            kept.append(not asking)
            asking = asking and token != assistant
        return kept

    return counts


def held_windows(folder: Path, size: int, num_tokens: int) -> list[list[int]]:
    """Windows of every `held-*.bin` (token ids of 16 bits), as many of each file, some `num_tokens` in all."""
    files = sorted(folder.glob("held-*.bin"))
    each = max(1, num_tokens // size // max(1, len(files)))
    return [list(piece) for path in files for piece in windows(array("H", path.read_bytes()), size)[:each]]


@torch.no_grad()
def loss_on(
    adapter: ModelAdapter,
    mode: KVMode,
    pieces: Iterable[Sequence[int]],
    chunk: int = 256,
    counts: Callable[[Sequence[int]], list[bool]] = every_token,
) -> Loss:
    """The loss on the tokens of `pieces` that count, their first ones excepted, with the cache in `mode`.

    A piece is computed in steps of `chunk` tokens, so that most of what a token sees has been through the cache's
    format. Raises what the adapter raises.
    """
    pieces = [piece for piece in pieces if len(piece) > 1]
    layout = adapter.kv_layout.with_mode(mode)
    pool = KVPool(layout, -(-max(map(len, pieces)) // layout.block_size))
    total, count = 0.0, 0
    try:
        for piece in pieces:
            counted = torch.tensor(counts(piece))
            for at, inputs in _steps(piece, chunk, layout.block_size):
                logits = adapter.step(inputs, pool)
                targets = torch.tensor(piece[at + 1 : at + chunk + 1])
                wanted = counted[at + 1 : at + chunk + 1]
                if wanted.any():
                    losses = torch.nn.functional.cross_entropy(logits[: len(targets)], targets, reduction="none")
                    total += float(losses[wanted].double().sum())
                    count += int(wanted.sum())
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
