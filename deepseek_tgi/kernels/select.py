"""Which implementation of each op runs, decided once at load and carried as a value."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from deepseek_tgi.errors import ConfigError
from deepseek_tgi.kernels.common import ComputeDtype
from deepseek_tgi.kernels.dense_linear import DenseLinear, PackDense, PackFp8
from deepseek_tgi.kernels.embedding import Embedding
from deepseek_tgi.kernels.expert_choice import ChooseExperts
from deepseek_tgi.kernels.int4_linear import Int4Linear, NormInt4Linear, PackInt4, SiluInt4Linear
from deepseek_tgi.kernels.kv_write import KvWrite
from deepseek_tgi.kernels.latent_attention import LatentAttention, PackUp
from deepseek_tgi.kernels.latent_layer import LatentLayer
from deepseek_tgi.kernels.latent_prepare import LatentPrepare
from deepseek_tgi.kernels.latent_write import LatentWrite
from deepseek_tgi.kernels.moe import Moe, PackExperts
from deepseek_tgi.kernels.paged_attention import PagedAttention
from deepseek_tgi.kernels.qkv_attention import QkvAttention
from deepseek_tgi.kernels.rms_norm import RmsNorm
from deepseek_tgi.kernels.rope import Rope
from deepseek_tgi.kernels.route import Route
from deepseek_tgi.kernels.silu_mul import SiluMul
from deepseek_tgi.kernels.threads import torch_threads, usable_threads

if TYPE_CHECKING:
    from deepseek_tgi.kernels.library import NativeLibrary

logger = logging.getLogger(__name__)

WISHES = ("auto", "native", "cuda", "triton", "torch", "reference")
_CPU_ONLY, _GPU_ONLY = frozenset({"native"}), frozenset({"cuda", "triton"})
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class KernelSet:
    """The ops, each a plain callable with the contract of its folder; weights packed by one set run on that set only.

    `name` is the implementation, `reason` why it was chosen. Weights are packed on `device`. Inner activations are of
    `activation_dtype`; the residual stream, router and output logits are float32.
    """

    name: str
    reason: str
    compute_dtype: ComputeDtype
    num_threads: int
    device: torch.device
    activation_dtype: torch.dtype
    pack_int4: PackInt4
    int4_linear: Int4Linear
    norm_int4_linear: NormInt4Linear
    silu_int4_linear: SiluInt4Linear
    pack_dense: PackDense
    pack_fp8: PackFp8
    dense_linear: DenseLinear
    rms_norm: RmsNorm
    rope: Rope
    silu_mul: SiluMul
    kv_write: KvWrite
    paged_attention: PagedAttention
    qkv_attention: QkvAttention
    embedding: Embedding
    latent_write: LatentWrite
    latent_prepare: LatentPrepare
    pack_up: PackUp
    latent_attention: LatentAttention
    route: Route
    pack_experts: PackExperts
    moe: Moe
    hold_int4: PackInt4 | None = None
    """How INT4 weights of experts are held until `pack_experts` takes them; None: as `pack_int4` packs them."""
    choose_experts: ChooseExperts | None = None
    """`rms_norm`, a router's exact product and `route` in one call, where the set has that."""
    latent_layer: LatentLayer | None = None
    """`latent_prepare` and `latent_attention` in one call, where the set has that."""


def _reference(compute_dtype: ComputeDtype, num_threads: int, reason: str) -> KernelSet:
    from deepseek_tgi.kernels.dense_linear import reference as dense
    from deepseek_tgi.kernels.embedding import reference as embedding
    from deepseek_tgi.kernels.int4_linear import fused
    from deepseek_tgi.kernels.int4_linear import reference as int4
    from deepseek_tgi.kernels.kv_write import reference as kv
    from deepseek_tgi.kernels.latent_attention import reference as latent
    from deepseek_tgi.kernels.latent_prepare.composed import ComposedLatentPrepare
    from deepseek_tgi.kernels.latent_write import reference as latent_kv
    from deepseek_tgi.kernels.moe import PackedExperts
    from deepseek_tgi.kernels.moe import reference as moe
    from deepseek_tgi.kernels.paged_attention import reference as attention
    from deepseek_tgi.kernels.qkv_attention.composed import ComposedQkvAttention
    from deepseek_tgi.kernels.rms_norm import reference as norm
    from deepseek_tgi.kernels.rope import reference as rope
    from deepseek_tgi.kernels.route import reference as routing
    from deepseek_tgi.kernels.silu_mul import reference as silu

    return KernelSet(
        name="reference",
        reason=reason,
        compute_dtype=compute_dtype,
        num_threads=num_threads,
        device=_CPU,
        activation_dtype=torch.float32,
        pack_int4=int4.pack_int4,
        int4_linear=int4.int4_linear,
        norm_int4_linear=fused.after_norm(norm.rms_norm, int4.int4_linear),
        silu_int4_linear=fused.after_silu(silu.silu_mul, int4.int4_linear),
        pack_dense=dense.pack_dense,
        pack_fp8=dense.ReferenceFp8,
        dense_linear=dense.dense_linear,
        rms_norm=norm.rms_norm,
        rope=rope.rope,
        silu_mul=silu.silu_mul,
        kv_write=kv.kv_write,
        paged_attention=attention.paged_attention,
        qkv_attention=ComposedQkvAttention(norm.rms_norm, rope.rope, kv.kv_write, attention.paged_attention),
        embedding=embedding.embedding,
        latent_write=latent_kv.latent_write,
        latent_prepare=ComposedLatentPrepare(norm.rms_norm, rope.rope, latent_kv.latent_write),
        pack_up=latent.PlainUp,
        latent_attention=latent.latent_attention,
        route=routing.route,
        pack_experts=PackedExperts,
        moe=moe.moe,
    )


