"""Attention of a tile of queries over pages in any format, in Triton: prompts, chunks, and decode without a kernel.

A program takes BM rows of one request and KV head: row r is token r // RATIO, query head r % RATIO, so that heads which
share keys fill a tile however few tokens there are. Keys and values are widened to 16 bits as they are read; scales of
a whole vector multiply scores and weights instead. MODE: 0 bf16, 1 half, 2 INT8, 3 FP8, 4 INT4. UPCAST is for the
interpreter, which multiplies bfloat16 wrongly.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _hadamard(SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """Sylvester's matrix along the diagonal, blocks of SIZE (a power of two up to 256)."""
    i = tl.arange(0, WIDTH)[:, None]
    j = tl.arange(0, WIDTH)[None, :]
    bits = i & j & (SIZE - 1)
    bits ^= bits >> 4
    bits ^= bits >> 2
    bits ^= bits >> 1
    return tl.where(i // SIZE == j // SIZE, 1.0 - 2.0 * (bits & 1).to(tl.float32), 0.0).to(tl.bfloat16)


@triton.jit
def _levels(codes):
    """INT4's sixteen levels: 6, 18, 31, 45, 60, 77, 98, 127 and their negatives."""
    m = tl.where(codes >= 8, codes - 8, 7 - codes)
    size = 6 + 12 * m + m * (m - 1) // 2
    size += tl.where(m == 5, 1, tl.where(m == 6, 5, tl.where(m == 7, 16, 0)))
    return tl.where(codes >= 8, size, -size).to(tl.float32)


@triton.jit
def _rows(
    store, scales, page, place, seen, page_bytes, MODE: tl.constexpr, D: tl.constexpr, P: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """Vectors `[BN, P]` in 16 bits; zeros where not seen."""
    d = tl.arange(0, P)
    mask = seen[:, None] & (d < D)[None, :]
    if MODE == 0:
        at = page * (page_bytes // 2) + place * D
        x = tl.load(store.to(tl.pointer_type(tl.bfloat16)) + at[:, None] + d[None, :], mask=mask, other=0.0)
    elif MODE == 1:
        at = page * (page_bytes // 2) + place * D
        x = tl.load(store.to(tl.pointer_type(tl.float16)) + at[:, None] + d[None, :], mask=mask, other=0.0)
    elif MODE == 4:
        at = page * page_bytes + place * (D // 2)
        byte = tl.load(store + at[:, None] + (d % (D // 2))[None, :], mask=mask, other=0).to(tl.int32)
        codes = tl.where((d >= D // 2)[None, :], byte >> 4, byte & 15)
        at = page * page_bytes + place * (D // GROUP)
        scale = tl.load(scales + at[:, None] + (d // GROUP)[None, :], mask=mask, other=0)
        scale = (scale.to(tl.uint16) << 7).to(tl.float16, bitcast=True).to(tl.float32) * 0.015625
        x = tl.where(mask, _levels(codes) * scale, 0.0).to(tl.bfloat16)
    else:
        at = page * page_bytes + place * D
        codes = tl.load(store + at[:, None] + d[None, :], mask=mask, other=0)
        if MODE == 2:
            x = tl.where(mask, codes.to(tl.float32) - 128.0, 0.0).to(tl.bfloat16)
        else:
            wide = codes.to(tl.uint16)
            half = ((wide & 0x80) << 8 | (wide & 0x7F) << 7).to(tl.float16, bitcast=True)
            x = (half.to(tl.float32) * 256.0).to(tl.bfloat16)
    return x


@triton.jit
def _params(scales, page, place, seen, page_bytes, MODE: tl.constexpr):
    """Scale of each vector, and its zero as that of a code of 128."""
    half = scales.to(tl.pointer_type(tl.float16))
    if MODE == 2:
        at = page * (page_bytes // 2) + place * 2
        scale = tl.load(half + at, mask=seen, other=0.0).to(tl.float32)
        zero = tl.load(half + at + 1, mask=seen, other=0.0).to(tl.float32) + 128.0 * scale
    else:
        scale = tl.load(half + page * (page_bytes // 2) + place, mask=seen, other=0.0).to(tl.float32)
        zero = scale * 0.0
    return scale, zero


@triton.jit
def product(a, b, UPCAST: tl.constexpr):
    """`a b` of 16-bit operands in float32."""
    if UPCAST:
        return tl.dot(a.to(tl.float32), b.to(tl.float32))
    return tl.dot(a, b)


@triton.jit
def _exact_product(a, b, UPCAST: tl.constexpr):
    """Of float32 operands, nearly as exact as float32 is."""
    if UPCAST:
        return tl.dot(a, b)
    return tl.dot(a, b, input_precision="tf32x3")


@triton.jit(do_not_specialize=["columns", "batch"], do_not_specialize_on_alignment=["tables", "starts", "cached"])
def paged_tile(
    q, q_stride, k, k_rest, v, k_scale, v_scale, page_bytes, tables, columns, starts, cached, batch, scale, out,
    centre, cos_sin,
    MODE: tl.constexpr, REST: tl.constexpr, RATIO: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, PK: tl.constexpr, PV: tl.constexpr,
    BLOCK: tl.constexpr, GROUP_K: tl.constexpr, GROUP_V: tl.constexpr, SIZE_K: tl.constexpr, SIZE_V: tl.constexpr,
    TURN_K: tl.constexpr, TURN_V: tl.constexpr, CENTRE: tl.constexpr, ROTARY: tl.constexpr, PR: tl.constexpr,
    MARK: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """`out[t, h] = softmax(scale q[t, h] K') V` for one tile; the grid is (tiles of all requests, KV heads).

    With REST keys come in two parts of 16 bits, `k` and `k_rest`, which lie alike.
    """
    tile = tl.program_id(0)
    group = tl.program_id(1)
    heads = tl.num_programs(1) * RATIO
    request = -1
    index = 0
    before = 0
    for other in range(batch):
        tokens_here = tl.load(starts + other + 1) - tl.load(starts + other)
        tiles = (tokens_here * RATIO + BM - 1) // BM
        here = (tile >= before) & (tile < before + tiles)
        request = tl.where(here, other, request)
        index = tl.where(here, before + tiles - 1 - tile, index)  # the longest contexts first
        before += tiles
    if request >= 0:
        start = tl.load(starts + request)
        tokens = tl.load(starts + request + 1) - start
        ahead = tl.load(cached + request)
        rows = index * BM + tl.arange(0, BM)
        token = rows // RATIO
        head = group * RATIO + rows % RATIO
        real = token < tokens
        position = ahead + token
        context = ahead + tl.minimum((index * BM + BM - 1) // RATIO, tokens - 1) + 1
        whole = ahead + index * BM // RATIO + 1  # what every row sees

        compute = tl.float16 if MODE == 1 else tl.bfloat16
        d = tl.arange(0, PK)
        q_row = q + ((start + token).to(tl.int64) * q_stride + head * DK)[:, None]
        x = tl.load(q_row + d[None, :], mask=real[:, None] & (d < DK)[None, :], other=0.0).to(tl.float32)
        grow = tl.zeros((BM,), tl.float32) + scale * LOG2_E
        if MODE == 1:  # half precision needs queries near 1
            largest = tl.max(tl.abs(x), 1)
            largest = tl.where(largest > 0.0, largest, 1.0)
            x = x / largest[:, None]
            grow *= largest
        if MODE == 4:
            x = product(x.to(tl.bfloat16), _hadamard(SIZE_K, PK), UPCAST) * TURN_K
        x = x.to(compute)
        x_sum = tl.sum(x.to(tl.float32), 1)

        if CENTRE:
            # q R_p c = cos (a first + b second) + sin (b first - a second), and what does not turn
            i = tl.arange(0, PR)
            pair = real[:, None] & (i < ROTARY // 2)[None, :]
            first = tl.load(centre + group * DK + i, mask=i < ROTARY // 2, other=0.0)[None, :]
            second = tl.load(centre + group * DK + ROTARY // 2 + i, mask=i < ROTARY // 2, other=0.0)[None, :]
            a = tl.load(q_row + i[None, :], mask=pair, other=0.0).to(tl.float32)
            b = tl.load(q_row + (ROTARY // 2 + i)[None, :], mask=pair, other=0.0).to(tl.float32)
            on_cos = a * first + b * second
            on_sin = b * first - a * second
            still = tl.zeros((BM,), tl.float32)
            if ROTARY < DK:
                rest = (d >= ROTARY) & (d < DK)
                y = tl.load(q_row + d[None, :], mask=real[:, None] & rest[None, :], other=0.0).to(tl.float32)
                still = tl.sum(y * tl.load(centre + group * DK + d, mask=rest, other=0.0)[None, :], 1)

        most = tl.full((BM,), float("-inf"), tl.float32)
        total = tl.zeros((BM,), tl.float32)
        aside = tl.zeros((BM,), tl.float32)
        sums = tl.zeros((BM, PV), tl.float32)
        for n in range(0, context, BN):
            at = n + tl.arange(0, BN)
            seen = at < context
            page = tl.load(tables + tl.cast(request, tl.int64) * columns + at // BLOCK, mask=seen, other=0).to(tl.int64)
            place = group * BLOCK + at % BLOCK
            keys = _rows(k, k_scale, page, place, seen, page_bytes, MODE, DK, PK, GROUP_K)
            scores = product(x, tl.trans(keys), UPCAST)
            if REST:
                rest = _rows(k_rest, k_scale, page, place, seen, page_bytes, MODE, DK, PK, GROUP_K)
                scores += product(x, tl.trans(rest), UPCAST)
            if MODE == 2 or MODE == 3:
                size, zero = _params(k_scale, page, place, seen, page_bytes, MODE)
                scores *= size[None, :]
                if MODE == 2:
                    scores += x_sum[:, None] * zero[None, :]
            if CENTRE:
                turn = cos_sin + at[:, None] * ROTARY + i[None, :]
                mask = seen[:, None] & (i < ROTARY // 2)[None, :]
                off = _exact_product(on_cos, tl.trans(tl.load(turn, mask=mask, other=0.0)), UPCAST)
                off += _exact_product(on_sin, tl.trans(tl.load(turn + ROTARY // 2, mask=mask, other=0.0)), UPCAST)
                off += still[:, None]
                if MARK:  # bytes from a token's mark to the next
                    mark = tl.load(k_scale + page * page_bytes + place * MARK, mask=seen, other=0)
                    off = tl.where(((mark & 1) != 0)[None, :], off, 0.0)
                scores += off
            scores *= grow[:, None]
            if n + BN > whole:
                scores = tl.where(at[None, :] <= position[:, None], scores, float("-inf"))
            now = tl.maximum(most, tl.max(scores, 1))
            base = tl.where(now == float("-inf"), 0.0, now)
            weights = tl.exp2(scores - base[:, None])
            factor = tl.exp2(most - base)
            most = now
            total = total * factor + tl.sum(weights, 1)
            values = _rows(v, v_scale, page, place, seen, page_bytes, MODE, DV, PV, GROUP_V)
            if MODE == 2 or MODE == 3:
                size, zero = _params(v_scale, page, place, seen, page_bytes, MODE)
                if MODE == 2:
                    aside = aside * factor + tl.sum(weights * zero[None, :], 1)
                weights *= size[None, :]
            sums = sums * factor[:, None] + product(weights.to(compute), values, UPCAST)
        if MODE == 2:
            sums += aside[:, None]
        sums /= total[:, None]
        if MODE == 4:
            high = sums.to(tl.bfloat16)
            low = (sums - high.to(tl.float32)).to(tl.bfloat16)
            turn_back = _hadamard(SIZE_V, PV)
            sums = (product(high, turn_back, UPCAST) + product(low, turn_back, UPCAST)) * TURN_V
        e = tl.arange(0, PV)
        to = out + ((start + token).to(tl.int64) * heads + head)[:, None] * DV + e[None, :]
        tl.store(to, sums.to(out.dtype.element_ty), mask=real[:, None] & (e < DV)[None, :])


@triton.jit
def _offsets(centre, cos_sin, at, seen, d, DK: tl.constexpr, ROTARY: tl.constexpr):
    """`R_p c` for the positions `at`, `[BN, P] float32`: what was taken off the keys there; `centre` is the head's."""
    turns = d < ROTARY
    first = d < ROTARY // 2
    i = tl.where(first, d, d - ROTARY // 2)
    other = tl.where(first, d + ROTARY // 2, i)
    own = tl.load(centre + d, mask=d < DK, other=0.0)
    across = tl.load(centre + other, mask=turns, other=0.0)
    across = tl.where(first, -across, across)
    mask = seen[:, None] & turns[None, :]
    turn = cos_sin + at[:, None] * ROTARY + i[None, :]
    cos = tl.load(turn, mask=mask, other=1.0)
    sin = tl.load(turn + ROTARY // 2, mask=mask, other=0.0)
    return cos * own[None, :] + sin * across[None, :]


@triton.jit
def _plain(
    store, scales, page, place, seen, page_bytes, MODE: tl.constexpr, D: tl.constexpr, P: tl.constexpr,
    GROUP: tl.constexpr, SIZE: tl.constexpr, TURN: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Vectors `[BN, P] float32` as they were before they were stored; keys without their centre."""
    x = _rows(store, scales, page, place, seen, page_bytes, MODE, D, P, GROUP)
    if MODE == 4:
        return product(x, _hadamard(SIZE, P), UPCAST) * TURN
    size, zero = _params(scales, page, place, seen, page_bytes, MODE)
    return x.to(tl.float32) * size[:, None] + zero[:, None]


@triton.jit(do_not_specialize=["columns", "blocks"], do_not_specialize_on_alignment=["tables", "starts", "cached"])
def unpack_pages(
    k, v, k_scale, v_scale, page_bytes, tables, columns, starts, cached, centre, cos_sin, plain, plain_page_bytes,
    blocks,
    MODE: tl.constexpr, CENTRE: tl.constexpr, ROTARY: tl.constexpr, MARK: tl.constexpr, BLOCK: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, PK: tl.constexpr, PV: tl.constexpr, GROUP_K: tl.constexpr,
    GROUP_V: tl.constexpr, SIZE_K: tl.constexpr, SIZE_V: tl.constexpr, TURN_K: tl.constexpr, TURN_V: tl.constexpr,
    BN: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Contexts in bfloat16 pages of their own, request after request: keys, values, and with CENTRE rests of keys.

    A key that its centre was taken off has it back. Bfloat16 would lose what tells such keys apart, so it is what the
    key and its rest add up to.
    """
    at = tl.program_id(0) * BN + tl.arange(0, BN)
    group = tl.program_id(1)
    request = tl.program_id(2)
    heads = tl.num_programs(1)
    context = tl.load(cached + request) + tl.load(starts + request + 1) - tl.load(starts + request)
    seen = at < context
    if tl.program_id(0) * BN < context:
        page = tl.load(tables + tl.cast(request, tl.int64) * columns + at // BLOCK, mask=seen, other=0).to(tl.int64)
        place = group * BLOCK + at % BLOCK
        to = (request * blocks + at // BLOCK).to(tl.int64) * (plain_page_bytes // 2)
        wide = plain.to(tl.pointer_type(tl.bfloat16))
        keys = _plain(k, k_scale, page, place, seen, page_bytes, MODE, DK, PK, GROUP_K, SIZE_K, TURN_K, UPCAST)
        d = tl.arange(0, PK)
        mask = seen[:, None] & (d < DK)[None, :]
        if CENTRE:
            off = _offsets(centre + group * DK, cos_sin, at, seen, d, DK, ROTARY)
            if MARK:  # bytes from a token's mark to the next
                mark = tl.load(k_scale + page * page_bytes + place * MARK, mask=seen, other=0)
                off = tl.where(((mark & 1) != 0)[:, None], off, 0.0)
            keys += off
            behind = to + heads * BLOCK * (DK + DV) + place * DK
            rest = (keys - keys.to(tl.bfloat16).to(tl.float32)).to(tl.bfloat16)
            tl.store(wide + behind[:, None] + d[None, :], rest, mask=mask)
        tl.store(wide + (to + place * DK)[:, None] + d[None, :], keys.to(tl.bfloat16), mask=mask)
        values = _plain(v, v_scale, page, place, seen, page_bytes, MODE, DV, PV, GROUP_V, SIZE_V, TURN_V, UPCAST)
        e = tl.arange(0, PV)
        behind = to + heads * BLOCK * DK + place * DV
        tl.store(wide + behind[:, None] + e[None, :], values.to(tl.bfloat16), mask=seen[:, None] & (e < DV)[None, :])
