"""A complete backend in plain torch that keeps every rule of the ABI, to be broken one rule at a time.

Two layers of single-query attention over rotated positions; weights come from a seed, not from the checkpoint, whose
tokenizer and EOS ids are real. Slow and small on purpose: each method is a place where a rule can be broken.
"""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path

import torch

from deepseek_tgi.adapters.base import LoadOptions, ModelAdapter, ModelInfo
from deepseek_tgi.core import ForwardInputs
from deepseek_tgi.errors import CheckpointError, ConfigError
from deepseek_tgi.kv.layout import KVLayout, KVMode
from deepseek_tgi.kv.pool import KVPool
from deepseek_tgi.text.tokenizer import TextTokenizer

LAYERS, HEADS, DIM = 2, 2, 8
WIDTH = HEADS * DIM
HEAD_RELATIONS = ((300, 301, -1.0), (302, 303, 2.0))
"""What the checkpoint builder promises about its head, restated: this backend draws a head of its own."""


class ToyBackend(ModelAdapter):
    """Keeps the rules. Supports float caches only, and says so for the others."""

    def __init__(self, folder: Path, options: LoadOptions) -> None:
        config = json.loads((folder / "config.json").read_text())
        self.folder, self.vocab = folder, int(config["vocab_size"])
        self.mode = KVMode.FLOAT32 if options.kv_cache_dtype == "auto" else KVMode(options.kv_cache_dtype)
        self.block_size = options.block_size
        self.texts = TextTokenizer.from_folder(folder)
        generator = torch.Generator().manual_seed(5)
        self.table = torch.randn(self.vocab, WIDTH, generator=generator)
        self.layers = torch.randn(LAYERS, 4, WIDTH, WIDTH, generator=generator) * (1.5 / math.sqrt(WIDTH))
        self.head = torch.randn(self.vocab, WIDTH, generator=generator)
        for row, source, factor in HEAD_RELATIONS:
            self.head[row] = self.head[source] * factor

    @classmethod
    def get_model(cls, model_id: str, revision: str | None = None, options: LoadOptions | None = None) -> ToyBackend:
        options = options or LoadOptions()
        if not Path(model_id, "config.json").is_file():
            raise CheckpointError(f"{model_id}: no config.json")
        if options.dtype not in ("auto", "float32") or options.kv_cache_dtype == "int8":
            raise ConfigError(f"toy: dtype {options.dtype} with cache {options.kv_cache_dtype} is not supported")
        return cls(Path(model_id), options)

    @property
    def info(self) -> ModelInfo:
        return ModelInfo(str(self.folder), "toy", "float32", "cpu", self.vocab, 512, "none", 4096, "plain")

    @property
    def tokenizer(self) -> TextTokenizer:
        return self.texts

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return self.texts.eos_token_ids

    @property
    def kv_layout(self) -> KVLayout:
        return KVLayout(LAYERS, HEADS, DIM, DIM, self.mode, self.block_size)

    def workspace_bytes(self, num_tokens: int, num_logit_rows: int) -> int:
        return 4 * (num_tokens * WIDTH * 8 + num_logit_rows * self.vocab)

    def rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Turn pairs of `x [T, heads, dim]` by their position, so that order matters."""
        half = DIM // 2
        angle = positions.float()[:, None, None] * (100.0 ** (-torch.arange(half) / half))
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)

    def store(self, pool: KVPool, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write `k`, `v [T, heads, dim]` at their slots; a slot of -1 is stored already."""
        pages = pool.view(layer)
        k, v, slots = k[slots >= 0], v[slots >= 0], slots[slots >= 0]
        block, offset = slots // pool.layout.block_size, slots % pool.layout.block_size
        pages.k[block, :, offset] = k.to(pages.k.dtype)
        pages.v[block, :, offset] = v.to(pages.v.dtype)

    def context_slots(self, inputs: ForwardInputs, request: int, length: int) -> torch.Tensor:
        """Slots of positions 0 to `length - 1` of one request."""
        at = torch.arange(length)
        return inputs.block_tables[request].long()[at // self.block_size] * self.block_size + at % self.block_size

    def hidden(self, inputs: ForwardInputs, pool: KVPool) -> torch.Tensor:
        """Final hidden states `[T, WIDTH]`."""
        x = self.table[inputs.input_ids]
        for layer, (wq, wk, wv, wo) in enumerate(self.layers):
            q, k, v = ((x @ w).view(-1, HEADS, DIM) for w in (wq, wk, wv))
            q, k = self.rotate(q, inputs.positions), self.rotate(k, inputs.positions)
            self.store(pool, layer, inputs.slots, k, v)
            x = x + self.attend(inputs, pool, layer, q).reshape(-1, WIDTH) @ wo
        return x

    def attend(self, inputs: ForwardInputs, pool: KVPool, layer: int, q: torch.Tensor) -> torch.Tensor:
        """Each token over its own context, one at a time."""
        out = torch.zeros_like(q)
        bounds = inputs.cu_seqlens.tolist()
        for request, (first, stop) in enumerate(pairwise(bounds)):
            for row in range(first, stop):
                length = int(inputs.cache_lens[request]) + row - first + 1
                keys, values = pool.read(layer, self.context_slots(inputs, request, length))
                scores = torch.einsum("hd,nhd->hn", q[row], keys) / math.sqrt(DIM)
                out[row] = torch.einsum("hn,nhd->hd", scores.softmax(-1), values)
        return out

    def step(self, inputs: ForwardInputs, pool: KVPool) -> torch.Tensor:
        return self.hidden(inputs, pool)[inputs.logit_rows] @ self.head.T

    def lengths(self, mask: torch.Tensor) -> list[list[int]]:
        """Columns of each row that hold tokens."""
        return [row.nonzero().flatten().tolist() for row in mask]

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        out = torch.zeros(*input_ids.shape, self.vocab)
        for row, columns in enumerate(self.lengths(mask)):
            out[row, columns] = self.alone(input_ids[row, columns], torch.arange(len(columns)))
        return out

    def alone(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Logits of one row with a pool of its own."""
        count = len(ids)
        blocks = torch.arange(1, 2 + count // self.block_size, dtype=torch.int32)
        places = torch.arange(count)
        inputs = ForwardInputs(
            input_ids=ids,
            positions=positions.int(),
            slots=blocks.long()[places // self.block_size] * self.block_size + places % self.block_size,
            cu_seqlens=torch.tensor([0, count], dtype=torch.int32),
            block_tables=blocks[None],
            cache_lens=torch.zeros(1, dtype=torch.int32),
            logit_rows=places,
            max_seqlen=count,
            max_context=count,
        )
        pool = KVPool(self.kv_layout, len(blocks) + 1)
        try:
            return ToyBackend.step(self, inputs, pool)
        finally:
            pool.close()