def torch_kernels(compute_dtype: ComputeDtype, num_threads: int, reason: str) -> KernelSet:
    """The set made of torch's operators, which run on any device; `select_kernels` is the usual door."""
    from deepseek_tgi.kernels.dense_linear import cpu as dense
    from deepseek_tgi.kernels.embedding import cpu as embedding
    from deepseek_tgi.kernels.int4_linear import cpu as int4
    from deepseek_tgi.kernels.int4_linear import fused
    from deepseek_tgi.kernels.kv_write import cpu as kv
    from deepseek_tgi.kernels.latent_attention import cpu as latent
    from deepseek_tgi.kernels.latent_prepare.composed import ComposedLatentPrepare
    from deepseek_tgi.kernels.latent_write import cpu as latent_kv
    from deepseek_tgi.kernels.moe import PackedExperts
    from deepseek_tgi.kernels.moe.grouped import GroupedMoe
    from deepseek_tgi.kernels.paged_attention import cpu as attention
    from deepseek_tgi.kernels.qkv_attention.composed import ComposedQkvAttention
    from deepseek_tgi.kernels.rms_norm import cpu as norm
    from deepseek_tgi.kernels.rope import cpu as rope
    from deepseek_tgi.kernels.route import cpu as routing
    from deepseek_tgi.kernels.silu_mul import cpu as silu

    return KernelSet(
        name="torch",
        reason=reason,
        compute_dtype=compute_dtype,
        num_threads=num_threads,
        device=_CPU,
        activation_dtype=torch.float32,
        pack_int4=int4.packer(compute_dtype),
        int4_linear=int4.int4_linear,
        norm_int4_linear=fused.after_norm(norm.rms_norm, int4.int4_linear),
        silu_int4_linear=fused.after_silu(silu.silu_mul, int4.int4_linear),
        pack_dense=dense.packer(compute_dtype),
        pack_fp8=dense.fp8_packer(compute_dtype),
        dense_linear=dense.dense_linear,
        rms_norm=norm.rms_norm,
        rope=rope.rope,
        silu_mul=silu.silu_mul,
        kv_write=kv.kv_write,
        paged_attention=attention.paged_attention,
        qkv_attention=ComposedQkvAttention(norm.rms_norm, rope.rope, kv.kv_write, attention.paged_attention),
        embedding=embedding.embedding,
        latent_write=latent_kv.latent_write,
        latent_prepare=ComposedLatentPrepare(norm.rms_norm, rope.rope, latent_kv.latent_write),
        pack_up=latent.TorchUp,
        latent_attention=latent.latent_attention,
        route=routing.route,
        pack_experts=PackedExperts,
        moe=GroupedMoe(int4.int4_linear, dense.dense_linear, silu.silu_mul),
    )


