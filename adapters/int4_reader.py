"""Reads 4-bit layers of one checkpoint in the dialect its config declares, judging shapes and values against it.

Rules:
- A declared version decides the layout and shapes are checked against it; square layers look alike in every layout, so
  there the version alone rules.
- Zeros declared and not stored are an error; stored ones count even if none are declared.
- GPTQ files of symmetric layers hold zeros of 7 or of 8 all over, whatever their format is called: both mean the
  midpoint. Others are read as the format says.
- Indices of groups that are not 0, 0, ..., 1, 1, ... sort the inputs (activation order). A stored -1 means none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from deepseek_tgi.adapters.awq.format import (
    AWQ_VERSIONS,
    GPTQ_FORMATS,
    NIBBLES_PER_WORD,
    PACK_QUANTIZED,
    SYMMETRIC_ZERO,
    AwqFormat,
)
from deepseek_tgi.adapters.awq.unpack import Stored, sorted_by_group, stored_nibbles, stored_part, unpack
from deepseek_tgi.adapters.checkpoint import Checkpoint
from deepseek_tgi.adapters.quant_schemes import Int4Scheme, QuantSettings
from deepseek_tgi.adapters.weight_forms import Int4Weight, Part, Weight
from deepseek_tgi.errors import CheckpointError

FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_LAYOUTS = {**AWQ_VERSIONS, **GPTQ_FORMATS, PACK_QUANTIZED.name: PACK_QUANTIZED}
PACKED_SUFFIXES = tuple({f".{layout.weight}" for layout in _LAYOUTS.values()})
"""Ends of the names of packed weights, of every dialect."""
_INDEX_DTYPES = (torch.int32, torch.int64)
_WEIGHT_SHAPE = "weight_shape"
Say = Callable[[str, str, str], None]
"""`say(key, message, name)` logs `message % name`, once for each key."""


class Int4Reader:
    """The 4-bit layers of `checkpoint`, all in the dialect `layout`."""

    def __init__(self, settings: QuantSettings, layout: AwqFormat, checkpoint: Checkpoint, say_once: Say) -> None:
        self._settings = settings
        self._layout = layout
        self._checkpoint = checkpoint
        self._say_once = say_once

    def stores(self, module: str) -> bool:
        """True if `module` is packed in this dialect."""
        return f"{module}.{self._layout.weight}" in self._checkpoint

    def check(self, module: str) -> None:
        """Check one packed layer by names and headers: one form only, zeros where declared, a sensible group size."""
        layout, stored = self._layout, self._checkpoint
        where = f"{stored.folder}: {module}"
        if not self.stores(module):
            raise CheckpointError(f"{where} is packed in another form than {self._settings.method} {layout.name}")
        if f"{module}.weight" in stored:
            raise CheckpointError(f"{where} is stored twice, dense (weight) and packed ({layout.weight}); expected one")
        stored.require([f"{module}.{layout.scales}"])
        scheme = self._scheme(module)
        if scheme.zero_point:
            stored.require([f"{module}.{layout.zeros}"])
        if scheme.sorted_groups:
            stored.require([f"{module}.{layout.group_index}"])
        self._group_size(module, self._plain_input_side(module))

    def judge(self, module: str, shape: tuple[int, int]) -> Int4Scheme:
        """How a packed layer of `shape` is stored, by its headers; refuses by them what `read` would."""
        size = self._group_size(module, shape[1])
        self._check_layout(module, shape)
        layout, stored = self._layout, self._checkpoint
        expected: list[tuple[str, tuple[int, ...], tuple[torch.dtype, ...]]] = [
            (layout.weight, layout.weight_shape(*shape), (torch.int32,)),
            (layout.scales, layout.scales_shape(*shape, size), FLOAT_DTYPES),
            (layout.zeros, layout.zeros_shape(*shape, size), (torch.int32,)),
            (layout.group_index, (shape[1],), _INDEX_DTYPES),
        ]
        if layout is PACK_QUANTIZED:
            expected.append((_WEIGHT_SHAPE, (2,), _INDEX_DTYPES))
        for suffix, own_shape, dtypes in expected:
            if suffix and f"{module}.{suffix}" in stored:
                stored.check(f"{module}.{suffix}", own_shape, dtypes)
        own = self._scheme(module)
        return replace(own, group_size=own.group_size if own.group_size == -1 else size)

    def sorts_inputs(self, module: str, in_features: int) -> bool:
        """True if a packed layer's inputs are sorted by group (activation order)."""
        return self._read_group_index(module, in_features, self._group_size(module, in_features)) is not None

    def read(self, module: str, shape: tuple[int, int], part: Part | None = None) -> Weight:
        """Read a layer of `shape (N, K)` without its bias, or a part of it, of which no more is unpacked if words and
        groups allow it. Raises `CheckpointError` naming what does not fit.
        """
        layout, checkpoint, prefix = self._layout, self._checkpoint, f"{module}."
        size = self._group_size(module, shape[1])
        self._check_layout(module, shape)
        self._check_weight_shape(module, shape)
        index = self._read_group_index(module, shape[1], size)
        weight = checkpoint.mapped(prefix + layout.weight, layout.weight_shape(*shape), (torch.int32,))
        scales = checkpoint.mapped(prefix + layout.scales, layout.scales_shape(*shape, size), FLOAT_DTYPES)
        if not torch.isfinite(scales).all():
            raise CheckpointError(f"{checkpoint.folder}: tensor {prefix}{layout.scales} holds infinities or NaN")
        zeros = self._read_zeros(module, shape, size)
        if part is not None and index is None and (own := self._part((weight, zeros, scales), shape, part, size)):
            return own
        packed = unpack(layout, *self._moved((weight, zeros, scales)), shape, group_size=size)
        whole = packed if index is None else sorted_by_group(packed, index)
        return whole if part is None else part.of(whole)

    def _part(self, stored: Stored, shape: tuple[int, int], part: Part, size: int) -> Int4Weight | None:
        """`part` unpacked alone, None if its borders are none of the stored ones."""
        inputs, own_shape = part.inputs, (len(part.outputs), len(part.inputs))
        if size == shape[1]:
            groups, size = range(1), len(inputs)
        elif inputs.start % size == 0 and (inputs.stop % size == 0 or inputs.stop == shape[1]):
            groups = range(inputs.start // size, -(-inputs.stop // size))
        else:
            return None
        own = stored_part(self._layout, stored, part, groups)
        return None if own is None else unpack(self._layout, *self._moved(own), own_shape, group_size=size)

    def _moved(self, stored: Stored) -> Stored:
        """What is unpacked, where it is."""
        weight, zeros, scales = stored
        move = self._checkpoint.moved
        return move(weight), None if zeros is None else move(zeros), move(scales)

    def _scheme(self, module: str) -> Int4Scheme:
        """What the config says of a layer that is packed: its own scheme, or the first one if it has none."""
        own = self._settings.scheme(module)
        if isinstance(own, Int4Scheme):
            return own
        return next(scheme for scheme in self._settings.schemes if isinstance(scheme, Int4Scheme))

    def _plain_input_side(self, module: str) -> int | None:
        """K by the headers alone, where they are sure of it: not for a packed (maybe padded) or contradictory side."""
        layout = self._layout
        stored = self._checkpoint.shape(f"{module}.{layout.weight}")
        scales = self._checkpoint.shape(f"{module}.{layout.scales}")
        plain = layout.input_major and not layout.short_last_group and len(stored) == len(scales) == 2
        return stored[0] if plain and scales[1] == stored[1] * NIBBLES_PER_WORD else None

    def _group_size(self, module: str, in_features: int | None) -> int:
        """The real group size of a layer; without `in_features`, only signs are judged (and 0 returned)."""
        declared = self._settings.group_sizes
        if len(declared) > 1 and in_features is not None:
            stored = self._stored_groups(module)
            fits = [size for size in declared if size == -1 or size > 0]
            fits = [size for size in fits if stored == (1 if size == -1 else -(-in_features // size))]
            own = self._scheme(module).group_size
            declared = (own,) if own in fits or not fits else tuple(fits)
        for size in declared:
            whole = in_features is None or self._layout.short_last_group or size <= 0 or in_features % size == 0
            if size != -1 and (size <= 0 or not whole):
                side = "" if in_features is None else f" of its input side, {in_features}"
                raise CheckpointError(
                    f"{self._settings.source}: {module}: group_size is {size}; expected -1 or a positive divisor{side}"
                )
        if in_features is None:
            return 0
        return in_features if declared[0] == -1 else min(declared[0], in_features)

    def _stored_groups(self, module: str) -> int:
        shape = self._checkpoint.shape(f"{module}.{self._layout.scales}")
        return (shape[0] if self._layout.input_major else shape[-1]) if shape else 0

    def _read_zeros(self, module: str, shape: tuple[int, int], size: int) -> torch.Tensor | None:
        """The packed zeros, or None for the midpoint."""
        layout, name = self._layout, f"{module}.{self._layout.zeros}"
        if name not in self._checkpoint:
            return None
        zeros = self._checkpoint.mapped(name, layout.zeros_shape(*shape, size), (torch.int32,))
        if self._scheme(module).zero_point:
            return zeros
        if layout.stores_midpoint:
            stored = stored_nibbles(layout, zeros, (shape[0], -(-shape[1] // size)))
            if any(bool((stored == value).all()) for value in (SYMMETRIC_ZERO - 1, SYMMETRIC_ZERO)):
                return None
        self._say_once("zeros", "%s is stored although the config declares none; it is used", name)
        return zeros

    def _read_group_index(self, module: str, in_features: int, size: int) -> torch.Tensor | None:
        """The group of each input, or None where they lie group by group."""
        name = f"{module}.{self._layout.group_index}"
        if not self._layout.group_index or name not in self._checkpoint:
            return None
        index = self._checkpoint.tensor(name, (in_features,), _INDEX_DTYPES).to(torch.int64)
        natural = torch.arange(in_features, device=index.device) // size
        if torch.equal(index, natural) or bool((index == -1).all()):
            return None
        groups = -(-in_features // size)
        where = f"{self._checkpoint.folder}: tensor {name}"
        if int(index.min()) < 0 or int(index.max()) >= groups:
            low, high = int(index.min()), int(index.max())
            raise CheckpointError(f"{where} holds {low} to {high}; expected groups from 0 to {groups - 1}")
        counts = torch.bincount(index, minlength=groups)
        wanted = torch.bincount(natural, minlength=groups)
        if not torch.equal(counts, wanted):
            group = int((counts != wanted).nonzero()[0])
            raise CheckpointError(
                f"{where} gives group {group} {int(counts[group])} inputs; expected {int(wanted[group])}"
            )
        if not self._scheme(module).sorted_groups:
            self._say_once("order", "%s sorts the inputs although the config declares no such order; it is used", name)
        return index

    def _check_layout(self, module: str, shape: tuple[int, int]) -> None:
        """The declared version against the stored shape, naming the version that would fit."""
        layout, name = self._layout, f"{module}.{self._layout.weight}"
        stored, expected = self._checkpoint.shape(name), layout.weight_shape(*shape)
        if stored == expected:
            return
        others = (other for other in _LAYOUTS.values() if other.weight == layout.weight and other is not layout)
        fits = [other.name for other in others if stored == other.weight_shape(*shape)]
        hint = f", which is the shape of version {fits[0]}" if fits else ""
        raise CheckpointError(
            f"{self._checkpoint.folder}: tensor {name} has shape {list(stored)}{hint}; "
            f"expected {list(expected)} for {layout.name} of out {shape[0]}, in {shape[1]}"
        )

    def _check_weight_shape(self, module: str, shape: tuple[int, int]) -> None:
        name = f"{module}.{_WEIGHT_SHAPE}"
        if self._layout is not PACK_QUANTIZED or name not in self._checkpoint:
            return
        stored = self._checkpoint.tensor(name, (2,), _INDEX_DTYPES).tolist()
        if stored != list(shape):
            raise CheckpointError(f"{self._checkpoint.folder}: tensor {name} says {stored}; expected {list(shape)}")
