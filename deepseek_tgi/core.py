"""The nouns that travel between the layers: immutable values, no torch at import.

A request comes in over gRPC as pb, becomes a `Request` in `server.convert`, is run by `engine` through
`ForwardInputs`, and leaves as `Generation`s. Nothing here knows protobuf, HTTP or tensors' contents.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

HEALTH_REQUEST_ID = 2**64 - 1
"""Request and batch id of the router's liveness Prefill (TGI contract: block 0, slot 0)."""


class GrammarType(Enum):
    """Kind of constraint a request carries; values are the wire's."""

    NONE = 0
    JSON = 1
    REGEX = 2


class FinishReason(Enum):
    """Why a request ended; values are the wire's."""

    LENGTH = 0
    EOS_TOKEN = 1
    STOP_SEQUENCE = 2


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen. Neutral values switch a step off (TGI's own neutrals)."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    typical_p: float = 1.0
    do_sample: bool = False
    seed: int = 0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    watermark: bool = False
    grammar: str = ""
    grammar_type: GrammarType = GrammarType.NONE

    @property
    def samples(self) -> bool:
        """True if the token is drawn, false if it is the arg-max; also decides whether `seed` is reported."""
        return self.do_sample or self.temperature != 1.0 or self.top_k != 0 or self.top_p < 1.0 or self.typical_p < 1.0


@dataclass(frozen=True, slots=True)
class StopRule:
    """When a request ends."""

    max_new_tokens: int
    stop_sequences: tuple[str, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class Request:
    """One request as the router sends it: text still a string, blocks and slots already chosen.

    `slots[p]` is where token position `p` (prompt and generated alike) is stored; `cache_len` prompt tokens are
    *claimed* to be stored already; `chunk_len` is set only on the one request a Prefill cuts.
    """

    id: int
    text: str
    truncate: int
    sampling: SamplingParams
    stop: StopRule
    add_special_tokens: bool = True
    prefill_logprobs: bool = False
    top_n_tokens: int = 0
    blocks: tuple[int, ...] = ()
    slots: tuple[int, ...] = ()
    cache_len: int = 0
    chunk_len: int | None = None
    adapter_id: str | None = None


@dataclass(frozen=True, slots=True)
class Tokens:
    """Parallel lists of equal length, one entry a token."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    is_special: list[bool] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class GeneratedText:
    """Set once, on the generation that ends a request. `seed` only if tokens were drawn."""

    text: str
    generated_tokens: int
    finish_reason: FinishReason
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class Generation:
    """What one step yields for one request."""

    request_id: int
    tokens: Tokens
    prefill_tokens: Tokens | None = None
    top_tokens: list[Tokens] | None = None
    generated_text: GeneratedText | None = None


@dataclass(frozen=True, slots=True)
class CachedBatch:
    """The shard's state for a set of requests, as the router names it."""

    id: int
    request_ids: tuple[int, ...]
    max_tokens: int
    current_tokens: int

    @property
    def size(self) -> int:
        """Number of requests held."""
        return len(self.request_ids)


@dataclass(frozen=True, slots=True)
class StepTimings:
    """Nanoseconds of one call, as the router's histograms want them."""

    forward_ns: int
    decode_ns: int
    total_ns: int
    concat_ns: int | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """Answer of Prefill or Decode: `batch` is absent when no request is left to run."""

    generations: list[Generation]
    batch: CachedBatch | None
    timings: StepTimings


@dataclass(frozen=True, slots=True)
class ForwardInputs:
    """One step for a ragged batch of B requests with T tokens in all; prefill, chunks and decode alike.

    Shapes: `input_ids [T] int64`, `positions [T] int32`, `slots [T] int64` (where each token's K/V is written; -1 for a
    token whose K/V is stored already and may be read by others: it must not be written), `cu_seqlens [B+1] int32`
    (token offsets of each request), `block_tables [B, P] int32`, `cache_lens [B] int32` (tokens stored before this
    step; the context of request b after the write is `cache_lens[b]` + its tokens), `logit_rows [R] int64` (rows of T
    whose logits are wanted, ascending).
    All in host memory when a model is handed them, all on its device when its kernels are. `max_seqlen` is the largest
    token count of one request in this step, `max_context` the largest context after the write: plain ints, so that no
    kernel asks the device for them. `host_lengths` are `cu_seqlens` and `cache_lens` as lists, where the tensors lie on
    a device and somebody knows them; nobody does in a step that is recorded.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    cu_seqlens: torch.Tensor
    block_tables: torch.Tensor
    cache_lens: torch.Tensor
    logit_rows: torch.Tensor
    max_seqlen: int
    max_context: int
    host_lengths: tuple[Sequence[int], Sequence[int]] | None = None
