"""The kernel set of a GPU: torch's operators first, each replaced by what Triton and CUDA C++ bring.

Choice: every op's folder offers what it has in a function `provide`, called with the set so far, Triton's before CUDA
C++'s; whoever cannot be had says why, once, and what was there before it stays. Prevents: one missing compiler or one
unfit op taking the whole set down. Rejected: a table of classes here, which would know each op's arguments.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Protocol

import torch

from deepseek_tgi.errors import ConfigError
from deepseek_tgi.kernels.common import ComputeDtype
from deepseek_tgi.kernels.compiler import BuildError
from deepseek_tgi.kernels.int4_linear.fused import after_norm, after_silu
from deepseek_tgi.kernels.latent_prepare.composed import ComposedLatentPrepare
from deepseek_tgi.kernels.moe.grouped import GroupedMoe
from deepseek_tgi.kernels.qkv_attention.composed import ComposedQkvAttention
from deepseek_tgi.kernels.select import KernelSet, torch_kernels

logger = logging.getLogger(__name__)

TRITON_PROVIDERS: tuple[str, ...] = ("deepseek_tgi.kernels.paged_attention.triton",)
"""Modules with a `provide` of Triton kernels; in this order, later ones see what earlier ones brought."""
CUDA_PROVIDERS: tuple[str, ...] = (
    "deepseek_tgi.kernels.embedding.cuda",
    "deepseek_tgi.kernels.rms_norm.cuda",
    "deepseek_tgi.kernels.rope.cuda",
    "deepseek_tgi.kernels.silu_mul.cuda",
    "deepseek_tgi.kernels.route.cuda",
    "deepseek_tgi.kernels.moe.cuda",
    "deepseek_tgi.kernels.int4_linear.cuda",
    "deepseek_tgi.kernels.int4_linear.cuda_fused",
    "deepseek_tgi.kernels.dense_linear.cuda",
    "deepseek_tgi.kernels.expert_choice.cuda",
    "deepseek_tgi.kernels.kv_write.cuda",
    "deepseek_tgi.kernels.paged_attention.cuda",
    "deepseek_tgi.kernels.qkv_attention.cuda",
    "deepseek_tgi.kernels.latent_prepare.cuda",
    "deepseek_tgi.kernels.latent_attention.cuda",
    "deepseek_tgi.kernels.latent_layer.cuda",
)
"""As `TRITON_PROVIDERS`, of CUDA C++."""
OF_PARTS = ("norm_int4_linear", "silu_int4_linear", "qkv_attention", "latent_prepare", "moe")
"""Ops that are made of others where no kernel does them in one."""


class Provider(Protocol):
    """`provide(kernels)` returns `kernels` with what it replaces. `BuildError`: nothing to offer here."""

    def __call__(self, kernels: KernelSet) -> KernelSet: ...


def device_kernels(where: torch.device, compute_dtype: ComputeDtype, wish: str, num_threads: int = 1) -> KernelSet:
    """The set for `where`. Raises `ConfigError` if `wish` names kernels that cannot be had."""
    if wish == "reference":
        raise ConfigError("kernels: reference was asked for, but it is for CPUs; torch is the plainest set of a GPU")
    plain = operators(where, compute_dtype, num_threads)
    names = {"torch": (), "triton": TRITON_PROVIDERS}.get(wish, (*TRITON_PROVIDERS, *CUDA_PROVIDERS))
    chosen = assemble(plain, (_provider(name) for name in names))
    if chosen is plain and wish in ("cuda", "triton"):
        raise ConfigError(f"kernels: {wish} was asked for, and no kernel of it can be had here")
    if chosen is plain:
        return chosen
    kind = "triton" if wish == "triton" else "cuda"
    return replace(chosen, name=kind, reason="asked for" if wish == kind else f"what {where} runs")


def operators(where: torch.device, compute_dtype: ComputeDtype, num_threads: int = 1) -> KernelSet:
    """Torch's operators on `where`, activations in the compute dtype."""
    dtype = torch.bfloat16 if compute_dtype is ComputeDtype.BFLOAT16 else torch.float32
    plain = torch_kernels(compute_dtype, num_threads, "torch's operators run anywhere")
    return _composed(replace(plain, device=where, activation_dtype=dtype), OF_PARTS)


def assemble(plain: KernelSet, providers: Iterable[Provider]) -> KernelSet:
    """`plain` with what `providers` bring, and its composed ops made anew where nobody brought one."""
    chosen = plain
    for provide in providers:
        try:
            chosen = provide(chosen)
        except BuildError as error:
            logger.warning("kernels: %s; torch's operators do its work, which are slower", error)
    if chosen is plain:
        return plain
    return _composed(chosen, [name for name in OF_PARTS if getattr(chosen, name) is getattr(plain, name)])


def syncing_ops(kernels: KernelSet) -> frozenset[str]:
    """Ops of `kernels` that ask the device for values, so that no CUDA graph can hold them: all are torch's."""
    plain = torch_kernels(kernels.compute_dtype, 1, "")
    leaves = ("kv_write", "paged_attention", "latent_write", "latent_attention")
    syncing = {name for name in leaves if getattr(kernels, name) is getattr(plain, name)}
    if isinstance(kernels.qkv_attention, ComposedQkvAttention) and syncing & {"kv_write", "paged_attention"}:
        syncing.add("qkv_attention")
    if isinstance(kernels.latent_prepare, ComposedLatentPrepare) and "latent_write" in syncing:
        syncing.add("latent_prepare")
    if isinstance(kernels.moe, GroupedMoe):
        syncing.add("moe")
    return frozenset(syncing)


def _composed(kernels: KernelSet, names: Iterable[str]) -> KernelSet:
    """`kernels` with the ops of `names`, all of `OF_PARTS`, made of its others."""
    k = kernels
    made: dict[str, Callable[[], Any]] = {
        "norm_int4_linear": lambda: after_norm(k.rms_norm, k.int4_linear, k.activation_dtype),
        "silu_int4_linear": lambda: after_silu(k.silu_mul, k.int4_linear),
        "qkv_attention": lambda: ComposedQkvAttention(k.rms_norm, k.rope, k.kv_write, k.paged_attention),
        "latent_prepare": lambda: ComposedLatentPrepare(k.rms_norm, k.rope, k.latent_write),
        "moe": lambda: GroupedMoe(k.int4_linear, k.dense_linear, k.silu_mul),
    }
    return replace(kernels, **{name: made[name]() for name in names})


def _provider(name: str) -> Provider:
    provide: Provider = importlib.import_module(name).provide
    return provide
