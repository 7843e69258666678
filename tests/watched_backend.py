"""Two backends as a stranger's package would bring them, for a shard that runs in a process of its own.

`watched` is the real backend with a window: every step is written down (`steps.jsonl`: ids, positions, slots, what the
cache then holds at them) and a file can make the next steps slow or fail. `scripted` is no model at all: its logits
are a function of the token history it finds *through the slots*, so a token stored in the wrong place, or a prefix
that was never stored, changes what is generated.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from backend_window import Window
from scripted_texts import read_script

from deepseek_tgi.adapters.base import LoadOptions, ModelAdapter, ModelInfo
from deepseek_tgi.adapters.quantized import QuantizedModelAdapter
from deepseek_tgi.core import ForwardInputs
from deepseek_tgi.kv.layout import CacheLayout, KVLayout, KVMode
from deepseek_tgi.text.tokenizer import TextTokenizer


def describe(inputs: ForwardInputs) -> dict[str, Any]:
    """The step as plain lists."""
    return {
        "ids": inputs.input_ids.tolist(),
        "positions": inputs.positions.tolist(),
        "slots": inputs.slots.tolist(),
        "cu_seqlens": inputs.cu_seqlens.tolist(),
        "cache_lens": inputs.cache_lens.tolist(),
    }


def stored_digests(pool: Any, layout: CacheLayout, slots: Sequence[int]) -> list[str]:
    """One digest a slot, over the bytes that the pool holds for it in all layers, scales included."""
    blocks = torch.tensor(slots) // layout.block_size
    offsets = torch.tensor(slots) % layout.block_size
    parts: list[torch.Tensor] = []
    for layer in range(layout.num_layers):
        pages = pool.view(layer)
        names = ("k", "v", "k_scale", "v_scale") if layout.mode.quantised else ("k", "v")
        for name in names:
            rows = getattr(pages, name)[blocks, :, offsets]  # [T, G, width]
            parts.append(rows.contiguous().view(torch.uint8).reshape(len(slots), -1))
    rows = torch.cat(parts, 1).numpy()
    return [hashlib.blake2b(row.tobytes(), digest_size=8).hexdigest() for row in rows]


class WatchedAdapter(ModelAdapter):
    """The backend under test, behind glass."""

    def __init__(self, inner: ModelAdapter) -> None:
        self._inner = inner
        self._window = Window()

    @classmethod
    def get_model(
        cls, model_id: str, revision: str | None = None, options: LoadOptions | None = None
    ) -> WatchedAdapter:
        """Load the real one."""
        return cls(QuantizedModelAdapter.get_model(model_id, revision, options))

    @property
    def info(self) -> ModelInfo:
        return self._inner.info

    @property
    def tokenizer(self) -> TextTokenizer:
        return self._inner.tokenizer

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return self._inner.eos_token_ids

    @property
    def kv_layout(self) -> CacheLayout:
        return self._inner.kv_layout

    def step(self, inputs: ForwardInputs, pool: Any) -> torch.Tensor:
        """Obey, run, write down."""
        self._window.obey()
        logits = self._inner.step(inputs, pool)
        self._window.obey(late=True)
        record = describe(inputs)
        written = [s for s in record["slots"] if s >= 0]
        record["stored"] = dict(zip(map(str, written), stored_digests(pool, self.kv_layout, written), strict=True))
        record["keys"] = first_layer_keys(pool, written[:8])
        self._window.write(record)
        return logits

    def workspace_bytes(self, num_tokens: int, num_logit_rows: int) -> int:
        return self._inner.workspace_bytes(num_tokens, num_logit_rows)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        return self._inner.forward(input_ids, attention_mask)


def first_layer_keys(pool: Any, slots: Sequence[int]) -> list[list[float]]:
    """Keys of layer 0 at `slots`, heads side by side, read back through the pool's own reader."""
    keys, _ = pool.read(0, torch.tensor(slots, dtype=torch.int64))
    return [[round(float(x), 6) for x in row.flatten()] for row in keys]


class ScriptedAdapter(ModelAdapter):
    """Says what `script.json` in the model folder tells it to say.

    `script.json`: `{"say": {prompt: [id, ...]}, "logits": {prompt: [[float, ...], ...]}, "eos": [id, ...]}`. A
    history that starts with a prompt's ids follows its script from there, the last entry repeating; any other
    history gives `logits_of(history)`.
    """

    def __init__(self, folder: Path, block_size: int) -> None:
        self._tokenizer = TextTokenizer.from_folder(folder)
        self._script = read_script(folder)
        self._layout = KVLayout(1, 1, 16, 16, KVMode.FLOAT32, block_size)
        self._stored: dict[int, int] = {}
        self._window = Window()

    @classmethod
    def get_model(
        cls, model_id: str, revision: str | None = None, options: LoadOptions | None = None
    ) -> ScriptedAdapter:
        """`model_id` is a folder with a tokenizer and a script."""
        return cls(Path(model_id), (options or LoadOptions()).block_size)

    @property
    def info(self) -> ModelInfo:
        return ModelInfo("scripted", "scripted", "float32", "cpu", self._script.vocab_size, 512, "none", 0, "scripted")

    @property
    def tokenizer(self) -> TextTokenizer:
        return self._tokenizer

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return self._tokenizer.eos_token_ids

    @property
    def kv_layout(self) -> KVLayout:
        return self._layout

    def step(self, inputs: ForwardInputs, pool: Any) -> torch.Tensor:
        """Store ids by slot; answer each wanted row from the history its block table leads to."""
        self._window.obey()
        record = describe(inputs)
        self._window.write(record)
        for slot, token in zip(record["slots"], record["ids"], strict=True):
            if slot >= 0:
                self._stored[slot] = token
        bounds, tables = record["cu_seqlens"], inputs.block_tables.tolist()
        rows = []
        for row in inputs.logit_rows.tolist():
            b = next(i for i in range(len(bounds) - 1) if bounds[i] <= row < bounds[i + 1])
            size = self._layout.block_size
            places = (tables[b][p // size] * size + p % size for p in range(record["positions"][row] + 1))
            rows.append(self._script.logits([self._stored.get(s, -1) for s in places]))
        return torch.from_numpy(np.stack(rows)) if rows else torch.empty(0, self._script.vocab_size)

    def workspace_bytes(self, num_tokens: int, num_logit_rows: int) -> int:
        return 4 * self._script.vocab_size * num_logit_rows

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        raise NotImplementedError("the shard calls step")
