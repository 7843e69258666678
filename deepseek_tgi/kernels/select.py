"""Which implementation of each op runs, decided once at load and carried as a value."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from deepseek_tgi.errors import ConfigError
from deepseek_tgi.kernels.common import ComputeDtype
from deepseek_tgi.kernels.dense_linear import DenseLinear, PackDense
from deepseek_tgi.kernels.embedding import Embedding
from deepseek_tgi.kernels.int4_linear import Int4Linear, PackInt4
from deepseek_tgi.kernels.kv_write import KvWrite
from deepseek_tgi.kernels.paged_attention import PagedAttention
from deepseek_tgi.kernels.rms_norm import RmsNorm
from deepseek_tgi.kernels.rope import Rope
from deepseek_tgi.kernels.silu_mul import SiluMul

logger = logging.getLogger(__name__)

WISHES = ("auto", "native", "torch", "reference")


@dataclass(frozen=True, slots=True)
class KernelSet:
    """The ops, each a plain callable with the contract of its folder; weights packed by one set run on that set only.

    `name` is the implementation, `reason` why it was chosen.
    """

    name: str
    reason: str
    compute_dtype: ComputeDtype
    num_threads: int
    pack_int4: PackInt4
    int4_linear: Int4Linear
    pack_dense: PackDense
    dense_linear: DenseLinear
    rms_norm: RmsNorm
    rope: Rope
    silu_mul: SiluMul
    kv_write: KvWrite
    paged_attention: PagedAttention
    embedding: Embedding


def _reference(compute_dtype: ComputeDtype, num_threads: int, reason: str) -> KernelSet:
    from deepseek_tgi.kernels.dense_linear import reference as dense
    from deepseek_tgi.kernels.embedding import reference as embedding
    from deepseek_tgi.kernels.int4_linear import reference as int4
    from deepseek_tgi.kernels.kv_write import reference as kv
    from deepseek_tgi.kernels.paged_attention import reference as attention
    from deepseek_tgi.kernels.rms_norm import reference as norm
    from deepseek_tgi.kernels.rope import reference as rope
    from deepseek_tgi.kernels.silu_mul import reference as silu

    return KernelSet(
        "reference", reason, compute_dtype, num_threads, int4.pack_int4, int4.int4_linear, dense.pack_dense,
        dense.dense_linear, norm.rms_norm, rope.rope, silu.silu_mul, kv.kv_write, attention.paged_attention,
        embedding.embedding,
    )  # fmt: skip


def _torch(compute_dtype: ComputeDtype, num_threads: int, reason: str) -> KernelSet:
    from deepseek_tgi.kernels.dense_linear import cpu as dense
    from deepseek_tgi.kernels.embedding import cpu as embedding
    from deepseek_tgi.kernels.int4_linear import cpu as int4
    from deepseek_tgi.kernels.kv_write import cpu as kv
    from deepseek_tgi.kernels.paged_attention import cpu as attention
    from deepseek_tgi.kernels.rms_norm import cpu as norm
    from deepseek_tgi.kernels.rope import cpu as rope
    from deepseek_tgi.kernels.silu_mul import cpu as silu

    return KernelSet(
        "torch", reason, compute_dtype, num_threads, int4.packer(compute_dtype), int4.int4_linear,
        dense.packer(compute_dtype), dense.dense_linear, norm.rms_norm, rope.rope, silu.silu_mul, kv.kv_write,
        attention.paged_attention, embedding.embedding,
    )  # fmt: skip


def select_kernels(
    device: str | torch.device = "cpu",
    compute_dtype: ComputeDtype = ComputeDtype.FLOAT32,
    wish: str = "auto",
    num_threads: int = 0,
) -> KernelSet:
    """Choose the kernels for a model; call once at load.

    `wish` is `auto`, `native`, `torch` or `reference`; `num_threads` 0 means what this process may use. Also sets
    torch's own thread count, so that both share one pool. Raises `ConfigError` for a wish that cannot be had.
    """
    from deepseek_tgi.kernels.threads import usable_threads

    if wish not in WISHES:
        raise ConfigError(f"kernels: got {wish!r}, expected one of {', '.join(WISHES)}")
    where = torch.device(device)
    if where.type != "cpu":
        raise ConfigError(f"kernels: got device {where}, expected cpu (no kernels for other devices in this version)")
    threads = usable_threads(num_threads)
    torch.set_num_threads(threads)
    if wish == "reference":
        chosen = _reference(compute_dtype, threads, "asked for")
    else:
        chosen = _torch(compute_dtype, threads, "asked for" if wish == "torch" else "no native library in this build")
    logger.info(
        "kernels: %s on %s, %s, %d threads (%s)", chosen.name, where, compute_dtype.value, threads, chosen.reason
    )
    return chosen
