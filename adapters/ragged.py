"""From a rectangular batch with a padding mask to the ragged step the models take, and back."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deepseek_tgi.core import ForwardInputs
from deepseek_tgi.errors import RequestError


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """A step over the tokens of a rectangle. `mask [B, S] bool` marks them, in the order of the step's rows.

    Request b owns consecutive blocks of a pool of `num_blocks` that nobody else uses; rows without a token take none.
    """

    inputs: ForwardInputs
    mask: torch.Tensor
    num_blocks: int

    def spread(self, logits: torch.Tensor) -> torch.Tensor:
        """Put `logits [T, V]` back into the rectangle `[B, S, V]`; padded places are 0."""
        if bool(self.mask.all()):
            return logits.view(*self.mask.shape, logits.shape[1])
        out = logits.new_zeros(*self.mask.shape, logits.shape[1])
        out[self.mask] = logits
        return out


def pack(input_ids: torch.Tensor, attention_mask: torch.Tensor | None, vocab_size: int, block_size: int) -> RaggedBatch:
    """Drop the padding. A token's position is the number of unmasked tokens before it in its row.

    Raises: `RequestError` for shapes that disagree, a mask that is not 0 and 1, and ids outside the vocabulary.
    """
    mask = _checked_mask(input_ids, attention_mask)
    ids = input_ids[mask].to(torch.int64)
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        raise RequestError(
            f"input_ids: got ids from {int(ids.min())} to {int(ids.max())}, expected 0 to {vocab_size - 1}"
        )
    lengths = mask.sum(1)
    lengths = lengths[lengths > 0]
    blocks = -(-lengths // block_size)
    first_block = blocks.cumsum(0) - blocks
    owner = torch.repeat_interleave(torch.arange(len(lengths)), lengths)  # [T], the request of each token
    positions = (mask.cumsum(1) - 1)[mask]
    longest = int(lengths.max()) if len(lengths) else 0
    columns = torch.arange(-(-longest // block_size))
    tables = torch.where(columns < blocks[:, None], first_block[:, None] + columns, 0)
    inputs = ForwardInputs(
        input_ids=ids,
        positions=positions.to(torch.int32),
        slots=first_block[owner] * block_size + positions,
        cu_seqlens=torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32),
        block_tables=tables.to(torch.int32),
        cache_lens=torch.zeros(len(lengths), dtype=torch.int32),
        logit_rows=torch.arange(len(ids)),
        max_seqlen=longest,
        max_context=longest,
    )
    return RaggedBatch(inputs, mask, int(blocks.sum()))


def _checked_mask(input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
    if input_ids.dim() != 2 or input_ids.dtype.is_floating_point or input_ids.dtype == torch.bool:
        raise RequestError(f"input_ids: got {list(input_ids.shape)} {input_ids.dtype}, expected [B, S] of integers")
    if attention_mask is None:
        return torch.ones(input_ids.shape, dtype=torch.bool)
    if attention_mask.shape != input_ids.shape:
        raise RequestError(
            f"attention_mask: got {list(attention_mask.shape)}, expected {list(input_ids.shape)} as input_ids"
        )
    mask = attention_mask.bool()
    if not bool((mask == attention_mask).all()):
        raise RequestError("attention_mask: got values other than 0 and 1, expected 1 for tokens and 0 for padding")
    return mask
