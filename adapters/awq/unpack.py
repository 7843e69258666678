"""From a dialect's packed tensors to `Int4Weight` and, for the gemm dialect, back. Pure torch, no loops over rows.

Knows nothing of files or configs: shapes and dtypes were checked by `adapters.quantization`.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from deepseek_tgi.adapters.awq.format import GEMM, NIBBLES_PER_WORD, SYMMETRIC_ZERO, AwqFormat, Axis
from deepseek_tgi.adapters.weight_forms import Int4Weight, Part

Stored = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]
_ONE_EACH = 0x11111111
"""One in each nibble of a word."""


def unpack(
    layout: AwqFormat,
    weight: torch.Tensor,
    zeros: torch.Tensor | None,
    scales: torch.Tensor,
    shape: tuple[int, int],
    *,
    group_size: int,
) -> Int4Weight:
    """Unpack one layer of `shape (N, K)` without its bias. `zeros` None means the midpoint.

    `group_size` is the real one; a short last group is made whole by cutting all groups into smaller ones. Inputs stay
    in file order (`sorted_by_group` undoes that). The result owns its memory.
    """
    grid = (shape[0], -(-shape[1] // group_size))
    stored_scales = scales.t() if layout.input_major else scales
    if zeros is None:
        unpacked_zeros = torch.full(grid, SYMMETRIC_ZERO, dtype=torch.uint8, device=weight.device)
    else:
        unpacked_zeros = unpack_zeros(layout, zeros, grid)
    codes = _unpack_side(layout, weight, layout.weight_axis, shape)
    return whole_groups(codes, unpacked_zeros, stored_scales[:, : grid[1]], group_size)


def stored_part(layout: AwqFormat, stored: Stored, part: Part, groups: range) -> Stored | None:
    """`part` of a layer's weight, zeros (or None) and scales as they are stored, as views: nothing else is read.

    `groups` are those of the part's inputs, which must be whole ones, or the one that spans all inputs. None if the
    part begins within a word.
    """
    weight = _cut(layout, stored[0], layout.weight_axis, part.outputs, part.inputs)
    zeros = None if stored[1] is None else _cut(layout, stored[1], layout.zeros_axis, part.outputs, groups)
    scales = _cut(layout, stored[2], None, part.outputs, groups)
    if weight is None or scales is None or (zeros is None) != (stored[1] is None):
        return None
    return weight, zeros, scales


def _cut(
    layout: AwqFormat, tensor: torch.Tensor, packed: Axis | None, outputs: range, inputs: range
) -> torch.Tensor | None:
    out, along = _words(outputs, packed is Axis.OUT), _words(inputs, packed is Axis.IN)
    if out is None or along is None:
        return None
    return tensor[along, out] if layout.input_major else tensor[out, along]


def _words(cut: range, packed: bool) -> slice | None:
    """Where `cut` lies on a side that may be packed, None if it begins within a word. What is over is trimmed later."""
    size = NIBBLES_PER_WORD if packed else 1
    return None if cut.start % size else slice(cut.start // size, -(-cut.stop // size))


def unpack_zeros(layout: AwqFormat, zeros: torch.Tensor, grid: tuple[int, int]) -> torch.Tensor:
    """Zeros `[N, groups] uint8` as they are, of packed ones.

    Where they are stored less one, one is given back to whole words: a zero of 0 was stored as 15 and borrowed from its
    neighbour. That is how GPTQModel writes and reads them; readers that add to each nibble agree wherever no zero is 0.
    """
    words = zeros + _ONE_EACH if layout.zeros_less_one else zeros
    return _unpack_side(layout, words, layout.zeros_axis, grid)


def stored_nibbles(layout: AwqFormat, zeros: torch.Tensor, grid: tuple[int, int]) -> torch.Tensor:
    """Zeros `[N, groups] uint8` as they are stored."""
    return _unpack_side(layout, zeros, layout.zeros_axis, grid)


def whole_groups(codes: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, group_size: int) -> Int4Weight:
    """The weight of `codes [N, K]` with zeros and scales `[N, ceil(K / group_size)]`, in groups that divide K."""
    size = math.gcd(codes.shape[1], group_size)
    sides = [zeros, scales]
    if size != group_size:
        groups = codes.shape[1] // size
        sides = [side.repeat_interleave(group_size // size, 1)[:, :groups] for side in sides]
    zeros, scales = (side.clone(memory_format=torch.contiguous_format) for side in sides)
    return Int4Weight(codes, zeros, scales, size)


def sorted_by_group(weight: Int4Weight, group_index: torch.Tensor) -> Int4Weight:
    """`weight`, unpacked as if inputs lay group by group, with the inputs that `group_index [K] int64` gives each.

    Every group is whole but a short last one, so that the sorted inputs fall into the groups at hand.
    """
    order = group_index.sort(stable=True).indices
    return replace(weight, codes=weight.codes[:, order].contiguous(), order=order)


def unpack_words(words: torch.Tensor, nibble_order: tuple[int, ...]) -> torch.Tensor:
    """Spread `[R, W] int32` into `[R, 8 W] uint8`, undoing the nibble order."""
    rows = words.shape[0]
    octets = words.contiguous().view(-1).view(torch.uint8).view(rows, -1, NIBBLES_PER_WORD // 2)
    spread = octets.new_empty((rows, octets.shape[1], NIBBLES_PER_WORD))
    for place in range(NIBBLES_PER_WORD // 2):
        # Little-endian words: octet `place` holds nibbles 2*place (low half) and 2*place + 1 (high half).
        octet = octets[:, :, place]
        torch.bitwise_and(octet, 15, out=spread[:, :, nibble_order[2 * place]])
        torch.bitwise_right_shift(octet, 4, out=spread[:, :, nibble_order[2 * place + 1]])
    return spread.view(rows, -1)


def pack_words(columns: torch.Tensor, nibble_order: tuple[int, ...]) -> torch.Tensor:
    """Gather `[R, 8 W] uint8` (0..15) into `[R, W] int32` in the nibble order: the inverse of `unpack_words`."""
    eights = columns.view(columns.shape[0], -1, NIBBLES_PER_WORD)
    octets = eights.new_empty((*eights.shape[:2], NIBBLES_PER_WORD // 2))
    for place in range(NIBBLES_PER_WORD // 2):
        high = eights[:, :, nibble_order[2 * place + 1]] << 4
        torch.bitwise_or(eights[:, :, nibble_order[2 * place]], high, out=octets[:, :, place])
    return octets.view(torch.int32).view(columns.shape[0], -1)


def pack_gemm(weight: Int4Weight) -> dict[str, torch.Tensor]:
    """AutoAWQ's gemm tensors of one layer: `qweight [K, N/8]`, `qzeros [G, N/8]`, `scales [G, N] float16`.

    Scales are float16 because AutoAWQ's own module declares them so.
    """
    assert weight.out_features % NIBBLES_PER_WORD == 0, "gemm words hold eight output columns"
    return {
        GEMM.weight: pack_words(weight.codes.t().contiguous(), GEMM.nibble_order),
        GEMM.zeros: pack_words(weight.zeros.t().contiguous(), GEMM.nibble_order),
        GEMM.scales: weight.scales.t().to(torch.float16).contiguous(),
    }


def _unpack_side(layout: AwqFormat, words: torch.Tensor, axis: Axis, shape: tuple[int, int]) -> torch.Tensor:
    """`[rows, columns] uint8` of `shape`, whichever way the dialect stores and packs it."""
    packed_is_last = (axis is Axis.OUT) == layout.input_major
    unpacked = unpack_words(words if packed_is_last else words.t(), layout.nibble_order)
    oriented = unpacked.t() if axis is Axis.OUT else unpacked
    return oriented[: shape[0], : shape[1]].contiguous()
