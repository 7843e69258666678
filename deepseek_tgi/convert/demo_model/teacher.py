"""The small real model as a writer: many prompts answered at once on one GPU.

Sequences run in slots. Every step feeds each slot one token, the next of its prompt or the one just drawn, and a slot
whose text ends takes the next prompt, all on the device: a step is one CUDA graph and the host only counts. Choice:
prompts are fed a token at a time. Rejected: a separate prefill, which would save the sixth of the time that prompts
take and cost a second path.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import triton

from deepseek_tgi.convert.demo_model import teacher_kernels as kernels
from deepseek_tgi.convert.gguf_file import GgufFile

LOG_FLOOR = -2.4
"""Ids under a tenth or so of the likeliest one's probability are never drawn: they are where a small model derails."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a llama model."""

    layers: int
    width: int
    heads: int
    groups: int
    head_width: int
    inner: int
    theta: float
    eps: float


@dataclass(frozen=True, slots=True)
class Block:
    """One layer's weights; matrices `[N, K]` in the compute dtype, norms in float32."""

    norm: torch.Tensor
    qkv: torch.Tensor
    out: torch.Tensor
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


@dataclass(frozen=True, slots=True)
class Weights:
    """A llama model on a device. `head` holds only the rows of the ids in `allowed`."""

    shape: Shape
    embedding: torch.Tensor
    blocks: tuple[Block, ...]
    norm: torch.Tensor
    head: torch.Tensor
    allowed: torch.Tensor


@dataclass(frozen=True, slots=True)
class Prompts:
    """`ids [N, P] int32` padded with anything, `lengths [N] int32`, `temperatures [N] float32`.

    `limits [N] int32` is the most tokens that a prompt and its answer may take.
    """

    ids: torch.Tensor
    lengths: torch.Tensor
    limits: torch.Tensor
    temperatures: torch.Tensor


def read_weights(path: Path, allowed: torch.Tensor, device: str, dtype: torch.dtype = torch.bfloat16) -> Weights:
    """The llama model of a GGUF file; only ids in `allowed [A] int64` will be drawn."""
    file = GgufFile(path)
    meta = file.metadata

    def number(key: str) -> int:
        return int(float(str(meta[f"llama.{key}"])))

    def load(name: str, kind: torch.dtype = dtype) -> torch.Tensor:
        return file.tensor(name, torch.float32).to(device=device, dtype=kind)

    def unpaired(name: str, count: int) -> torch.Tensor:
        # The file keeps the two halves of a rotated head as neighbours.
        values = load(name)
        return values.view(count, -1, 2, values.shape[1]).transpose(1, 2).reshape(values.shape)

    heads, groups, width = (number(k) for k in ("attention.head_count", "attention.head_count_kv", "embedding_length"))
    shape = Shape(
        layers=number("block_count"),
        width=width,
        heads=heads,
        groups=groups,
        head_width=width // heads,
        inner=number("feed_forward_length"),
        theta=float(str(meta["llama.rope.freq_base"])),
        eps=float(str(meta["llama.attention.layer_norm_rms_epsilon"])),
    )
    blocks = []
    for index in range(shape.layers):
        at = f"blk.{index}."
        q, k = unpaired(f"{at}attn_q.weight", heads), unpaired(f"{at}attn_k.weight", groups)
        blocks.append(
            Block(
                norm=load(f"{at}attn_norm.weight", torch.float32),
                qkv=torch.cat((q, k, load(f"{at}attn_v.weight"))),
                out=load(f"{at}attn_output.weight"),
                mlp_norm=load(f"{at}ffn_norm.weight", torch.float32),
                gate_up=torch.cat((load(f"{at}ffn_gate.weight"), load(f"{at}ffn_up.weight"))),
                down=load(f"{at}ffn_down.weight"),
            )
        )
    embedding = load("token_embd.weight")
    allowed = allowed.to(device)
    norm = load("output_norm.weight", torch.float32)
    return Weights(shape, embedding, tuple(blocks), norm, embedding[allowed].contiguous(), allowed)


