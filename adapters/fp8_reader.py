"""Reads layers of 8-bit floats: E4M3 codes with a scale for each block, each row or the whole layer.

Only weights are 8-bit here: activations stay in compute precision, so a stored scale of activations is left out by
rule. Scales may be float32, 16 bits, or bare exponents (E8M0); all are factors of the weight, `w = code * scale`, also
where their tensor is called `weight_scale_inv`. NaN codes are refused: kernels do not know them.
Source: DeepSeek-V3 `README_WEIGHTS.md`; OCP 8-bit floating point specification 1.0; compressed-tensors' format
`float-quantized`.
"""

from __future__ import annotations

import torch

from deepseek_tgi.adapters.checkpoint import Checkpoint
from deepseek_tgi.adapters.quant_schemes import Fp8Scheme, QuantSettings
from deepseek_tgi.adapters.weight_forms import Fp8Weight
from deepseek_tgi.errors import CheckpointError, UnsupportedModelError

CODE_DTYPES = frozenset({torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz})
"""Dtypes of 8-bit float weights; only the first is read."""
_SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu, torch.uint8)
"""Bytes are exponents too, from before safetensors had a name for E8M0."""
_SCALE_NAMES = ("weight_scale_inv", "weight_scale")
_ACTIVATION_SCALES = ("input_scale", "activation_scale", "output_scale", "k_scale", "v_scale")
_NAN_MAGNITUDE = 0x7F


class Fp8Reader:
    """The 8-bit float layers of `checkpoint` under `scheme`."""

    def __init__(self, settings: QuantSettings, scheme: Fp8Scheme, checkpoint: Checkpoint) -> None:
        self._settings = settings
        self._scheme = scheme
        self._checkpoint = checkpoint

    def stores(self, module: str) -> bool:
        """True if `module` is stored in 8-bit floats."""
        name = f"{module}.weight"
        return name in self._checkpoint and self._checkpoint.dtype(name) in CODE_DTYPES

    def check(self, module: str) -> None:
        """Check one layer by its headers: the number format, the scales and their grid."""
        name, checkpoint = f"{module}.weight", self._checkpoint
        dtype, shape = checkpoint.dtype(name), checkpoint.shape(name)
        where = f"{checkpoint.folder}: tensor {name}"
        if dtype != torch.float8_e4m3fn:
            kind = str(dtype).removeprefix("torch.")
            raise UnsupportedModelError(f"{where} has dtype {kind}, which is not implemented; float8_e4m3fn is")
        if len(shape) != 2:
            raise CheckpointError(f"{where} has shape {list(shape)}; expected two sides")
        self._check_scales(module, (shape[0], shape[1]))

    def judge(self, module: str, shape: tuple[int, int]) -> Fp8Scheme:
        """How a layer of `shape` is stored, by its headers; refuses by them what `read` would."""
        self._checkpoint.check(f"{module}.weight", shape, (torch.float8_e4m3fn,))
        self._check_scales(module, shape)
        return self._scheme

    def read(self, module: str, shape: tuple[int, int]) -> Fp8Weight:
        """Read a layer of `shape (N, K)` without its bias; codes are a view of the mapped file."""
        checkpoint, name = self._checkpoint, f"{module}.weight"
        codes = checkpoint.tensor(name, shape, (torch.float8_e4m3fn,))
        if bool(((codes.view(torch.uint8) & _NAN_MAGNITUDE) == _NAN_MAGNITUDE).any()):
            raise CheckpointError(f"{checkpoint.folder}: tensor {name} holds NaN")
        scale = self._check_scales(module, shape)
        stored = checkpoint.tensor(scale)
        stored = (stored.view(torch.float8_e8m0fnu) if stored.dtype == torch.uint8 else stored).to(torch.float32)
        if not torch.isfinite(stored).all():
            raise CheckpointError(f"{checkpoint.folder}: tensor {scale} holds infinities or NaN")
        extra = [f"{module}.{suffix}" for suffix in _ACTIVATION_SCALES if f"{module}.{suffix}" in checkpoint]
        checkpoint.skip(extra, "scales of activations, which are not quantised here")
        if self._scheme.block is None:
            return Fp8Weight(codes, stored.reshape(-1, 1).expand(shape[0], 1).clone(), shape[1])
        rows, columns = (min(side, size) for side, size in zip(self._scheme.block, shape, strict=True))
        return Fp8Weight(codes, stored.repeat_interleave(rows, 0)[: shape[0]].contiguous(), columns)

    def _check_scales(self, module: str, shape: tuple[int, int]) -> str:
        """Name of the tensor of scales. Raises `CheckpointError` if there is none, or not of this grid."""
        checkpoint = self._checkpoint
        names = [f"{module}.{suffix}" for suffix in _SCALE_NAMES if f"{module}.{suffix}" in checkpoint]
        if not names:
            checkpoint.require([f"{module}.{self._scheme.scale}"])
        stored, block = checkpoint.shape(names[0]), self._scheme.block
        if block is None:
            allowed: tuple[tuple[int, ...], ...] = ((), (1,), (1, 1), (shape[0],), (shape[0], 1))
            expected = f"[], [1] or [{shape[0]}, 1], since {self._settings.source} names no weight_block_size"
        else:
            allowed = ((-(-shape[0] // block[0]), -(-shape[1] // block[1])),)
            expected = f"{list(allowed[0])} for blocks of {block[0]} x {block[1]}"
        if stored not in allowed:
            raise CheckpointError(
                f"{checkpoint.folder}: tensor {names[0]} has shape {list(stored)}; expected {expected}"
            )
        if checkpoint.dtype(names[0]) not in _SCALE_DTYPES:
            kinds = " or ".join(str(dtype).removeprefix("torch.") for dtype in _SCALE_DTYPES)
            kind = str(checkpoint.dtype(names[0])).removeprefix("torch.")
            raise CheckpointError(f"{checkpoint.folder}: tensor {names[0]} has dtype {kind}; expected {kinds}")
        return names[0]
