"""One request inside the engine: its tokens, how far they are stored, and the state that travels with it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from deepseek_tgi.core import Request

if TYPE_CHECKING:
    from deepseek_tgi.engine.stopping import StopState
    from deepseek_tgi.logits.pipeline import SamplingState
    from deepseek_tgi.text.detokenize import IncrementalDetokenizer


@dataclass(slots=True, eq=False)
class Sequence:
    """A live request; owned by the one batch that holds it, changed only by the step that runs it.

    `ids` are prompt and output, `cache_len` of them are stored; `blocks [P] int32` hold position p in block
    `p // block_size`; `next_tokens` is how many the next step feeds; `prompt_logprobs` collects those of the prompt
    if they were asked for.
    """

    request: Request
    ids: list[int]
    prompt_length: int
    blocks: torch.Tensor
    sampling: SamplingState
    detokenizer: IncrementalDetokenizer
    stopping: StopState
    cache_len: int = 0
    next_tokens: int = 1
    prompt_logprobs: list[float] | None = None
    prompt_reported: bool = field(default=False)

    @property
    def remaining(self) -> int:
        """Known tokens that are not stored yet: 1 while decoding, more inside the prompt."""
        return len(self.ids) - self.cache_len

    @property
    def decoding(self) -> bool:
        """True if only the newest token is left to feed."""
        return self.cache_len >= self.prompt_length

    def slots(self, start: int, stop: int, block_size: int) -> torch.Tensor:
        """Slots `[n] int64` of positions start .. stop - 1."""
        positions = torch.arange(start, stop)
        return self.blocks[positions // block_size].long() * block_size + positions % block_size
