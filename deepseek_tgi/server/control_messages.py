"""Messages of `ModelControl` to values and back."""

from __future__ import annotations

from deepseek_tgi.errors import ConfigError
from deepseek_tgi.pb import control_pb2 as pb
from deepseek_tgi.server.loader import Loaded
from deepseek_tgi.server.models import Demand, Held, Source


def source_of(message: pb.Source) -> Source:
    """Where to load from. Raises `ConfigError` without a model."""
    if not message.model_id:
        raise ConfigError("load: no model; expected a hub id or a folder")
    return Source(
        message.model_id,
        message.revision if message.HasField("revision") else None,
        message.quantize if message.HasField("quantize") else None,
        message.manifest_sha256 if message.HasField("manifest_sha256") else None,
    )


def demand_of(message: pb.Limits) -> Demand:
    """The limits that are asked for."""
    return Demand(
        message.max_input_tokens if message.HasField("max_input_tokens") else None,
        message.max_prefill_tokens,
        message.max_total_tokens if message.HasField("max_total_tokens") else None,
    )


def loaded_pb(held: Held, loaded: Loaded) -> pb.LoadedModel:
    """What a router must know to serve the model."""
    info, limits = held.info, loaded.limits
    return pb.LoadedModel(
        generation=held.generation,
        model_id=held.source.model_id,
        revision=held.source.revision or "",
        folder=str(loaded.folder),
        dtype=info.dtype,
        device_type=info.device_type,
        block_size=info.block_size,
        support_chunking=info.support_chunking,
        use_prefix_caching=info.use_prefix_caching,
        weight_bytes=loaded.facts.weight_bytes,
        max_supported_total_tokens=limits.max_supported_total_tokens,
        max_input_tokens=limits.max_input_tokens,
        max_total_tokens=limits.max_total_tokens,
        quantization=loaded.facts.quantization,
        tokenizer_sha256=loaded.tokenizer_sha256,
        seconds=loaded.seconds,
    )


def status_pb(held: Held) -> pb.ModelStatus:
    facts = None if held.engine is None else held.engine.facts()
    return pb.ModelStatus(
        generation=held.generation,
        model_id=held.source.model_id,
        revision=held.source.revision or "",
        state="sleeping" if held.asleep else "ready",
        weight_bytes=0 if facts is None else facts.weight_bytes,
        cache_bytes=0 if facts is None else facts.cache_bytes,
    )
