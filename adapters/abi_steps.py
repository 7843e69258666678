"""Driving `ModelAdapter.step` by hand: sequences, blocks and pools for the ABI cases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from deepseek_tgi.adapters.base import LoadOptions, ModelAdapter
from deepseek_tgi.core import ForwardInputs
from deepseek_tgi.kv.pool import KVPool

NUM_BLOCKS = 24


class CaseError(Exception):
    """A case found the backend in breach of a rule; the message says how."""


@dataclass(frozen=True, slots=True)
class Piece:
    """New tokens of one request, of which `start` are stored already, living in `blocks`."""

    tokens: Sequence[int]
    blocks: Sequence[int]
    start: int = 0


@dataclass(frozen=True, slots=True)
class Bench:
    """What a case works on: a loaded backend, how it was loaded, the exactness to ask for, and a pool maker."""

    adapter: ModelAdapter
    model_id: str
    options: LoadOptions
    built: bool
    prompts: tuple[tuple[int, ...], ...]

    @property
    def tolerance(self) -> float:
        """Largest accepted difference as a share of the largest logit: rounding in another order, no more."""
        return 2e-4 if self.adapter.info.dtype.endswith("float32") else 3e-2

    def pool(self) -> KVPool:
        """A pool whose bytes are varied and finite in every cache format, so that a stray write or read shows."""
        pool = KVPool(self.adapter.kv_layout, NUM_BLOCKS, self.adapter.info.device)
        generator = torch.Generator().manual_seed(7)
        pattern = torch.randint(0x30, 0x40, tuple(pool.storage.shape), dtype=torch.uint8, generator=generator)
        pool.storage.copy_(pattern)
        return pool

    def blocks_for(self, num_tokens: int, first: int = 1) -> list[int]:
        """Enough blocks in a row for `num_tokens`, block 0 left out."""
        size = self.adapter.kv_layout.block_size
        return list(range(first, first + -(-num_tokens // size)))

    def step(
        self, pool: KVPool, pieces: Sequence[Piece], rows: Sequence[int] | None = None, stored: bool = False
    ) -> torch.Tensor:
        """Run one step; logits of `rows`, or of every token. `stored` says that nothing is to be written."""
        inputs = forward_inputs(pieces, self.adapter.kv_layout.block_size, rows)
        if stored:
            inputs = replace(inputs, slots=torch.full_like(inputs.slots, -1))
        logits = self.adapter.step(inputs, pool)
        expected = (len(inputs.logit_rows), self.adapter.info.vocab_size)
        if not isinstance(logits, torch.Tensor) or tuple(logits.shape) != expected or logits.dtype != torch.float32:
            raise CaseError(f"step gave {describe(logits)}, expected float32 {list(expected)}")
        return logits.cpu()

    def forward(self, rows: Sequence[Sequence[int]], mask: torch.Tensor | None = None) -> torch.Tensor:
        """`forward` on rows of one length, checked for shape and dtype."""
        ids = torch.tensor([list(row) for row in rows], dtype=torch.int64)
        logits = self.adapter.forward(ids, mask)
        expected = (*ids.shape, self.adapter.info.vocab_size)
        if not isinstance(logits, torch.Tensor) or tuple(logits.shape) != expected or logits.dtype != torch.float32:
            raise CaseError(f"forward gave {describe(logits)}, expected float32 {list(expected)}")
        return logits.cpu()

    def require_close(self, got: torch.Tensor, want: torch.Tensor, what: str) -> str:
        """Detail text if `got` equals `want` within the tolerance, else `CaseError` naming `what`."""
        error = relative_error(got, want)
        if not error <= self.tolerance:
            raise CaseError(f"{what}: differs by {error:.2g} of the largest logit, allowed {self.tolerance:.0e}")
        return "bit-identical" if error == 0 else f"within {error:.1e}"


def forward_inputs(pieces: Sequence[Piece], block_size: int, rows: Sequence[int] | None = None) -> ForwardInputs:
    """The step for `pieces` in order. Unused places of the block tables name block 0."""
    ids = [token for piece in pieces for token in piece.tokens]
    positions = [piece.start + i for piece in pieces for i in range(len(piece.tokens))]
    owners = [piece for piece in pieces for _ in piece.tokens]
    slots = [o.blocks[p // block_size] * block_size + p % block_size for o, p in zip(owners, positions, strict=True)]
    lengths = [len(piece.tokens) for piece in pieces]
    width = max(len(piece.blocks) for piece in pieces)
    tables = [[*piece.blocks, *[0] * (width - len(piece.blocks))] for piece in pieces]
    wanted = list(range(len(ids))) if rows is None else list(rows)

    def tensor(values: Sequence[object], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype)

    return ForwardInputs(
        input_ids=tensor(ids, torch.int64),
        positions=tensor(positions, torch.int32),
        slots=tensor(slots, torch.int64),
        cu_seqlens=tensor([sum(lengths[:i]) for i in range(len(lengths) + 1)], torch.int32),
        block_tables=tensor(tables, torch.int32),
        cache_lens=tensor([piece.start for piece in pieces], torch.int32),
        logit_rows=tensor(wanted, torch.int64),
        max_seqlen=max(lengths),
        max_context=max(piece.start + len(piece.tokens) for piece in pieces),
    )


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest difference over the largest magnitude of `want`; infinite if shapes differ or a value is not finite."""
    if got.shape != want.shape or not bool(torch.isfinite(got).all()):
        return float("inf")
    return float((got - want).abs().max() / want.abs().max().clamp(min=1e-9))


def describe(value: object) -> str:
    """Type, dtype and shape of what a backend returned."""
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return type(value).__name__
