"""The boundary between the engine and a model: what a backend must offer.

A backend is a `ModelAdapter` subclass, registered under a name (`deepseek_tgi.registry`). The engine knows no more
about models; an adapter knows nothing of batches, sampling or gRPC. `deepseek-tgi check-backend NAME` runs
the rules below.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

if TYPE_CHECKING:
    import torch

    from deepseek_tgi.core import ForwardInputs
    from deepseek_tgi.kv.layout import CacheLayout
    from deepseek_tgi.kv.pool import KVPool
    from deepseek_tgi.text.tokenizer import TextTokenizer

ABI_VERSION = 1


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How to load; every field has the value that works on a plain machine.

    `dtype` and `kv_cache_dtype` take `auto` or a name; `device` takes `auto` (a GPU where torch has one), `cpu`, `cuda`
    or `cuda:N`; `kernels` takes `auto`, `native` (CPU), `cuda`, `triton` (GPU), `torch` or `reference`; `cuda_graphs`
    are the batch sizes whose decode step is captured (None: the usual ones, empty: none, of short prompts neither);
    `mla_prefill` is how latent attention reads a prompt (`kernels.latent_attention`): `absorbed` (the same bits however
    the prompt is cut into chunks), `expanded`, or `auto`; `num_threads` 0 means "this rank's share of what the process
    may use". Ranks meet at `master_addr:master_port`. `rope_scaling`/`rope_factor` are TGI's overrides. `report` is
    told how many percent are loaded; what it raises ends the load.
    """

    dtype: str = "auto"
    quantize: str | None = None
    kv_cache_dtype: str = "auto"
    block_size: int = 16
    device: str = "auto"
    kernels: str = "auto"
    cuda_graphs: tuple[int, ...] | None = None
    mla_prefill: str = "auto"
    num_threads: int = 0
    rank: int = 0
    world_size: int = 1
    master_addr: str = "localhost"
    master_port: int = 29500
    trust_remote_code: bool = False
    rope_scaling: str | None = None
    rope_factor: float | None = None
    progress: bool = False
    report: Callable[[float], None] | None = None


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Facts about a loaded model that the engine, Info and `/info` report."""

    model_id: str
    model_type: str
    dtype: str
    device_type: str
    vocab_size: int
    max_position_embeddings: int
    quantization: str
    weight_bytes: int
    attention_impl: str
    device_index: int = 0

    @property
    def device(self) -> str:
        """Where the model computes, as torch names it: `cpu` or `cuda:0`."""
        return self.device_type if self.device_type == "cpu" else f"{self.device_type}:{self.device_index}"


class Ranks(Protocol):
    """What the ranks of one model agree on besides the model's own sums. Every rank makes the same calls in turn."""

    def smallest(self, number: int) -> int:
        """The smallest `number` of any rank."""

    def first_says(self, number: int) -> int:
        """The `number` of rank 0."""

    def check(self) -> None:
        """Raise if a rank is lost; asked when the results of a step are there, which may have been taken without it."""

    def together(self) -> AbstractContextManager[None]:
        """Around work that all ranks do: an error of this one is made fatal, and told to the others."""


