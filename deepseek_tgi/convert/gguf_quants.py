"""Block formats of GGUF tensors and their vectorised dequantisation to float32.

Each format is a `GgmlType`: values and bytes a block, and a decoder of `[blocks, bytes] uint8` to `[blocks, values]`.
Arithmetic is float32 in the order of ggml's reference, so results equal it bit for bit.

Source: ggml `ggml-common.h` (block layouts) and `ggml-quants.c` (`dequantize_row_*`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

Decoder = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class GgmlType:
    """One tensor format. `decode` maps `[B, block_bytes] uint8` to `[B, block_values] float32`."""

    name: str
    block_values: int
    block_bytes: int
    decode: Decoder


def _halves(octets: torch.Tensor) -> torch.Tensor:
    """Neighbouring byte pairs as float16, widened: `[B, 2 n] uint8` to `[B, n] float32`."""
    return octets.contiguous().view(torch.float16).to(torch.float32)


def _nibbles(octets: torch.Tensor) -> torch.Tensor:
    """`[B, n] uint8` to `[B, 2, n] uint8`: low halves, then high halves."""
    return torch.stack((octets & 15, octets >> 4), dim=1)


def _bits(octets: torch.Tensor) -> torch.Tensor:
    """`[B, n] uint8` to `[B, 8 n] uint8`, lowest bit first."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return ((octets.unsqueeze(-1) >> shifts) & 1).flatten(1)


def _f32(blocks: torch.Tensor) -> torch.Tensor:
    return blocks.contiguous().view(torch.float32)


def _bf16(blocks: torch.Tensor) -> torch.Tensor:
    return blocks.contiguous().view(torch.bfloat16).to(torch.float32)


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    codes = _nibbles(blocks[:, 2:]).flatten(1)
    return (codes.to(torch.float32) - 8) * _halves(blocks[:, :2])


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    codes = _nibbles(blocks[:, 4:]).flatten(1)
    return codes.to(torch.float32) * _halves(blocks[:, :2]) + _halves(blocks[:, 2:4])


def _q5_0(blocks: torch.Tensor) -> torch.Tensor:
    codes = _nibbles(blocks[:, 6:]).flatten(1) | (_bits(blocks[:, 2:6]) << 4)
    return (codes.to(torch.float32) - 16) * _halves(blocks[:, :2])


def _q5_1(blocks: torch.Tensor) -> torch.Tensor:
    codes = _nibbles(blocks[:, 8:]).flatten(1) | (_bits(blocks[:, 4:8]) << 4)
    return codes.to(torch.float32) * _halves(blocks[:, :2]) + _halves(blocks[:, 2:4])


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    return blocks[:, 2:].view(torch.int8).to(torch.float32) * _halves(blocks[:, :2])


def _two_bit_codes(octets: torch.Tensor) -> torch.Tensor:
    """The 2-bit plane of Q2_K and Q3_K: `[B, 64] uint8` to `[B, 16, 16]`, sub-blocks in order."""
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8).view(1, 1, 4, 1)
    return ((octets.view(-1, 2, 1, 32) >> shifts) & 3).view(-1, 16, 16)


def _q2_k(blocks: torch.Tensor) -> torch.Tensor:
    scales, codes = blocks[:, :16], _two_bit_codes(blocks[:, 16:80].contiguous())
    scale = _halves(blocks[:, 80:82]) * (scales & 15).to(torch.float32)
    offset = _halves(blocks[:, 82:84]) * (scales >> 4).to(torch.float32)
    return (scale.unsqueeze(-1) * codes.to(torch.float32) - offset.unsqueeze(-1)).flatten(1)


def _q3_k(blocks: torch.Tensor) -> torch.Tensor:
    low = _nibbles(blocks[:, 96:104]).flatten(1)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8).view(1, 4, 1)
    high = ((blocks[:, 104:108].unsqueeze(1) >> shifts) & 3).flatten(1)
    scale = _halves(blocks[:, 108:110]) * ((low | (high << 4)).to(torch.float32) - 32)
    # Bit i of mask byte l belongs to 32-value row i; a set bit means "do not subtract 4".
    rows = torch.arange(8, dtype=torch.uint8).view(1, 8, 1)
    kept = ((blocks[:, :32].unsqueeze(1) >> rows) & 1).reshape(-1, 16, 16)
    codes = _two_bit_codes(blocks[:, 32:96].contiguous()).to(torch.float32) - 4 * (1 - kept.to(torch.float32))
    return (scale.unsqueeze(-1) * codes).flatten(1)


