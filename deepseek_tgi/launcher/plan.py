"""The plan of a model before it is loaded: what it will be, what this machine would give it, what TGI would need.

Asks the functions that loading and warm-up ask, with the sizes that packing will make instead of measured ones. A
folder with nothing but `config.json` is enough, and then nothing heavy is imported.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from deepseek_tgi.adapters.cache_layout import cache_layout, cache_modes
from deepseek_tgi.adapters.dtypes import resolve_compute_dtype, resolve_kv_mode
from deepseek_tgi.adapters.hub import resolve_folder
from deepseek_tgi.adapters.model_config import ModelConfig, read_model_config
from deepseek_tgi.adapters.module_table import ModuleSpec
from deepseek_tgi.adapters.plan import WeightPlan, plan_weights
from deepseek_tgi.adapters.sharding import ShardPlan, plan_shards
from deepseek_tgi.adapters.stored_tensors import DeclaredForms, StoredForm
from deepseek_tgi.adapters.tgi_needs import TgiNeeds, tgi_needs
from deepseek_tgi.adapters.workspace import StepSizes, scratch_floats
from deepseek_tgi.config import LauncherConfig
from deepseek_tgi.engine.config import EngineConfig
from deepseek_tgi.engine.memory import LinuxMemory, MemoryReader
from deepseek_tgi.engine.warmup import Limits, cache_budget, plan_cache, step_workspace
from deepseek_tgi.errors import ResourceError
from deepseek_tgi.kernels.held_bytes import HeldBytes, expected_kernels
from deepseek_tgi.kernels.peer_sizes import lent_bytes
from deepseek_tgi.kernels.threads import usable_threads
from deepseek_tgi.kv.layout import MIN_BLOCK_SIZE, KVMode
from deepseek_tgi.launcher.check import max_input_tokens
from deepseek_tgi.launcher.gpus import gpus_for
from deepseek_tgi.launcher.model_facts import num_shards, prefill_tokens, read_facts
from deepseek_tgi.text.tokenizer import length_limit

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class CachePlan:
    """One number format of the cache, for a rank. `tokens_here` is what this machine would give; `why` if nothing."""

    mode: str
    in_use: bool
    bytes_per_token: int
    tokens_per_gib: int
    tokens_here: int
    why: str


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """Everything `info` tells of a model. `file_bytes` 0: the modules' forms are what the config declares."""

    folder: str
    model_type: str
    num_layers: int
    file_bytes: int
    notes: tuple[str, ...]
    num_shard: int
    kernels: str
    compute_dtype: str
    available_bytes: int
    weights: WeightPlan
    caches: tuple[CachePlan, ...]
    tgi: TgiNeeds


def make_plan(config: LauncherConfig, memory: MemoryReader | None = None) -> ModelPlan:
    """The plan of `config`'s model under its options. Raises what launching it would raise before tensors are read."""
    folder = resolve_folder(config.weights_cache_override or config.model_id, config.revision)
    model = read_model_config(folder)
    shards = plan_shards(model, num_shards(config))
    gpus = gpus_for(config.device or "auto", shards.world_size)
    kernels = expected_kernels(config.kernels or "auto", bool(gpus))
    compute = resolve_compute_dtype(config.dtype or "auto", bool(gpus))
    forms, notes, file_bytes = _forms(folder, model)
    weights = plan_weights(shards, forms, HeldBytes(kernels, compute))
    free = min(gpus) * len(gpus) if gpus else LinuxMemory().available_bytes()
    available = free if memory is None else memory.available_bytes()
    budgets = Budgets(config, shards, weights, available, folder, native=kernels == "native", on_gpu=bool(gpus))
    used = resolve_kv_mode(config.kv_cache_dtype or "auto", compute)
    cache_layout(model, used, config.block_size or MIN_BLOCK_SIZE)  # refuses a format that this cache cannot have
    return ModelPlan(
        folder=str(folder),
        model_type=model.model_type,
        num_layers=model.num_hidden_layers,
        file_bytes=file_bytes,
        notes=tuple(notes()),
        num_shard=shards.world_size,
        kernels=kernels,
        compute_dtype=compute.value,
        available_bytes=available,
        weights=weights,
        caches=tuple(budgets.cache(mode, mode is used) for mode in cache_modes(model)),
        tgi=tgi_needs(model, weights),
    )