class Writer:
    """Owns the slots and what they have written: `texts [N, limit] int32`, `ends [N] int32` (0: not finished)."""

    def __init__(self, weights: Weights, prompts: Prompts, num_slots: int, limit: int, end_id: int) -> None:
        self.weights, self.prompts, self.limit, self.end_id = weights, prompts, limit, end_id
        shape, device = weights.shape, weights.embedding.device
        count = prompts.ids.shape[0]
        assert count >= num_slots
        assert prompts.ids.shape[1] <= limit
        cache = (shape.layers, num_slots, shape.groups, limit, shape.head_width)
        self._keys = torch.zeros(cache, dtype=weights.embedding.dtype, device=device)
        self._values = torch.zeros_like(self._keys)
        self._cos_sin = _rope_table(shape, limit).to(device)
        self._slot_prompt = torch.arange(num_slots, device=device)
        self._position = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self._token = prompts.ids[:num_slots, 0].to(torch.int64)
        self._chosen = torch.zeros(num_slots, dtype=torch.int32, device=device)
        # Place of every id among those allowed, -1 for the others.
        self._index = torch.full((weights.embedding.shape[0],), -1, dtype=torch.int32, device=device)
        self._index[weights.allowed] = torch.arange(weights.allowed.shape[0], dtype=torch.int32, device=device)
        self._step = torch.zeros(1, dtype=torch.int64, device=device)
        self.next_prompt = torch.tensor([num_slots], device=device)
        # The last row is where slots write when the prompts have run out.
        self.texts = torch.zeros((count + 1, limit), dtype=torch.int32, device=device)
        self.texts[:count, 0] = prompts.ids[:, 0]
        self.ends = torch.zeros(count + 1, dtype=torch.int32, device=device)

    def run(self, seconds: float, on_pause: Callable[[int, float], None], steps_a_pause: int = 200) -> None:
        """Write until time or prompts are up; `on_pause(prompts taken, seconds spent)` is called now and then."""
        replay = self._graph() if self.weights.embedding.is_cuda else self._advance
        begin = time.monotonic()
        while (spent := time.monotonic() - begin) < seconds:
            for _ in range(steps_a_pause):
                replay()
            taken = int(self.next_prompt.item())
            on_pause(taken, spent)
            if taken >= self.prompts.ids.shape[0] + self._token.shape[0]:
                return

    def _graph(self) -> Callable[[], None]:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._advance()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._advance()
        return graph.replay

    def _advance(self) -> None:
        """One token for every slot."""
        count = self.prompts.ids.shape[0]
        logits = self._logits()
        temperatures = self.prompts.temperatures[self._slot_prompt.clamp(max=count - 1)]
        slots, size = logits.shape
        kernels.discourage_repeats[(slots,)](
            *(logits, size, self._index, self.texts, self._slot_prompt, self._position, self.prompts.lengths, count),
            *(self.limit, triton.next_power_of_2(self.limit)),
        )
        kernels.sample[(slots,)](logits, temperatures, self._step, self._chosen, size, LOG_FLOOR, block=2048)
        self._step.add_(1)
        drawn = self.weights.allowed[self._chosen.to(torch.int64)]
        row = self._slot_prompt.clamp(max=count - 1)
        after = self._position + 1
        length = self.prompts.lengths[row].to(torch.int64)
        fed = self.prompts.ids[row, after.clamp(max=self.prompts.ids.shape[1] - 1)].to(torch.int64)
        token = torch.where(after < length, fed, drawn)
        at_end = (after >= length) & (token == self.end_id)
        finished = at_end | (after >= self.prompts.limits[row] - 1)
        self.texts[self._slot_prompt, after] = token.to(torch.int32)
        # A text cut at the limit counts as ending there.
        ends = torch.where(finished, torch.where(at_end, after, after + 1), 0).to(torch.int32)
        self.ends[self._slot_prompt] = torch.maximum(self.ends[self._slot_prompt], ends)
        rank = torch.cumsum(finished.to(torch.int64), 0)
        taken = (self.next_prompt + rank - 1).clamp(max=count)
        self._slot_prompt.copy_(torch.where(finished, taken, self._slot_prompt))
        self.next_prompt.add_(rank[-1:])
        first = self.prompts.ids[self._slot_prompt.clamp(max=count - 1), 0].to(torch.int64)
        self._token.copy_(torch.where(finished, first, token))
        self._position.copy_(torch.where(finished, 0, after))

    def _logits(self) -> torch.Tensor:
        """`[slots, allowed]` for the tokens at hand, whose keys and values enter the cache."""
        shape = self.weights.shape
        slots, half, shared = self._token.shape[0], shape.head_width // 2, shape.heads // shape.groups
        dtype = self.weights.embedding.dtype
        stream = self.weights.embedding[self._token].to(torch.float32)
        delta = torch.zeros_like(stream, dtype=dtype)
        normed, mixed = torch.empty_like(delta), delta.new_empty(slots, shape.heads * shape.head_width)
        active = delta.new_empty(slots, shape.inner)
        norm_block = triton.next_power_of_2(shape.width)
        for index, block in enumerate(self.weights.blocks):
            kernels.add_norm[(slots,)](stream, delta, block.norm, normed, shape.width, shape.eps, block=norm_block)
            qkv = normed @ block.qkv.T
            keys, values = self._keys[index], self._values[index]
            kernels.rotate_and_store[(slots, shape.heads + 2 * shape.groups)](
                qkv, keys, values, self._position, self._cos_sin, self.limit, shape.heads, shape.groups, half
            )
            kernels.attend[(slots, shape.groups)](
                *(qkv, keys, values, self._position, mixed, self.limit, shape.head_width**-0.5),
                *(shape.heads, shape.groups, shape.head_width, max(16, triton.next_power_of_2(shared)), 64),
            )
            attended = mixed @ block.out.T
            kernels.add_norm[(slots,)](
                stream, attended, block.mlp_norm, normed, shape.width, shape.eps, block=norm_block
            )
            gate_up = normed @ block.gate_up.T
            kernels.silu_product[(slots, triton.cdiv(shape.inner, 512))](gate_up, active, shape.inner, block=512)
            delta = active @ block.down.T
        kernels.add_norm[(slots,)](stream, delta, self.weights.norm, normed, shape.width, shape.eps, block=norm_block)
        return normed @ self.weights.head.T


def _rope_table(shape: Shape, limit: int) -> torch.Tensor:
    """`[limit, head_width] float32`: cosines, then sines."""
    powers = torch.arange(0, shape.head_width, 2, dtype=torch.float64) / shape.head_width
    angles = torch.arange(limit, dtype=torch.float64).unsqueeze(1) / shape.theta**powers
    return torch.cat((angles.cos(), angles.sin()), dim=1).to(torch.float32)
