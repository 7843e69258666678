"""A backend without a model: its next token is a function of the token history it finds in the cache pages.

Each step stores (token id, position) at the slots it is told to write and reads every history back through the block
tables, as attention would. A wrong slot, position, cache length or block therefore changes the text or fails loudly,
whatever the engine believes. Prompts can have fixed continuations; all others get a hash of their history.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import tokenizer_kinds
import torch

from deepseek_tgi.adapters.base import LoadOptions, ModelAdapter, ModelInfo
from deepseek_tgi.core import ForwardInputs
from deepseek_tgi.kv.layout import KVLayout, KVMode
from deepseek_tgi.kv.pool import KVPool
from deepseek_tgi.text.tokenizer import TextTokenizer

FIRST_TEXT_ID = 3
TOP_LOGIT = 12.0
NUM_PATTERNS = 64


@dataclass
class StepRecord:
    """What one step fed: token counts and cache lengths by request, and the slots it wrote."""

    counts: list[int]
    cache_lens: list[int]
    slots: list[int]
    num_logit_rows: int


@dataclass
class Script:
    """What happens: fixed continuations by prompt ids, and hooks that may wait, raise or edit logits."""

    continuations: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    before_step: Callable[[ForwardInputs], None] | None = None
    edit_logits: Callable[[list[int], torch.Tensor], None] | None = None


class ScriptedAdapter(ModelAdapter):
    """See the module. `steps` lists every step that was run; `max_position` is what the model claims to support."""

    def __init__(self, tokenizer: TextTokenizer, block_size: int = 16, max_position: int = 512) -> None:
        self._tokenizer = tokenizer
        self._max_position = max_position
        self._vocab = tokenizer.vocab_size + 5
        self._layout = KVLayout(1, 1, 2, 2, KVMode.FLOAT32, block_size)
        generator = torch.Generator().manual_seed(7)
        self._patterns = torch.randn(NUM_PATTERNS, self._vocab, generator=generator)
        self.script = Script()
        self.takes_unread = False
        """Whether it steps with tokens that are not read back, as recorded steps on a GPU do."""
        self.steps: list[StepRecord] = []

    @classmethod
    def get_model(
        cls, model_id: str, revision: str | None = None, options: LoadOptions | None = None
    ) -> ScriptedAdapter:
        """A folder with a tokenizer; an optional `script.json` maps prompts to continuations (both as text)."""
        folder = Path(model_id)
        adapter = cls(TextTokenizer.from_folder(folder), (options or LoadOptions()).block_size)
        file = folder / "script.json"
        if file.is_file():
            for prompt, output in json.loads(file.read_text()).items():
                adapter.say(prompt, output)
        return adapter

    @classmethod
    def in_folder(cls, folder: Path, block_size: int = 16, max_position: int = 512) -> ScriptedAdapter:
        """With a byte-level tokenizer written to `folder`."""
        tokenizer = TextTokenizer.from_folder(tokenizer_kinds.byte_level(folder))
        return cls(tokenizer, block_size, max_position)

    def have_fewer_ids(self, vocab: int) -> None:
        """Become a model whose embedding has only `vocab` rows."""
        self._vocab, self._patterns = vocab, self._patterns[:, :vocab]

    def say(self, prompt: str, output: str | Sequence[int]) -> None:
        """Answer `prompt` (as tokenised whole) with `output`, then end-of-sequence for ever."""
        ids = self._tokenizer.encode(output, add_special_tokens=False) if isinstance(output, str) else list(output)
        self.script.continuations[tuple(self._tokenizer.encode(prompt))] = ids

    @property
    def info(self) -> ModelInfo:
        return ModelInfo(
            "scripted", "scripted", "float32", "cpu", self._vocab, self._max_position, "none", 0, "scripted"
        )

    @property
    def tokenizer(self) -> TextTokenizer:
        return self._tokenizer

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return self._tokenizer.eos_token_ids

    @property
    def kv_layout(self) -> KVLayout:
        return self._layout

    def workspace_bytes(self, num_tokens: int, num_logit_rows: int) -> int:
        return 64 * num_tokens + 4 * num_logit_rows * self._vocab

    def step_with(self, inputs: ForwardInputs, token_ids: torch.Tensor, pool: KVPool) -> torch.Tensor | None:
        return self.step(replace(inputs, input_ids=token_ids.long()), pool) if self.takes_unread else None

    def step(self, inputs: ForwardInputs, pool: KVPool) -> torch.Tensor:
        if self.script.before_step is not None:
            self.script.before_step(inputs)
        self._check(inputs)
        offsets = inputs.cu_seqlens.tolist()
        cache_lens = inputs.cache_lens.tolist()
        counts = [b - a for a, b in itertools.pairwise(offsets)]
        self.steps.append(StepRecord(counts, cache_lens, inputs.slots.tolist(), len(inputs.logit_rows)))
        self._write(inputs, pool)
        rows = []
        for row in inputs.logit_rows.tolist():
            request = next(b for b, stop in enumerate(offsets[1:]) if row < stop)
            context = cache_lens[request] + row - offsets[request] + 1
            history = self._history(inputs.block_tables[request], context, pool)
            rows.append(self.logits_after(history))
        return torch.stack(rows) if rows else torch.empty(0, self._vocab)

    def logits_after(self, history: list[int]) -> torch.Tensor:
        """Raw logits `[V]` of the token that follows `history`: the script's, else a hash of all of it."""
        key = 17
        for token_id in history:
            key = (key * 1_000_003 + token_id) % (2**61 - 1)
        logits = self._patterns[key % NUM_PATTERNS] + 0.5 * self._patterns[(key // NUM_PATTERNS) % NUM_PATTERNS]
        scripted = self._scripted(history)
        text_ids = self._tokenizer.vocab_size - FIRST_TEXT_ID
        logits[FIRST_TEXT_ID + key % text_ids if scripted is None else scripted] += TOP_LOGIT
        if self.script.edit_logits is not None:
            self.script.edit_logits(history, logits)
        return logits

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        out = torch.zeros(*input_ids.shape, self._vocab)
        for b, row in enumerate(input_ids.tolist()):
            mask = [1] * len(row) if attention_mask is None else attention_mask[b].tolist()
            history = []
            for s, token_id in enumerate(row):
                if mask[s]:
                    history.append(token_id)
                    out[b, s] = self.logits_after(history)
        return out

    def greedy(self, prompt: str, count: int) -> list[int]:
        """The first `count` greedy ids after `prompt`, by the definition and not by the engine."""
        history = self._tokenizer.encode(prompt)
        for _ in range(count):
            history.append(int(self.logits_after(history).argmax()))
        return history[-count:]

    def _scripted(self, history: list[int]) -> int | None:
        for prompt, output in self.script.continuations.items():
            if tuple(history[: len(prompt)]) == prompt:
                at = len(history) - len(prompt)
                return output[at] if at < len(output) else min(self.eos_token_ids)
        return None

    def _check(self, inputs: ForwardInputs) -> None:
        """The rules of `ForwardInputs`, as a strict kernel would check them."""
        total, size = len(inputs.input_ids), len(inputs.cache_lens)
        assert inputs.input_ids.dtype == inputs.slots.dtype == inputs.logit_rows.dtype == torch.int64
        assert inputs.positions.dtype == inputs.cu_seqlens.dtype == torch.int32
        assert inputs.block_tables.dtype == inputs.cache_lens.dtype == torch.int32
        assert len(inputs.positions) == len(inputs.slots) == total
        assert len(inputs.block_tables) == size == len(inputs.cu_seqlens) - 1
        offsets, cached = inputs.cu_seqlens.tolist(), inputs.cache_lens.tolist()
        assert offsets[0] == 0
        assert offsets[-1] == total
        counts = [b - a for a, b in itertools.pairwise(offsets)]
        assert min(counts) >= 1
        assert inputs.max_seqlen == max(counts)
        assert inputs.max_context == max(c + n for c, n in zip(cached, counts, strict=True))
        positions = [c + i for c, n in zip(cached, counts, strict=True) for i in range(n)]
        assert inputs.positions.tolist() == positions
        assert sorted(set(inputs.logit_rows.tolist())) == inputs.logit_rows.tolist()
        block = self._layout.block_size
        tables = inputs.block_tables.tolist()
        owners = [b for b, n in enumerate(counts) for _ in range(n)]
        expected = [tables[b][p // block] * block + p % block for b, p in zip(owners, positions, strict=True)]
        slots = inputs.slots.tolist()
        assert slots == [-1 if slot == -1 else place for slot, place in zip(slots, expected, strict=True)]
        assert 0 <= int(inputs.input_ids.min()) <= int(inputs.input_ids.max()) < self._vocab

    def _write(self, inputs: ForwardInputs, pool: KVPool) -> None:
        pages, block = pool.view(0), self._layout.block_size
        entry = torch.stack([inputs.input_ids.float(), inputs.positions.float()], dim=1)
        written = inputs.slots >= 0
        slots, entry = inputs.slots[written], entry[written]
        pages.k[slots // block, 0, slots % block] = entry
        pages.v[slots // block, 0, slots % block] = -entry

    def _history(self, table: torch.Tensor, context: int, pool: KVPool) -> list[int]:
        block = self._layout.block_size
        positions = torch.arange(context)
        slots = table[positions // block].long() * block + positions % block
        stored, negative = pool.read(0, slots)
        assert torch.equal(stored, -negative)
        assert stored[:, 0, 1].long().tolist() == positions.tolist(), "a slot holds a token of another position"
        ids: list[int] = stored[:, 0, 0].long().tolist()
        return ids
