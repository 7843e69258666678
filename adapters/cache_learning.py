"""Makes a loaded model ready for a low-bit cache of keys and values, and says what it found."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from deepseek_tgi.adapters.base import ModelAdapter
from deepseek_tgi.adapters.cache_scales import report_cache_scales
from deepseek_tgi.adapters.key_frames import FEWEST_TOKENS, LARGEST_SCORE_ERROR, MAX_TOKENS, TEXT
from deepseek_tgi.adapters.layers.attention import Attention
from deepseek_tgi.adapters.layers.part import Part
from deepseek_tgi.core import ForwardInputs
from deepseek_tgi.kv.layout import KVLayout, KVMode
from deepseek_tgi.kv.pool import KVPool

logger = logging.getLogger(__name__)


def prepare_cache(adapter: ModelAdapter, parts: Sequence[Part]) -> None:
    """What the cache's format needs of `adapter`, whose layers are `parts`; on several ranks, all of them call this."""
    layout = adapter.kv_layout
    layers = [part for part in parts if isinstance(part, Attention)]
    if not isinstance(layout, KVLayout) or not layers:
        return
    if layout.mode is KVMode.FP8:
        frames = [layer.frame for layer in layers]
        report_cache_scales([(None, None) if f is None else (f.k_scale, f.v_scale) for f in frames])
    if layout.mode is KVMode.INT4:
        _learn(adapter, layout, layers)


def _learn(adapter: ModelAdapter, layout: KVLayout, layers: Sequence[Attention]) -> None:
    """Read the fixed text once, over a float32 cache, and keep each layer's frame."""
    limit = min(MAX_TOKENS, adapter.info.max_position_embeddings)
    known = [token for token in adapter.tokenizer.encode(TEXT) if token < adapter.info.vocab_size]
    ids = known[:limit]
    if len(ids) < FEWEST_TOKENS:
        logger.warning("kv cache: int4: the model can read %d tokens only, too few to learn its keys from", len(ids))
        return
    learning = [layer.start_learning() for layer in layers]
    pool = KVPool(layout.with_mode(KVMode.FLOAT32), -(-len(ids) // layout.block_size), adapter.info.device)
    try:
        adapter.step(_inputs(ids, layout.block_size), pool)
    finally:
        pool.close()
        for layer in layers:
            layer.finish_learning()
    failed = [index for index, layer in enumerate(learning) if layer.frame is None]
    if failed:
        logger.warning("kv cache: int4: keys of layer %d (and of %d more) are not finite", failed[0], len(failed) - 1)
    worst = max(range(len(layers)), key=lambda index: learning[index].score_error)
    error = learning[worst].score_error
    logger.info(
        "kv cache: int4: learned %d layers' keys from %d tokens; scores are off by up to %.2f nats (layer %d)",
        len(layers) - len(failed), len(ids), error, worst,
    )  # fmt: skip
    if error > LARGEST_SCORE_ERROR:
        logger.warning(
            "kv cache: int4: scores of layer %d are off by %.2f nats, more than the %.2f that models stand well; int8 "
            "or fp8_e4m3fn would keep them", worst, error, LARGEST_SCORE_ERROR,
        )  # fmt: skip


def _inputs(ids: Sequence[int], block_size: int) -> ForwardInputs:
    """One sequence in the first blocks of a pool, one row of logits wanted."""
    count = len(ids)
    return ForwardInputs(
        input_ids=torch.tensor(ids),
        positions=torch.arange(count, dtype=torch.int32),
        slots=torch.arange(count),
        cu_seqlens=torch.tensor([0, count], dtype=torch.int32),
        block_tables=torch.arange(-(-count // block_size), dtype=torch.int32).unsqueeze(0),
        cache_lens=torch.zeros(1, dtype=torch.int32),
        logit_rows=torch.tensor([count - 1]),
        max_seqlen=count,
        max_context=count,
    )