def native_kernels(library: NativeLibrary, compute_dtype: ComputeDtype, num_threads: int, reason: str) -> KernelSet:
    """The set over a loaded library; `select_kernels` is the usual door."""
    from deepseek_tgi.kernels.dense_linear import native as dense
    from deepseek_tgi.kernels.embedding import cpu as embedding
    from deepseek_tgi.kernels.int4_linear import native as int4
    from deepseek_tgi.kernels.kv_write import native as kv
    from deepseek_tgi.kernels.latent_attention import native as latent
    from deepseek_tgi.kernels.latent_prepare.native import LatentPrepareOp
    from deepseek_tgi.kernels.latent_write import native as latent_kv
    from deepseek_tgi.kernels.moe import native as moe
    from deepseek_tgi.kernels.moe.grouped import GroupedMoe
    from deepseek_tgi.kernels.paged_attention import native as attention
    from deepseek_tgi.kernels.qkv_attention import native as qkv
    from deepseek_tgi.kernels.rms_norm import native as norm
    from deepseek_tgi.kernels.rope import native as rope
    from deepseek_tgi.kernels.route import native as routing
    from deepseek_tgi.kernels.silu_mul import native as silu

    ops = int4.Int4Ops(library)
    grouped = GroupedMoe(ops.int4_linear, dense.DenseOps(library).dense_linear, silu.SiluMulOp(library, num_threads))
    return KernelSet(
        name="native",
        reason=reason,
        compute_dtype=compute_dtype,
        num_threads=num_threads,
        device=_CPU,
        activation_dtype=torch.float32,
        pack_int4=int4.Packer(library, compute_dtype, num_threads),
        int4_linear=ops.int4_linear,
        norm_int4_linear=ops.norm_int4_linear,
        silu_int4_linear=ops.silu_int4_linear,
        pack_dense=dense.Packer(library, compute_dtype, num_threads),
        pack_fp8=dense.Fp8Packer(library, num_threads),
        dense_linear=dense.DenseOps(library).dense_linear,
        rms_norm=norm.RmsNormOp(library, num_threads),
        rope=rope.RopeOp(library, num_threads),
        silu_mul=silu.SiluMulOp(library, num_threads),
        kv_write=kv.KvWriteOp(library, num_threads),
        paged_attention=attention.PagedAttentionOp(library, num_threads),
        qkv_attention=qkv.QkvAttentionOp(library, num_threads),
        embedding=embedding.embedding,
        latent_write=latent_kv.LatentWriteOp(library, num_threads),
        latent_prepare=LatentPrepareOp(library, num_threads),
        pack_up=latent.UpPacker(compute_dtype),
        latent_attention=latent.LatentAttentionOp(library, num_threads),
        route=routing.RouteOp(library, num_threads),
        pack_experts=moe.Packer(num_threads),
        moe=moe.MoeOp(library, grouped),
    )


def _native_or_torch(compute_dtype: ComputeDtype, num_threads: int, wish: str) -> KernelSet:
    """The native set, or under `auto` the torch set with the reason in the log, once a load."""
    from deepseek_tgi.kernels.library import BuildError, load

    try:
        library = load()
    except BuildError as error:
        if wish == "native":
            raise ConfigError(f"kernels: native was asked for, but {error}; auto falls back to torch") from error
        logger.warning("kernels: %s; falling back to torch operators, which are several times slower", error)
        return torch_kernels(compute_dtype, num_threads, str(error))
    return native_kernels(
        library, compute_dtype, num_threads, "asked for" if wish == "native" else "built for this CPU"
    )


def select_kernels(
    device: str | torch.device = "cpu",
    compute_dtype: ComputeDtype = ComputeDtype.FLOAT32,
    wish: str = "auto",
    num_threads: int = 0,
) -> KernelSet:
    """Choose the kernels for a model; call once at load.

    `wish` is one of `WISHES`: `native` is for CPUs, `cuda` and `triton` for GPUs. `num_threads` 0 means what this
    process may use. Also sets torch's own thread count (see `threads.torch_threads`). Raises `ConfigError` for a wish
    that cannot be had.
    """
    if wish not in WISHES:
        raise ConfigError(f"kernels: got {wish!r}, expected one of {', '.join(WISHES)}")
    where = torch.device(device)
    if where.type not in ("cpu", "cuda"):
        raise ConfigError(f"kernels: got device {where}, expected cpu or cuda")
    if wish in (_GPU_ONLY if where.type == "cpu" else _CPU_ONLY):
        raise ConfigError(f"kernels: {wish} was asked for, but it is not for a {where.type} device")
    threads = usable_threads(num_threads)
    if where.type == "cuda":
        from deepseek_tgi.kernels.device_set import device_kernels

        chosen = device_kernels(where, compute_dtype, wish, threads)
    elif wish == "reference":
        chosen = _reference(compute_dtype, threads, "asked for")
    elif wish == "torch":
        chosen = torch_kernels(compute_dtype, threads, "asked for")
    else:
        chosen = _native_or_torch(compute_dtype, threads, wish)
    torch.set_num_threads(torch_threads(threads, chosen.name == "native"))
    logger.info(
        "kernels: %s on %s, %s, %d threads (%s)", chosen.name, where, compute_dtype.value, threads, chosen.reason
    )
    return chosen