class ModelAdapter(ABC):
    """One loaded model.

    Rules: a step's inputs lie in host memory, its logits wherever the model computes; they are raw (no softmax, no
    penalties, no temperature), float32, finite where the model is; nothing but
    the pages named by `slots` is written; the result of a row does not depend on its neighbours beyond a stated
    tolerance.
    """

    abi_version: ClassVar[int] = ABI_VERSION

    @classmethod
    @abstractmethod
    def get_model(cls, model_id: str, revision: str | None = None, options: LoadOptions | None = None) -> ModelAdapter:
        """Load `model_id` (a folder, or a hub id already downloaded). Raises `CheckpointError` or `ConfigError`."""

    @classmethod
    def needed_bytes(cls, model_id: str, revision: str | None = None, options: LoadOptions | None = None) -> int | None:
        """Memory the weights will take here, told before they are read; None if that cannot be known."""
        return None

    @property
    @abstractmethod
    def info(self) -> ModelInfo:
        """Facts, constant over the adapter's life."""

    @property
    @abstractmethod
    def tokenizer(self) -> TextTokenizer:
        """The checkpoint's own tokenizer."""

    @property
    @abstractmethod
    def eos_token_ids(self) -> frozenset[int]:
        """Ids that end a generation: the checkpoint's own, never a constant."""

    @property
    @abstractmethod
    def kv_layout(self) -> CacheLayout:
        """How this rank's cache lies in memory."""

    @abstractmethod
    def step(self, inputs: ForwardInputs, pool: KVPool) -> torch.Tensor:
        """Write the K/V of `inputs` to `pool` and return raw logits `[R, V] float32` of `inputs.logit_rows`."""

    def step_with(self, inputs: ForwardInputs, token_ids: torch.Tensor, pool: KVPool) -> torch.Tensor | None:
        """As `step` for requests that each feed one token, which is `token_ids [B]` and not known on the host yet.

        `token_ids` are whole numbers in dense float32 or float64 where the logits are; `inputs.input_ids` has their
        shape and is not looked at. None if the host must know them; nothing has happened then.
        """
        return None

    def best_of(self, logits: torch.Tensor) -> torch.Tensor | None:
        """The likeliest token of each row `[3, R] float32`, as `kernels.best_token` gives them, if the step found them.

        `logits` are what the last step returned, unchanged; of others, and where nothing is found ahead, None.
        """
        return None

    @abstractmethod
    def workspace_bytes(self, num_tokens: int, num_logit_rows: int) -> int:
        """Upper bound of temporary memory of a step with so many tokens and logit rows."""

    def open_pool(self, pool: KVPool, max_requests: int, max_tokens: int) -> None:  # noqa: B027 - most need nothing
        """Make ready to decode over `pool`, up to `max_requests` together, each of up to `max_tokens` in all.

        Called once the cache is made and no step runs; a pool opened before is closed first.
        """

    def go_on_preparing(self) -> bool:
        """Do a small part of what may wait until nothing else is to be done; False if nothing is left.

        Logits of earlier steps are lost.
        """
        return False

    def close_pool(self) -> None:  # noqa: B027 - most need nothing
        """Forget the pool of `open_pool`: its memory is about to go."""

    def pool_overhead_bytes(self, max_requests: int, max_tokens: int) -> int:
        """Upper bound of what `open_pool` and `go_on_preparing` take beside weights, cache and a step's workspace."""
        return 0

    def park_weights(self, told: Callable[[], None]) -> int:
        """Move the weights from their device to the host's memory, and forget what steps make again; bytes of weights.

        No step is taken until `restore_weights`, and no pool is open. On a CPU weights stay where they are. `told`
        hears of progress. Raises `ResourceError` if the host has no room; then nothing has changed.
        """
        return 0

    def restore_weights(self, told: Callable[[], None]) -> None:  # noqa: B027 - most have moved nothing
        """Undo `park_weights`, bit for bit. Raises `ResourceError` if the device has no room; it may be tried again."""

    @property
    def ranks(self) -> Ranks | None:
        """How this rank agrees with the others; None for a model in one process. All ranks return the same logits."""
        return None

    @property
    def pad_token_id(self) -> int:
        """Id used to fill up rectangular batches: the tokenizer's, else the smallest EOS id, else 0.

        Padding never reaches the model's arithmetic, so any valid id will do.
        """
        pad = self.tokenizer.pad_token_id
        if pad is not None:
            return pad
        return min(self.eos_token_ids, default=0)

    def collate(self, sequences: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Right-pad id lists to `input_ids [B, S] int64` and `attention_mask [B, S]`. Works with no pad token."""
        import torch

        width = max((len(s) for s in sequences), default=0)
        ids = torch.full((len(sequences), width), self.pad_token_id, dtype=torch.int64)
        mask = torch.zeros((len(sequences), width), dtype=torch.int64)
        for row, sequence in enumerate(sequences):
            ids[row, : len(sequence)] = torch.tensor(list(sequence), dtype=torch.int64)
            mask[row, : len(sequence)] = 1
        return ids, mask

    @abstractmethod
    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        """Raw logits `[B, S, V] float32` of a rectangular batch, with a cache of its own that is dropped afterwards.

        `attention_mask [B, S]` is 1 for tokens and 0 for padding, on either side; None means no padding. Positions
        count tokens, not columns, so a row gives the same logits wherever its padding stands. Padded places are 0.
        """

    def close(self) -> None:  # noqa: B027 - most adapters hold nothing that needs it
        """Free what the process would not free by itself."""
