"""How the native library lays out integer weights: the Python half of `native/api.h`.

The arithmetic needs no torch, which is imported by what moves tensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

TILE = 32
GRID = 32
"""Weights along K that share a scale on an int8 grid."""
GRID_MIN_WEIGHTS = 1 << 20
"""Smaller dense weights stay in floats: the test of every weight would cost more than it saves."""
_MAX_WIDTH = 128
_WIDTH_STEP = 16


def block_width(group_size: int) -> tuple[int, int]:
    """Blocks a group is cut into and the width of each, padding included: at most 128, a multiple of 16."""
    blocks = -(-group_size // _MAX_WIDTH)
    width = -(-group_size // blocks)
    return blocks, -(-width // _WIDTH_STEP) * _WIDTH_STEP


def padded_tiles(out_features: int) -> int:
    """Tiles of 32 outputs."""
    return -(-out_features // TILE)


def exact_scales(scales: torch.Tensor) -> tuple[int, torch.Tensor]:
    """`(scale_kind, scales)`: float16 or bfloat16 if every scale survives it, else float32."""
    import torch

    wide = scales.float()
    for kind, dtype in ((1, torch.float16), (2, torch.bfloat16)):
        narrow = wide.to(dtype)
        if torch.equal(narrow.float(), wide):
            return kind, narrow
    return 0, wide


def in_tiles(per_group: torch.Tensor, blocks_per_group: int) -> torch.Tensor:
    """`[N, groups]` to `[tiles, blocks, 32]`, padded with zeros."""
    import torch

    out_features = per_group.shape[0]
    tiles = padded_tiles(out_features)
    blocks = per_group.repeat_interleave(blocks_per_group, 1)
    padded = torch.nn.functional.pad(blocks, (0, 0, 0, tiles * TILE - out_features))
    return padded.view(tiles, TILE, -1).transpose(1, 2).contiguous()
