"""What the contracts share: the compute dtype, the packed-weight types and the checks that name what is wrong."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NoReturn

import torch

from deepseek_tgi.errors import ConfigError, GenerationError
from deepseek_tgi.kernels.precision import ComputeDtype

__all__ = [
    "ACTIVATIONS",
    "FLOAT32",
    "ComputeDtype",
    "Dtypes",
    "Int4Tensors",
    "PackedDense",
    "PackedInt4",
    "PlainDense",
    "PlainFp8",
    "check_addends",
    "check_dense",
    "check_fp8",
    "check_int4",
    "check_linear",
    "describe",
    "finish_linear",
    "named",
    "on_host",
    "refuse",
]


Dtypes = frozenset[torch.dtype]
FLOAT32: Dtypes = frozenset({torch.float32})
"""What an implementation that knows addresses only takes as activations."""
ACTIVATIONS: Dtypes = frozenset({torch.float32, torch.bfloat16})
"""What inner activations may be (`KernelSet.activation_dtype`); the residual stream and logits are float32 always."""


@dataclass(frozen=True, slots=True)
class Int4Tensors:
    """Unpacked INT4 weight as the checkpoint means it: `w = (codes - zeros) * scales`.

    Shapes: `codes [N, K] uint8` (0..15), `zeros [N, K/g] uint8`, `scales [N, K/g]` float.
    """

    codes: torch.Tensor
    zeros: torch.Tensor
    scales: torch.Tensor
    group_size: int


class PackedInt4(ABC):
    """An INT4 weight in the form one implementation wants; only that implementation reads inside."""

    __slots__ = ("group_size", "in_features", "nbytes", "out_features")

    def __init__(self, out_features: int, in_features: int, group_size: int, nbytes: int) -> None:
        self.out_features = out_features
        self.in_features = in_features
        self.group_size = group_size
        self.nbytes = nbytes

    @abstractmethod
    def dequantise(self) -> torch.Tensor:
        """The weight as `[N, K] float32`, for tests and conversion."""


class PackedDense(ABC):
    """A dense weight in the form one implementation wants; only that implementation reads inside."""

    __slots__ = ("in_features", "nbytes", "out_features")

    def __init__(self, out_features: int, in_features: int, nbytes: int) -> None:
        self.out_features = out_features
        self.in_features = in_features
        self.nbytes = nbytes

    @abstractmethod
    def dense(self) -> torch.Tensor:
        """The weight as stored, `[N, K] float32`, for tests and conversion."""

    @abstractmethod
    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows `ids [T] int64` as `[T, K] float32`: a tied embedding reads the head's own storage."""


class PlainDense(PackedDense):
    """A weight kept as one tensor `[N, K]`; each implementation has a subclass, so that sets do not mix."""

    __slots__ = ("weight",)

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight
        super().__init__(weight.shape[0], weight.shape[1], weight.nbytes)

    def dense(self) -> torch.Tensor:
        """See `PackedDense`."""
        return self.weight.float()

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """See `PackedDense`."""
        return self.weight[ids].float()


