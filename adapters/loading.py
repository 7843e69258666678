"""Builds a model from a checkpoint, one layer at a time, and says what was loaded."""

from __future__ import annotations

import ctypes
import logging
import sys
import time
from collections.abc import Callable, Iterator

import torch

from deepseek_tgi.adapters.checkpoint import Checkpoint
from deepseek_tgi.adapters.layers.embedding import Embedding
from deepseek_tgi.adapters.layers.head import Head
from deepseek_tgi.adapters.layers.linear import DenseLinear, Linear
from deepseek_tgi.adapters.layers.part import Part
from deepseek_tgi.adapters.layers.rope import RopeTable
from deepseek_tgi.adapters.model_config import ModelConfig
from deepseek_tgi.adapters.models import LAYERS
from deepseek_tgi.adapters.models.decoder import Decoder, DecoderWeights
from deepseek_tgi.adapters.module_table import EMBEDDING, HEAD
from deepseek_tgi.adapters.transfer import ReadAhead
from deepseek_tgi.adapters.weights import WeightSource
from deepseek_tgi.kernels.common import PackedDense

logger = logging.getLogger(__name__)


def load_decoder(
    config: ModelConfig,
    checkpoint: Checkpoint,
    source: WeightSource,
    progress: bool = False,
    report: Callable[[float], None] | None = None,
) -> Decoder:
    """Read and pack every tensor of the model.

    With `progress`, shows a bar on stderr if that is a terminal; `report` is told the percentage after each layer.
    Raises `CheckpointError` naming the tensor.
    """
    started = time.monotonic()
    device = source.kernels.device
    parts: list[Part] = []
    ahead = None if device.type == "cpu" else ReadAhead(checkpoint.paths)
    try:
        for index in _shown(config.num_hidden_layers, progress):
            parts.extend(LAYERS[config.model_type](config, source, index))
            _give_back(checkpoint)
            if report is not None:
                report(100.0 * (index + 1) / config.num_hidden_layers)
    finally:
        if ahead is not None:
            ahead.stop()
    norm = source.norm("model.norm", config.hidden_size, config.rms_norm_eps)
    embedding, matrix = _load_ends(config, source)
    head = Head(
        norm, matrix, [len(rows) for rows in source.vocabulary(config)], source.group, source.kernels.activation_dtype
    )
    rope = RopeTable(config.rope, config.rope_dim, config.max_position_embeddings, device)
    checkpoint.skip(
        _extra_layers(config, checkpoint),
        f"layers from {config.num_hidden_layers} on predict further tokens (num_nextn_predict_layers "
        f"{config.num_extra_layers}); they are not used",
    )
    checkpoint.finish()
    _give_back(checkpoint)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()  # what unpacking took
        torch.cuda.reset_peak_memory_stats(device)  # steps are measured by peaks of their own
    decoder = Decoder(DecoderWeights(embedding, parts, head, rope), source.kernels, device)
    stored = ", ".join(f"{count} {name}" for name, count in sorted(source.formats.items()))
    logger.info(
        "%s: loaded %s, %d layers (%s modules), %.1f MB on disk, %.1f MB in memory, %.2f s",
        config.folder, config.model_type, config.num_hidden_layers, stored, checkpoint.num_bytes / 1e6,
        decoder.nbytes / 1e6, time.monotonic() - started,
    )  # fmt: skip
    return decoder


def _load_ends(config: ModelConfig, source: WeightSource) -> tuple[Embedding, Linear]:
    """The embedding and the output matrix; one storage for both when tied."""
    head = source.output_head(HEAD, EMBEDDING, config)
    if config.tie_word_embeddings:
        assert isinstance(head, DenseLinear), "a tied head is the dense embedding"
        table: torch.Tensor | PackedDense = head.weight
    else:
        table = source.table(EMBEDDING, HEAD, config)
    rows = source.vocabulary(config)[0 if source.group is None else source.group.rank]
    return Embedding(source.kernels.embedding, table, rows, source.group), head


def _extra_layers(config: ModelConfig, checkpoint: Checkpoint) -> list[str]:
    """Tensors of the layers behind the model's own (multi-token prediction); the model answers without them."""
    first, last = config.num_hidden_layers, config.num_hidden_layers + config.num_extra_layers
    prefixes = tuple(f"model.layers.{index}." for index in range(first, last))
    return [name for name in checkpoint.names() if prefixes and name.startswith(prefixes)]


def _give_back(checkpoint: Checkpoint) -> None:
    """Return what unpacking a layer took: mapped pages, and freed memory that glibc would keep (a third of a model)."""
    checkpoint.release()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _shown(num_layers: int, progress: bool) -> Iterator[int]:
    if progress and sys.stderr.isatty():
        from tqdm import tqdm

        yield from tqdm(range(num_layers), desc="loading", unit="layer", file=sys.stderr, leave=False)
    else:
        yield from range(num_layers)
