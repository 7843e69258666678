"""Which number formats a loaded model computes and caches in, from what was asked and what the machine has.

`auto` always starts. Compute on a CPU is bfloat16 where the CPU multiplies it (AVX512-BF16), else float32; on a GPU it
is bfloat16, and float32 if asked for. float16 is never computed: no x86 path for it is faster than float32, and its
range overflows on DeepSeek activations; asking for it gives, with a warning, float32 on a CPU, which keeps every bit
float16 would, and bfloat16 on a GPU. What is in use is what `ModelInfo` reports.

The cache follows compute under `auto` (bfloat16 for bfloat16, else float32): keys are then no coarser than what the
matrix products around them see, at half the bytes of float32 where that is already the working precision.
"""

from __future__ import annotations

import logging
from pathlib import Path

from deepseek_tgi.errors import ConfigError
from deepseek_tgi.kernels.precision import ComputeDtype
from deepseek_tgi.kv.layout import KVMode

logger = logging.getLogger(__name__)

DTYPES = ("auto", "bfloat16", "float16", "float32")
KV_CACHE_DTYPES = ("auto", *(mode.value for mode in KVMode))
_ALIASES = {"fp8": KVMode.FP8}


def resolve_compute_dtype(wish: str, on_gpu: bool = False) -> ComputeDtype:
    """The precision of matrix products here. Raises `ConfigError` for a name that is not in `DTYPES`."""
    if wish not in DTYPES:
        raise ConfigError(f"dtype: got {wish!r}, expected one of {', '.join(DTYPES)}")
    if on_gpu:
        if wish == "float16":
            logger.warning("dtype: float16 is not computed on a GPU; using bfloat16, in which no activation overflows")
        return ComputeDtype.FLOAT32 if wish == "float32" else ComputeDtype.BFLOAT16
    if wish == "auto":
        return ComputeDtype.BFLOAT16 if cpu_multiplies_bfloat16() else ComputeDtype.FLOAT32
    if wish == "float16":
        logger.warning("dtype: float16 is not computed on a CPU; using float32, which holds every float16 value")
        return ComputeDtype.FLOAT32
    return ComputeDtype(wish)


def resolve_kv_mode(wish: str, compute: ComputeDtype) -> KVMode:
    """The format of cached keys and values; `fp8` means `fp8_e4m3fn`. Raises `ConfigError` for any other name."""
    if wish in _ALIASES:
        return _ALIASES[wish]
    if wish == "fp8_e5m2":
        raise ConfigError(
            "kv_cache_dtype: got fp8_e5m2, whose two bits of mantissa lose what a scale keeps in fp8_e4m3fn; take "
            "fp8_e4m3fn (or fp8), or int8 at the same size"
        )
    if wish not in KV_CACHE_DTYPES:
        raise ConfigError(f"kv_cache_dtype: got {wish!r}, expected one of {', '.join(KV_CACHE_DTYPES)}")
    if wish == "auto":
        return KVMode.BFLOAT16 if compute is ComputeDtype.BFLOAT16 else KVMode.FLOAT32
    return KVMode(wish)


def cpu_multiplies_bfloat16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """True if the CPU has AVX512-BF16, by the operating system's list of features: no torch is needed to ask."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    return any(line.startswith("flags") and "avx512_bf16" in line.split() for line in lines)