class PlainFp8(PackedDense):
    """An FP8 weight kept as stored; each implementation has a subclass, so that sets do not mix.

    Shapes: `codes [N, K] float8_e4m3fn`, `scales [N, ceil(K / block)] float32`.
    """

    __slots__ = ("block", "codes", "scales")

    def __init__(self, codes: torch.Tensor, scales: torch.Tensor, block: int) -> None:
        check_fp8(codes, scales, block)
        self.codes, self.scales, self.block = codes.clone(), scales.clone(), block
        super().__init__(codes.shape[0], codes.shape[1], self.codes.nbytes + self.scales.nbytes)

    def dense(self) -> torch.Tensor:
        """See `PackedDense`."""
        return self.tile(0, self.out_features)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """See `PackedDense`."""
        return self._widened(self.codes[ids], self.scales[ids])

    def tile(self, start: int, stop: int) -> torch.Tensor:
        """Rows `start:stop` as float32 `[rows, K]`."""
        return self._widened(self.codes[start:stop], self.scales[start:stop])

    def _widened(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return codes.float() * scales.repeat_interleave(self.block, 1)[:, : self.in_features]


def refuse(message: str) -> NoReturn:
    """Raise `GenerationError(message)`: a caller handed a kernel something it does not take."""
    raise GenerationError(message)


def describe(name: str, tensor: torch.Tensor) -> str:
    """Name, shape and dtype for a message."""
    return f"{name} {list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def named(dtypes: Dtypes) -> str:
    """`float32`, or `bfloat16 or float32`, for a message."""
    return " or ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))


def on_host(tensor: torch.Tensor) -> bool:
    """True if looking at values costs nothing: what a kernel checks of them elsewhere, whoever moved them has."""
    return tensor.device.type == "cpu"


def check_int4(codes: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, group_size: int) -> Int4Tensors:
    """Check an INT4 weight before packing. Raises `ConfigError` naming the tensor that does not fit."""
    if codes.dim() != 2 or codes.dtype != torch.uint8:
        raise ConfigError(f"INT4 weight: got {describe('codes', codes)}, expected [N, K] uint8")
    out_features, in_features = codes.shape
    if group_size <= 0 or in_features % group_size:
        raise ConfigError(
            f"INT4 weight [{out_features}, {in_features}]: group size {group_size} does not divide {in_features}"
        )
    groups = (out_features, in_features // group_size)
    if zeros.dtype != torch.uint8 or tuple(zeros.shape) != groups:
        raise ConfigError(f"INT4 weight: got {describe('zeros', zeros)}, expected {list(groups)} uint8")
    if not scales.dtype.is_floating_point or tuple(scales.shape) != groups:
        raise ConfigError(f"INT4 weight: got {describe('scales', scales)}, expected {list(groups)} of a float dtype")
    return Int4Tensors(codes, zeros, scales, group_size)


def check_dense(weight: torch.Tensor) -> None:
    """Check a dense weight before packing. Raises `ConfigError`."""
    if weight.dim() != 2 or not weight.dtype.is_floating_point:
        raise ConfigError(f"dense weight: got {describe('weight', weight)}, expected [N, K] of a float dtype")


def check_fp8(codes: torch.Tensor, scales: torch.Tensor, block: int) -> None:
    """Check an FP8 weight before packing. Raises `ConfigError` naming the tensor that does not fit."""
    if codes.dim() != 2 or codes.dtype != torch.float8_e4m3fn:
        raise ConfigError(f"FP8 weight: got {describe('codes', codes)}, expected [N, K] float8_e4m3fn")
    if block <= 0:
        raise ConfigError(f"FP8 weight: got blocks of {block}, expected a positive number")
    shape = (codes.shape[0], -(-codes.shape[1] // block))
    if scales.dtype != torch.float32 or tuple(scales.shape) != shape:
        raise ConfigError(f"FP8 weight: got {describe('scales', scales)}, expected {list(shape)} float32")


def check_linear(
    x: torch.Tensor,
    w: PackedInt4 | PackedDense,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    out: torch.Tensor | None,
    *,
    dtypes: Dtypes = FLOAT32,
) -> None:
    """Check the operands of `out = x @ w.T + bias + residual`, activations in `dtypes`. Raises `GenerationError`."""
    if x.dim() != 2 or x.dtype not in dtypes or x.shape[1] != w.in_features:
        refuse(f"linear: got {describe('x', x)}, expected [M, {w.in_features}] {named(dtypes)}")
    check_addends((x.shape[0], w.out_features), bias, residual, out, dtypes=dtypes)


def check_addends(
    shape: tuple[int, int],
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    out: torch.Tensor | None,
    *,
    dtypes: Dtypes = FLOAT32,
) -> None:
    """Check what is added to a product of `shape` [M, N] and where it goes. Raises `GenerationError`."""
    if bias is not None and (bias.dtype != torch.float32 or tuple(bias.shape) != shape[1:]):
        refuse(f"linear: got {describe('bias', bias)}, expected [{shape[1]}] float32")
    for name, tensor in (("residual", residual), ("out", out)):
        if tensor is not None and (tensor.dtype not in dtypes or tuple(tensor.shape) != shape):
            refuse(f"linear: got {describe(name, tensor)}, expected {list(shape)} {named(dtypes)}")


def finish_linear(
    y: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None, out: torch.Tensor | None
) -> torch.Tensor:
    """Add `bias` and `residual` to `y` (owned by the caller), into `out` if given."""
    if bias is not None:
        y += bias
    if residual is not None:
        y += residual
    if out is None:
        return y
    out.copy_(y)
    return out
