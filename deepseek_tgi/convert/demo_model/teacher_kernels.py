"""Triton kernels of one decode step of the teacher: everything between its matrix products.

Each has one program a row (or a row and head) and reads lengths from device memory, so that a single CUDA graph serves
every step whatever the sequences' lengths.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_norm(stream, delta, weight, out, width, eps, block: tl.constexpr) -> None:
    """`stream += delta; out = rms_norm(stream) * weight`, one row a program."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, block)
    inside = columns < width
    at = row * width + columns
    value = tl.load(stream + at, mask=inside, other=0.0) + tl.load(delta + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(stream + at, value, mask=inside)
    scale = tl.rsqrt(tl.sum(value * value) / width + eps)
    gain = tl.load(weight + columns, mask=inside, other=0.0)
    tl.store(out + at, (value * scale * gain).to(out.dtype.element_ty), mask=inside)


@triton.jit
def rotate_and_store(
    qkv, keys, values, positions, cos_sin, limit,
    heads: tl.constexpr, groups: tl.constexpr, half: tl.constexpr,
) -> None:  # fmt: skip
    """Rotate a row's queries in place, and write its rotated keys and its values into the cache at its position.

    Shapes: `qkv [B, (heads + 2 groups) * 2 half]`, `keys, values [B, groups, limit, 2 half]`, `cos_sin [limit, 2 half]`.
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    columns = tl.arange(0, half)
    position = tl.load(positions + row)
    source = qkv + (row * (heads + 2 * groups) + head) * 2 * half
    low = tl.load(source + columns).to(tl.float32)
    high = tl.load(source + half + columns).to(tl.float32)
    cosine = tl.load(cos_sin + position * 2 * half + columns)
    sine = tl.load(cos_sin + position * 2 * half + half + columns)
    new_low, new_high = low * cosine - high * sine, high * cosine + low * sine
    if head < heads:
        tl.store(source + columns, new_low.to(qkv.dtype.element_ty))
        tl.store(source + half + columns, new_high.to(qkv.dtype.element_ty))
    elif head < heads + groups:
        target = keys + ((row * groups + head - heads) * limit + position) * 2 * half
        tl.store(target + columns, new_low.to(keys.dtype.element_ty))
        tl.store(target + half + columns, new_high.to(keys.dtype.element_ty))
    else:
        target = values + ((row * groups + head - heads - groups) * limit + position) * 2 * half
        tl.store(target + columns, low.to(values.dtype.element_ty))
        tl.store(target + half + columns, high.to(values.dtype.element_ty))


@triton.jit
def attend(
    qkv, keys, values, positions, out, limit, scale,
    heads: tl.constexpr, groups: tl.constexpr, width: tl.constexpr, rows: tl.constexpr, block: tl.constexpr,
) -> None:  # fmt: skip
    """One query token a sequence over its cache up to its position; a program serves the heads of one key group.

    Shapes: `out [B, heads * width]`; `rows` is the heads a group, rounded up to what `dot` takes.
    """
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    shared: tl.constexpr = heads // groups
    member, columns, steps = tl.arange(0, rows), tl.arange(0, width), tl.arange(0, block)
    taken = member < shared
    at = (row * (heads + 2 * groups) + group * shared + member)[:, None] * width + columns[None, :]
    query = tl.load(qkv + at, mask=taken[:, None], other=0.0)
    length = tl.load(positions + row) + 1
    base = (row * groups + group) * limit * width
    top = tl.full((rows,), -1e30, tl.float32)
    total = tl.zeros((rows,), tl.float32)
    sums = tl.zeros((rows, width), tl.float32)
    for start in range(0, length, block):
        seen = start + steps < length
        place = base + (start + steps)[:, None] * width + columns[None, :]
        key = tl.load(keys + place, mask=seen[:, None], other=0.0)
        scores = tl.where(seen[None, :], tl.dot(query, tl.trans(key)) * scale, -1e30)
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp(scores - new_top[:, None])
        shrink = tl.exp(top - new_top)
        total = total * shrink + tl.sum(weights, 1)
        value = tl.load(values + place, mask=seen[:, None], other=0.0)
        sums = sums * shrink[:, None] + tl.dot(weights.to(value.dtype), value)
        top = new_top
    target = (row * heads + group * shared + member)[:, None] * width + columns[None, :]
    tl.store(out + target, (sums / total[:, None]).to(out.dtype.element_ty), mask=taken[:, None])


@triton.jit
def silu_product(gate_up, out, inner, block: tl.constexpr) -> None:
    """`silu(gate) * up` of `gate_up [B, 2 inner]`."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    inside = columns < inner
    gate = tl.load(gate_up + row * 2 * inner + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * inner + inner + columns, mask=inside, other=0.0).to(tl.float32)
    value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * inner + columns, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def discourage_repeats(
    logits, size, index, texts, prompts, positions, lengths, count, limit: tl.constexpr, block: tl.constexpr
) -> None:
    """Lower the logit of an id that would repeat three or more of the answer's own ids, the more the longer the match.

    Shapes: `logits [B, size]`, `index [V] int32` to columns of `logits`, `texts [count + 1, limit] int32`.
    Source: the "don't repeat yourself" sampler, whose penalty grows with the length of the match.
    """
    slot = tl.program_id(0).to(tl.int64)
    prompt = tl.load(prompts + slot)
    position = tl.load(positions + slot)
    start = tl.load(lengths + tl.minimum(prompt, count - 1))
    text = texts + prompt * limit
    at = tl.arange(0, block)
    # The id at `at` would come again if it is drawn now: compare what stands before it with what stands before us.
    alive = (at > start) & (at <= position)
    token = tl.load(text + at, mask=alive, other=0)
    column = tl.load(index + token)
    alive = alive & (column >= 0)
    target = logits + slot * size + column
    before = tl.load(target, mask=alive, other=0.0).to(tl.float32)
    for back in tl.static_range(1, 8):
        inside = alive & (at - back >= start)
        here = tl.load(text + at - back, mask=inside, other=-1)
        last = tl.load(text + tl.maximum(position + 1 - back, 0))
        alive = inside & (here == last)
        if back >= 2:
            tl.debug_barrier()
            tl.store(target, (before - 1.2 * (back - 1) * (back - 1) * 0.5).to(logits.dtype.element_ty), mask=alive)


@triton.jit
def sample(logits, temperatures, step, chosen, size, log_floor, block: tl.constexpr) -> None:
    """Draw one id a row among those whose probability is at least `exp(log_floor)` times the largest.

    The draw is the largest of `logit / temperature` plus Gumbel noise, so nothing is sorted.
    """
    row = tl.program_id(0)
    source = logits + row.to(tl.int64) * size
    columns = tl.arange(0, block)
    best = tl.full((block,), -1e30, tl.float32)
    for start in range(0, size, block):
        value = tl.load(source + start + columns, mask=start + columns < size, other=-1e30).to(tl.float32)
        best = tl.maximum(best, value)
    top = tl.max(best)
    temperature = tl.load(temperatures + row)
    seed = (tl.load(step).to(tl.uint32) * 2654435769 + row.to(tl.uint32) * 2246822519).to(tl.uint32)
    best = tl.full((block,), -1e30, tl.float32)
    place = tl.zeros((block,), tl.int32)
    for start in range(0, size, block):
        value = tl.load(source + start + columns, mask=start + columns < size, other=-1e30).to(tl.float32)
        scaled = (value - top) / temperature
        bits = (seed ^ ((start + columns).to(tl.uint32) * 3266489917)).to(tl.uint32)
        bits = ((bits ^ (bits >> 16)) * 2146121005).to(tl.uint32)
        bits = ((bits ^ (bits >> 15)) * 2221713035).to(tl.uint32)
        bits = bits ^ (bits >> 16)
        uniform = ((bits >> 8).to(tl.float32) + 0.5) / 16777216.0
        noisy = tl.where(scaled >= log_floor, scaled - tl.log(-tl.log(uniform)), -1e30)
        place = tl.where(noisy > best, start + columns, place)
        best = tl.maximum(best, noisy)
    winner = tl.argmax(best, 0)
    tl.store(chosen + row, tl.sum(tl.where(columns == winner, place, 0)))
