"""Filled pages, steps over them and what attention should make of both: the formula in float64, frames included."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from oracles import kernels as oracle

from deepseek_tgi.core import ForwardInputs
from deepseek_tgi.kernels.frame import Frame, PlacedFrame
from deepseek_tgi.kernels.select import KernelSet
from deepseek_tgi.kv.layout import KVLayout, KVMode, head_fits_int4
from deepseek_tgi.kv.pool import KVPool

Geometry = tuple[int, int, int, int, int]
Batch = tuple[list[int], list[int]]


@dataclass(frozen=True, slots=True)
class Case:
    """A filled pool, the step's inputs and queries."""

    pool: KVPool
    inputs: ForwardInputs
    q: torch.Tensor
    scale: float
    placed: PlacedFrame | None = None


def step(tokens: list[int], cached: list[int], tables: torch.Tensor, block_size: int) -> ForwardInputs:
    """Inputs of a step whose tokens follow what is cached."""
    starts = np.concatenate(([0], np.cumsum(tokens)))
    positions = [c + i for n, c in zip(tokens, cached, strict=True) for i in range(n)]
    owners = [b for b, n in enumerate(tokens) for _ in range(n)]
    slots = [
        int(tables[b, p // block_size]) * block_size + p % block_size for b, p in zip(owners, positions, strict=True)
    ]
    return ForwardInputs(
        torch.zeros(len(slots), dtype=torch.int64),
        torch.tensor(positions, dtype=torch.int32),
        torch.tensor(slots, dtype=torch.int64),
        torch.tensor(starts, dtype=torch.int32),
        tables,
        torch.tensor(cached, dtype=torch.int32),
        torch.zeros(1, dtype=torch.int64),
        max(tokens),
        max(n + c for n, c in zip(tokens, cached, strict=True)),
    )


def make_frame(kv_heads: int, k_dim: int, num_positions: int, g: torch.Generator, stretch: float = 1.0) -> PlacedFrame:
    """A frame with a centre on some pairs, of which the last elements do not rotate."""
    rotary = k_dim // 4 * 4 if k_dim < 96 else k_dim - 16
    angles = torch.arange(num_positions).unsqueeze(1) * torch.logspace(0, -3, rotary // 2)
    centre = torch.randn(kv_heads, k_dim, generator=g) * (torch.rand(kv_heads, k_dim, generator=g) < 0.3)
    aim = torch.nn.functional.normalize(torch.randn(kv_heads, k_dim, generator=g), dim=-1)
    frame = Frame(centre * 8, aim, torch.full((kv_heads,), 40.0))
    return PlacedFrame(frame, torch.empty(0), torch.cat((angles.cos(), angles.sin()), 1) * stretch)


def make_case(
    kernels: KernelSet, geometry: Geometry, batch: Batch, mode: KVMode, framed: bool = False, stretch: float = 1.0
) -> Case:
    heads, kv_heads, k_dim, v_dim, block_size = geometry
    if mode is KVMode.INT4 and not (head_fits_int4(k_dim) and head_fits_int4(v_dim)):
        pytest.skip("refused when the layout is made")
    tokens, cached = batch
    columns = max(-(-(n + c) // block_size) for n, c in zip(tokens, cached, strict=True))
    num_blocks = columns * len(tokens) + 1
    g = torch.Generator().manual_seed(len(tokens) + k_dim)
    tables = (torch.randperm(num_blocks - 1, generator=g) + 1).view(len(tokens), columns).int()
    pool = KVPool(KVLayout(2, kv_heads, k_dim, v_dim, mode, block_size), num_blocks)
    pool.storage.fill_(0xFF)  # NaN in every float format: what was not written must not be read
    placed = make_frame(kv_heads, k_dim, columns * block_size, g, stretch) if framed else None
    for b, (n, c) in enumerate(zip(tokens, cached, strict=True)):
        places = torch.arange(n + c)
        slots = tables[b, places // block_size].long() * block_size + places % block_size
        k, v = torch.randn(n + c, kv_heads, k_dim, generator=g) + 0.5, torch.randn(n + c, kv_heads, v_dim, generator=g)
        at = None if placed is None else replace(placed, positions=places.int())
        if at is not None and at.frame.centre is not None:
            k += at.turned(at.frame.centre, places)
        kernels.kv_write(pool.view(1), k, v, slots, at)
    q = torch.randn(sum(tokens), heads, k_dim, generator=g)
    return Case(pool, step(tokens, cached, tables, block_size), q, k_dim**-0.5, placed)


def kept(pool: KVPool, slots: torch.Tensor) -> torch.Tensor:
    """`[n, G]`: 1 where a key was stored without the centre."""
    scales = pool.view(1).k_scale
    if scales is None:
        return torch.zeros(len(slots), 1)
    if scales.dtype != torch.uint8:
        return torch.ones(len(slots), 1)
    size = pool.layout.block_size
    return (scales[slots // size, :, slots % size, 0] & 1).float()


def centres(placed: PlacedFrame, length: int) -> torch.Tensor:
    """The centre at positions `0:length`, in complex numbers and float64: `[length, G, D]`."""
    assert placed.frame.centre is not None
    centre, half = placed.frame.centre.double(), placed.cos_sin.shape[1] // 2
    turn = torch.complex(*placed.cos_sin[:length].double().unsqueeze(1).split(half, -1))
    spun = torch.complex(centre[:, :half], centre[:, half : 2 * half]) * turn
    return torch.cat((spun.real, spun.imag, centre[:, 2 * half :].expand(length, -1, -1)), -1)


def expected(case: Case) -> np.ndarray:
    """The formula over what the pages hold."""
    parts = []
    size = case.pool.layout.block_size
    starts, cached = case.inputs.cu_seqlens.tolist(), case.inputs.cache_lens.tolist()
    for b, blocks in enumerate(case.inputs.block_tables.long()):
        n = starts[b + 1] - starts[b]
        places = torch.arange(n + cached[b])
        slots = blocks[places // size] * size + places % size
        k, v = case.pool.read(1, slots)
        if case.placed is not None and case.placed.frame.centre is not None:
            k += kept(case.pool, slots).unsqueeze(-1) * centres(case.placed, len(places))
        parts.append(
            oracle.attention(case.q[starts[b] : starts[b + 1]].numpy(), k.numpy(), v.numpy(), cached[b], case.scale)
        )
    return np.concatenate(parts)