def _six_bit_pairs(octets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The 8 scales and 8 minima that Q4_K and Q5_K spread over 12 bytes: two `[B, 8] float32`."""
    first, second, third = octets[:, 0:4], octets[:, 4:8], octets[:, 8:12]
    scales = torch.cat((first & 63, (third & 15) | ((first >> 6) << 4)), dim=1)
    minima = torch.cat((second & 63, (third >> 4) | ((second >> 6) << 4)), dim=1)
    return scales.to(torch.float32), minima.to(torch.float32)


def _scaled_with_minimum(blocks: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """`d * scale * code - dmin * minimum` over 8 sub-blocks; `codes [B, 8, 32]`."""
    scales, minima = _six_bit_pairs(blocks[:, 4:16])
    scale, offset = _halves(blocks[:, 0:2]) * scales, _halves(blocks[:, 2:4]) * minima
    return (scale.unsqueeze(-1) * codes.to(torch.float32) - offset.unsqueeze(-1)).flatten(1)


def _interleaved_nibbles(octets: torch.Tensor) -> torch.Tensor:
    """`[B, 128] uint8` to `[B, 8, 32]`: each 32 bytes give one sub-block of low and one of high halves."""
    return _nibbles(octets.reshape(-1, 32)).view(-1, 8, 32)


def _q4_k(blocks: torch.Tensor) -> torch.Tensor:
    return _scaled_with_minimum(blocks, _interleaved_nibbles(blocks[:, 16:]))


def _q5_k(blocks: torch.Tensor) -> torch.Tensor:
    rows = torch.arange(8, dtype=torch.uint8).view(1, 8, 1)
    fifth = (blocks[:, 16:48].unsqueeze(1) >> rows) & 1
    return _scaled_with_minimum(blocks, _interleaved_nibbles(blocks[:, 48:]) | (fifth << 4))


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    low = _nibbles(blocks[:, :128].reshape(-1, 64)).view(-1, 2, 4, 32)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8).view(1, 1, 4, 1)
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3
    codes = (low | (high << 4)).view(-1, 16, 16).to(torch.float32) - 32
    scale = _halves(blocks[:, 208:210]) * blocks[:, 192:208].contiguous().view(torch.int8).to(torch.float32)
    return (scale.unsqueeze(-1) * codes).flatten(1)


GGML_TYPES = {
    0: GgmlType("F32", 1, 4, _f32),
    1: GgmlType("F16", 1, 2, _halves),
    2: GgmlType("Q4_0", 32, 18, _q4_0),
    3: GgmlType("Q4_1", 32, 20, _q4_1),
    6: GgmlType("Q5_0", 32, 22, _q5_0),
    7: GgmlType("Q5_1", 32, 24, _q5_1),
    8: GgmlType("Q8_0", 32, 34, _q8_0),
    10: GgmlType("Q2_K", 256, 84, _q2_k),
    11: GgmlType("Q3_K", 256, 110, _q3_k),
    12: GgmlType("Q4_K", 256, 144, _q4_k),
    13: GgmlType("Q5_K", 256, 176, _q5_k),
    14: GgmlType("Q6_K", 256, 210, _q6_k),
    30: GgmlType("BF16", 1, 2, _bf16),
}
"""Readable formats by their number in a file."""

UNREADABLE_NAMES = {
    9: "Q8_1",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
}
"""Formats that are known by name only, so that a refusal can name them."""

_CHUNK_VALUES = 1 << 22
"""Values decoded at once: bounds temporary memory whatever the tensor's size."""


def dequantise(kind: GgmlType, octets: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Decode `octets [n] uint8`, a whole number of blocks, to a flat tensor of `dtype`, in bounded pieces."""
    blocks = octets.view(-1, kind.block_bytes)
    values = torch.empty(blocks.shape[0] * kind.block_values, dtype=dtype)
    step = max(1, _CHUNK_VALUES // kind.block_values)
    for start in range(0, blocks.shape[0], step):
        piece = kind.decode(blocks[start : start + step]).flatten()
        values[start * kind.block_values : start * kind.block_values + piece.numel()] = piece
    return values
