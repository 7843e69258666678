"""From a shard's config to an engine: backend, weights, cache. The only place that joins adapter and engine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from deepseek_tgi.config import ShardConfig
from deepseek_tgi.registry import load_backend
from deepseek_tgi.server.engine_api import EngineApi

if TYPE_CHECKING:
    from deepseek_tgi.adapters.base import LoadOptions

Count = Callable[[str, int], None]
Report = Callable[[float], None]
"""Told how many percent of the weights are loaded; what it raises ends the load."""


def load_options(config: ShardConfig, report: Report | None = None) -> LoadOptions:
    """What the adapter needs to know of the config."""
    from deepseek_tgi.adapters.base import LoadOptions

    return LoadOptions(
        dtype=config.dtype or "auto",
        quantize=config.quantize,
        kv_cache_dtype=config.kv_cache_dtype or "auto",
        block_size=config.block_size,
        device=config.device,
        kernels=config.kernels,
        cuda_graphs=None if config.cuda_graphs is None else tuple(size for size in config.cuda_graphs if size),
        mla_prefill=config.mla_prefill,
        num_threads=config.num_threads,
        rank=config.rank,
        world_size=config.world_size,
        master_addr=config.master_addr,
        master_port=config.master_port,
        trust_remote_code=config.trust_remote_code,
        rope_scaling=config.rope_scaling,
        rope_factor=config.rope_factor,
        progress=sys.stderr.isatty(),
        report=report,
    )


def needed_bytes(config: ShardConfig) -> int | None:
    """Memory that the model's weights will take on this rank, if its backend can tell. Raises as loading does."""
    backend = load_backend(config.backend)
    return backend.needed_bytes(model_of(config), config.revision, load_options(config))


def model_of(config: ShardConfig) -> str:
    """What is really loaded: the folder that overrides the id, if there is one."""
    return config.weights_cache_override or config.model_id


def load_engine(config: ShardConfig, count: Count, report: Report | None = None) -> EngineApi:
    """Load the model and make its engine; takes as long as the weights take. Raises the taxonomy's errors.

    `count(event, times)` is told of what the engine counts.
    """
    from deepseek_tgi.engine.engine import Engine, EngineConfig
    from deepseek_tgi.engine.memory import memory_of

    options = load_options(config, report)
    adapter = load_backend(config.backend).get_model(model_of(config), config.revision, options)
    settings = EngineConfig(
        request_logprobs=config.request_logprobs,
        prefill_chunking=config.prefill_chunking,
        use_prefix_caching=config.prefix_caching,
        kv_memory_bytes=config.kv_memory or None,
        max_batch_size=config.max_batch_size,
        watermark_gamma=config.watermark_gamma,
        watermark_delta=config.watermark_delta,
        rank=config.rank,
        world_size=config.world_size,
    )
    if adapter.info.device_type != "cpu":
        settings = settings.on_gpu()
    engine: EngineApi = Engine(adapter, settings, count, memory_of(adapter.info.device, config.cuda_memory_fraction))
    return engine