def _forms(folder: Path, model: ModelConfig) -> tuple[Callable[[ModuleSpec], StoredForm], Callable[[], list[str]], int]:
    """Who says how a module is stored, what there is to note afterwards, and the size of the files."""
    if not any(folder.glob("*.safetensors*")):
        declared = DeclaredForms(model)
        return declared.form, lambda: declared.notes, 0
    from deepseek_tgi.adapters.checkpoint import Checkpoint
    from deepseek_tgi.adapters.stored_headers import StoredForms

    checkpoint = Checkpoint(folder)
    stored = StoredForms(model, checkpoint)
    return stored.form, stored.notes, checkpoint.num_bytes


@dataclass(frozen=True, slots=True)
class Budgets:
    """What the ranks, all on this machine or its GPUs, leave for their caches."""

    config: LauncherConfig
    shards: ShardPlan
    weights: WeightPlan
    available_bytes: int
    folder: Path
    native: bool
    on_gpu: bool

    def cache(self, mode: KVMode, in_use: bool) -> CachePlan:
        """The plan of one number format, on the rank that fits least."""
        layouts = [
            cache_layout(self.shards.local(rank), mode, self.config.block_size or MIN_BLOCK_SIZE)
            for rank in range(self.shards.world_size)
        ]
        layout = max(layouts, key=lambda each: each.bytes_per_block)
        tokens, why = 0, ""
        try:
            if (left := self._left()) <= 0:
                raise ResourceError(
                    f"memory: the weights alone take {self._held()} bytes, {self.available_bytes} are free"
                )
            budget = cache_budget(left, self._workspace(), self._engine())
            positions = self.shards.config.max_position_embeddings
            positions = min(positions, length_limit(self.folder) or positions)
            plan = plan_cache(layout, self._limits(), positions, budget, self._engine())
            tokens = plan.result.max_supported_total_tokens
        except ResourceError as error:
            why = str(error)
        per_gib = layout.num_blocks_in(GIB) * layout.block_size
        return CachePlan(mode.value, in_use, layout.bytes_per_token, per_gib, tokens, why)

    def _left(self) -> int:
        """Bytes a rank finds free once all weights are loaded."""
        world = self.shards.world_size
        return (self.available_bytes - self._held()) // world - lent_bytes(world, self.on_gpu)

    def _held(self) -> int:
        return sum(rank.held_bytes for rank in self.weights.ranks)

    def _workspace(self) -> int:
        model = self.shards.config
        world, threads = range(self.shards.world_size), usable_threads(self.config.num_threads or 0)
        ranks = [scratch_floats(self.shards.local(rank), self.native, threads) for rank in world]
        sizes = StepSizes(
            lambda num_tokens: max(floats(num_tokens) for floats in ranks),
            model.hidden_size,
            model.vocab_size,
            self.native,
            self.shards.world_size > 1,
        )
        return step_workspace(sizes.bytes_of, model.vocab_size, self._limits(), self._engine())

    def _engine(self) -> EngineConfig:
        settings = EngineConfig(
            request_logprobs=self.config.enable_prefill_logprobs,
            kv_memory_bytes=self.config.kv_memory,
            max_batch_size=self.config.max_batch_size,
        )
        return settings.on_gpu() if self.on_gpu else settings

    def _limits(self) -> Limits:
        limits = Limits(
            max_input_tokens(self.config),
            prefill_tokens(self.config, read_facts(self.folder)),
            self.config.max_total_tokens,
        )
        limits.check(self.shards.config.max_position_embeddings, self._engine().prefill_chunking)
        return limits
