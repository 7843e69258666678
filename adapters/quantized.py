"""The `deepseek-quant` backend: config, checkpoint and kernels put together behind the adapter boundary."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch

from deepseek_tgi.adapters import ragged
from deepseek_tgi.adapters.base import LoadOptions, ModelAdapter, ModelInfo
from deepseek_tgi.adapters.cache_layout import cache_layout
from deepseek_tgi.adapters.cache_learning import prepare_cache
from deepseek_tgi.adapters.checkpoint import Checkpoint
from deepseek_tgi.adapters.devices import computing_on, resolve_device
from deepseek_tgi.adapters.dtypes import resolve_compute_dtype, resolve_kv_mode
from deepseek_tgi.adapters.gpu_steps import GpuModel, GpuSteps
from deepseek_tgi.adapters.hub import resolve_folder
from deepseek_tgi.adapters.loading import load_decoder
from deepseek_tgi.adapters.model_config import ModelConfig, read_model_config
from deepseek_tgi.adapters.models.decoder import Decoder
from deepseek_tgi.adapters.parallel import RankGroup
from deepseek_tgi.adapters.plan import plan_weights
from deepseek_tgi.adapters.quantization import resolve
from deepseek_tgi.adapters.rendezvous import Meeting, join
from deepseek_tgi.adapters.sharding import Share, plan_shards
from deepseek_tgi.adapters.stored_headers import StoredForms
from deepseek_tgi.adapters.transfer import Transfer
from deepseek_tgi.adapters.weights import WeightSource
from deepseek_tgi.core import ForwardInputs
from deepseek_tgi.errors import ConfigError
from deepseek_tgi.kernels.held_bytes import HeldBytes, expected_kernels
from deepseek_tgi.kernels.library import load as load_library
from deepseek_tgi.kernels.peer_sizes import lent_bytes
from deepseek_tgi.kernels.select import KernelSet, select_kernels
from deepseek_tgi.kernels.threads import usable_threads
from deepseek_tgi.kv.layout import CacheLayout
from deepseek_tgi.kv.pool import KVPool, LayerByLayer
from deepseek_tgi.text.tokenizer import TextTokenizer

logger = logging.getLogger(__name__)


class QuantizedModelAdapter(ModelAdapter):
    """A DeepSeek-family decoder from AWQ-INT4 (or dense) weights; made by `get_model`.

    The residual stream, norms, softmax and logits are float32 whatever the compute dtype. Takes one step at a time.
    """

    def __init__(
        self,
        decoder: Decoder,
        tokenizer: TextTokenizer,
        info: ModelInfo,
        layout: CacheLayout,
        group: RankGroup | None = None,
        *,
        gpu: GpuSteps | None = None,
    ) -> None:
        """`gpu` takes the steps of a model that is not on the CPU."""
        self._decoder = decoder
        self._group = group
        self._tokenizer = tokenizer
        self._info = info
        self._layout = layout
        self._eos_token_ids = tokenizer.eos_token_ids
        self._device = torch.device(info.device)
        self._gpu = gpu

    @classmethod
    def get_model(
        cls, model_id: str, revision: str | None = None, options: LoadOptions | None = None
    ) -> QuantizedModelAdapter:
        """Load a checkpoint folder or a downloaded hub id, or one rank's part of it.

        What cannot be served is refused before weights are read, and before other ranks are waited for.
        Raises: `CheckpointError`, `UnsupportedModelError`, `ConfigError`, `ResourceError`.
        """
        options = options or LoadOptions()
        folder = resolve_folder(model_id, revision)
        config = _with_overrides(read_model_config(folder), options)
        shards = plan_shards(config, options.world_size)
        local = shards.local(options.rank)
        device = resolve_device(options.device, options.rank, options.world_size)
        compute = resolve_compute_dtype(options.dtype, device.type == "cuda")
        layout = cache_layout(local, resolve_kv_mode(options.kv_cache_dtype, compute), options.block_size)
        tokenizer = _load_tokenizer(folder, config)
        transfer = None if device.type == "cpu" else Transfer(device)
        checkpoint = Checkpoint(folder, transfer)
        plan = resolve(config, checkpoint)
        if options.quantize is not None and not plan.label.startswith(options.quantize):
            logger.warning(
                "quantize: got %s, but %s is stored as %s, which decides", options.quantize, folder, plan.label
            )
        kernels = select_kernels(device, compute, options.kernels, _threads(options))
        group = _join(options, device)
        try:
            if group is not None:
                _share(group, kernels)
            share = Share(shards, options.rank) if group is not None else None
            source = WeightSource(plan, kernels, share, group, latent_form=options.mla_prefill)
            with computing_on(device):
                decoder = load_decoder(local, checkpoint, source, options.progress, options.report)
            if transfer is not None:
                logger.info(
                    "moved %.1f MB to %s; the host read and filled pinned memory for %.2f s of that time",
                    transfer.num_bytes / 1e6, device, transfer.host_s,
                )  # fmt: skip
            info = _describe(model_id, config, kernels, decoder, plan.label)
            model = GpuModel(decoder, kernels, config.vocab_size, options.block_size, options.cuda_graphs, group)
            gpu = None if device.type == "cpu" else GpuSteps(model, device)
            adapter = cls(decoder, tokenizer, info, layout, group, gpu=gpu)
            prepare_cache(adapter, decoder.parts)
        except BaseException as error:
            if group is not None:
                group.break_up(f"rank {options.rank}: the model was not loaded: {error or type(error).__name__}")
            raise
        return adapter

    @classmethod
    def needed_bytes(cls, model_id: str, revision: str | None = None, options: LoadOptions | None = None) -> int:
        """See `ModelAdapter`: what packing will make of the stored tensors, of which only the headers are read, and
        what ranks on GPUs lend each other.
        """
        options = options or LoadOptions()
        config = read_model_config(resolve_folder(model_id, revision))
        stored = StoredForms(config, Checkpoint(config.folder))
        on_gpu = resolve_device(options.device, options.rank, options.world_size).type == "cuda"
        held = HeldBytes(expected_kernels(options.kernels, on_gpu), resolve_compute_dtype(options.dtype, on_gpu))
        plan = plan_weights(plan_shards(config, options.world_size), stored.form, held)
        return plan.ranks[options.rank].held_bytes + lent_bytes(options.world_size, on_gpu)

    @property
    def info(self) -> ModelInfo:
        """See `ModelAdapter`; `dtype` is the precision computed in, not the one stored."""
        return self._info

    @property
    def tokenizer(self) -> TextTokenizer:
        """See `ModelAdapter`."""
        return self._tokenizer

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """See `ModelAdapter`."""
        return self._eos_token_ids

    @property
    def kv_layout(self) -> CacheLayout:
        """See `ModelAdapter`."""
        return self._layout

    def step(self, inputs: ForwardInputs, pool: KVPool) -> torch.Tensor:
        """See `ModelAdapter`; the logits belong to the caller. Every rank takes the same steps."""
        with nullcontext() if self._group is None else self._group.together():
            if self._gpu is not None:
                return self._gpu.step(inputs, pool)
            return self._decoder.step(inputs, LayerByLayer(pool))

    def step_with(self, inputs: ForwardInputs, token_ids: torch.Tensor, pool: KVPool) -> torch.Tensor | None:
        """See `ModelAdapter`; what is recorded in graphs can."""
        if self._gpu is None or self._group is not None:
            return None
        return self._gpu.step_with(inputs, token_ids, pool)

    def best_of(self, logits: torch.Tensor) -> torch.Tensor | None:
        """See `ModelAdapter`; what is recorded in graphs finds them."""
        return None if self._gpu is None else self._gpu.best_of(logits)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        """See `ModelAdapter`. Raises `RequestError` for a mask or ids that do not fit."""
        batch = ragged.pack(input_ids, attention_mask, self._info.vocab_size, self._layout.block_size)
        if not batch.num_blocks:
            return torch.zeros(*input_ids.shape, self._info.vocab_size)
        pool = KVPool(self._layout, batch.num_blocks, self._device)
        try:
            return batch.spread(self.step(batch.inputs, pool).cpu())
        finally:
            pool.close()

    def workspace_bytes(self, num_tokens: int, num_logit_rows: int) -> int:
        """See `ModelAdapter`."""
        return self._decoder.workspace_bytes(num_tokens, num_logit_rows)

    def open_pool(self, pool: KVPool, max_requests: int, max_tokens: int) -> None:
        """See `ModelAdapter`."""
        if self._gpu is not None:
            self._gpu.open_pool(pool, max_requests, max_tokens)

    def go_on_preparing(self) -> bool:
        """See `ModelAdapter`."""
        return self._gpu is not None and self._gpu.go_on_preparing()

    def close_pool(self) -> None:
        """See `ModelAdapter`."""
        if self._gpu is not None:
            self._gpu.close_pool()

    def pool_overhead_bytes(self, max_requests: int, max_tokens: int) -> int:
        """See `ModelAdapter`."""
        return 0 if self._gpu is None else self._gpu.overhead_bytes(max_requests, max_tokens)

    def park_weights(self, told: Callable[[], None]) -> int:
        """See `ModelAdapter`."""
        self._decoder.forget_scratch()
        return 0 if self._gpu is None else self._gpu.park(told)

    def restore_weights(self, told: Callable[[], None]) -> None:
        """See `ModelAdapter`."""
        if self._gpu is not None:
            self._gpu.restore(told)

    @property
    def ranks(self) -> RankGroup | None:
        """See `ModelAdapter`."""
        return self._group

    def close(self) -> None:
        """See `ModelAdapter`: leave the other ranks."""
        if self._group is not None:
            self._group.close()


def _join(options: LoadOptions, device: torch.device) -> RankGroup | None:
    if options.world_size == 1:
        return None
    return join(Meeting(options.rank, options.world_size, options.master_addr, options.master_port), device)


def _share(group: RankGroup, kernels: KernelSet) -> None:
    """Exchange through memory where that can be."""
    if kernels.device.type != "cpu":
        group.share_gpus(kernels.device)
        return
    shared = group.share_memory(load_library() if kernels.name == "native" else None)
    logger.info("ranks exchange through %s", "memory that they share" if shared else "sockets (gloo)")


def _threads(options: LoadOptions) -> int:
    """Threads of this rank: as wished, else its share, since the ranks compute at the same time."""
    return options.num_threads or max(1, usable_threads() // options.world_size)


def _with_overrides(config: ModelConfig, options: LoadOptions) -> ModelConfig:
    if options.rope_scaling is not None:
        return config.with_rope(options.rope_scaling, options.rope_factor or 1.0)
    if options.rope_factor is not None:
        raise ConfigError(f"rope_factor: got {options.rope_factor} without rope_scaling, expected both or neither")
    return config


def _load_tokenizer(folder: Path, config: ModelConfig) -> TextTokenizer:
    tokenizer = TextTokenizer.from_folder(folder)
    if tokenizer.vocab_size > config.vocab_size:
        logger.warning(
            "%s: the tokenizer has ids up to %d, the model only %d rows; a prompt with such an id is refused",
            folder, tokenizer.vocab_size - 1, config.vocab_size,
        )  # fmt: skip
    return tokenizer


def _describe(model_id: str, config: ModelConfig, kernels: KernelSet, decoder: Decoder, stored: str) -> ModelInfo:
    return ModelInfo(
        model_id=model_id,
        model_type=config.model_type,
        dtype=kernels.compute_dtype.value,
        device_type=kernels.device.type,
        device_index=kernels.device.index or 0,
        vocab_size=config.vocab_size,
        max_position_embeddings=config.max_position_embeddings,
        quantization=stored,
        weight_bytes=decoder.nbytes,
        attention_impl=f"paged-{kernels.name}",
    )
