from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WatchRequest(_message.Message):
    __slots__ = ("from_seq", "heartbeat_ms")
    FROM_SEQ_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_MS_FIELD_NUMBER: _ClassVar[int]
    from_seq: int
    heartbeat_ms: int
    def __init__(self, from_seq: _Optional[int] = ..., heartbeat_ms: _Optional[int] = ...) -> None: ...

class Increment(_message.Message):
    __slots__ = ("kind", "seq", "state", "age_ms", "stage", "percent", "model_id", "generation", "reason", "event", "progress_age_ms", "busy")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        SNAPSHOT: _ClassVar[Increment.Kind]
        CHANGE: _ClassVar[Increment.Kind]
        HEARTBEAT: _ClassVar[Increment.Kind]
    SNAPSHOT: Increment.Kind
    CHANGE: Increment.Kind
    HEARTBEAT: Increment.Kind
    KIND_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    AGE_MS_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    PERCENT_FIELD_NUMBER: _ClassVar[int]
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    EVENT_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_AGE_MS_FIELD_NUMBER: _ClassVar[int]
    BUSY_FIELD_NUMBER: _ClassVar[int]
    kind: Increment.Kind
    seq: int
    state: str
    age_ms: int
    stage: str
    percent: float
    model_id: str
    generation: int
    reason: str
    event: str
    progress_age_ms: int
    busy: bool
    def __init__(self, kind: _Optional[_Union[Increment.Kind, str]] = ..., seq: _Optional[int] = ..., state: _Optional[str] = ..., age_ms: _Optional[int] = ..., stage: _Optional[str] = ..., percent: _Optional[float] = ..., model_id: _Optional[str] = ..., generation: _Optional[int] = ..., reason: _Optional[str] = ..., event: _Optional[str] = ..., progress_age_ms: _Optional[int] = ..., busy: _Optional[bool] = ...) -> None: ...

class Limits(_message.Message):
    __slots__ = ("max_input_tokens", "max_prefill_tokens", "max_total_tokens", "max_batch_size")
    MAX_INPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOTAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    max_input_tokens: int
    max_prefill_tokens: int
    max_total_tokens: int
    max_batch_size: int
    def __init__(self, max_input_tokens: _Optional[int] = ..., max_prefill_tokens: _Optional[int] = ..., max_total_tokens: _Optional[int] = ..., max_batch_size: _Optional[int] = ...) -> None: ...

class Source(_message.Message):
    __slots__ = ("model_id", "revision", "quantize", "manifest_sha256")
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    QUANTIZE_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_SHA256_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    revision: str
    quantize: str
    manifest_sha256: str
    def __init__(self, model_id: _Optional[str] = ..., revision: _Optional[str] = ..., quantize: _Optional[str] = ..., manifest_sha256: _Optional[str] = ...) -> None: ...

class LoadRequest(_message.Message):
    __slots__ = ("generation", "source", "limits", "kv_memory_bytes", "compatible")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    KV_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    COMPATIBLE_FIELD_NUMBER: _ClassVar[int]
    generation: int
    source: Source
    limits: Limits
    kv_memory_bytes: int
    compatible: bool
    def __init__(self, generation: _Optional[int] = ..., source: _Optional[_Union[Source, _Mapping]] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ..., kv_memory_bytes: _Optional[int] = ..., compatible: _Optional[bool] = ...) -> None: ...

class LoadProgress(_message.Message):
    __slots__ = ("stage", "percent", "loaded")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    PERCENT_FIELD_NUMBER: _ClassVar[int]
    LOADED_FIELD_NUMBER: _ClassVar[int]
    stage: str
    percent: float
    loaded: LoadedModel
    def __init__(self, stage: _Optional[str] = ..., percent: _Optional[float] = ..., loaded: _Optional[_Union[LoadedModel, _Mapping]] = ...) -> None: ...

class LoadedModel(_message.Message):
    __slots__ = ("generation", "model_id", "revision", "folder", "dtype", "device_type", "block_size", "support_chunking", "use_prefix_caching", "weight_bytes", "max_supported_total_tokens", "max_input_tokens", "max_total_tokens", "quantization", "tokenizer_sha256", "seconds")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_TYPE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    SUPPORT_CHUNKING_FIELD_NUMBER: _ClassVar[int]
    USE_PREFIX_CACHING_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_SUPPORTED_TOTAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_INPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOTAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUANTIZATION_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_SHA256_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    generation: int
    model_id: str
    revision: str
    folder: str
    dtype: str
    device_type: str
    block_size: int
    support_chunking: bool
    use_prefix_caching: bool
    weight_bytes: int
    max_supported_total_tokens: int
    max_input_tokens: int
    max_total_tokens: int
    quantization: str
    tokenizer_sha256: str
    seconds: float
    def __init__(self, generation: _Optional[int] = ..., model_id: _Optional[str] = ..., revision: _Optional[str] = ..., folder: _Optional[str] = ..., dtype: _Optional[str] = ..., device_type: _Optional[str] = ..., block_size: _Optional[int] = ..., support_chunking: _Optional[bool] = ..., use_prefix_caching: _Optional[bool] = ..., weight_bytes: _Optional[int] = ..., max_supported_total_tokens: _Optional[int] = ..., max_input_tokens: _Optional[int] = ..., max_total_tokens: _Optional[int] = ..., quantization: _Optional[str] = ..., tokenizer_sha256: _Optional[str] = ..., seconds: _Optional[float] = ...) -> None: ...

class PublishRequest(_message.Message):
    __slots__ = ("generation",)
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    generation: int
    def __init__(self, generation: _Optional[int] = ...) -> None: ...

class PublishResponse(_message.Message):
    __slots__ = ("before",)
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    before: int
    def __init__(self, before: _Optional[int] = ...) -> None: ...

class UnloadRequest(_message.Message):
    __slots__ = ("generation",)
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    generation: int
    def __init__(self, generation: _Optional[int] = ...) -> None: ...

class UnloadResponse(_message.Message):
    __slots__ = ("freed_bytes",)
    FREED_BYTES_FIELD_NUMBER: _ClassVar[int]
    freed_bytes: int
    def __init__(self, freed_bytes: _Optional[int] = ...) -> None: ...

class DiscardRequest(_message.Message):
    __slots__ = ("generation", "blocks")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    generation: int
    blocks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, generation: _Optional[int] = ..., blocks: _Optional[_Iterable[int]] = ...) -> None: ...

class DiscardResponse(_message.Message):
    __slots__ = ("freed_bytes",)
    FREED_BYTES_FIELD_NUMBER: _ClassVar[int]
    freed_bytes: int
    def __init__(self, freed_bytes: _Optional[int] = ...) -> None: ...

class SleepRequest(_message.Message):
    __slots__ = ("generation", "drop_weights", "keep_pages")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    DROP_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    KEEP_PAGES_FIELD_NUMBER: _ClassVar[int]
    generation: int
    drop_weights: bool
    keep_pages: bool
    def __init__(self, generation: _Optional[int] = ..., drop_weights: _Optional[bool] = ..., keep_pages: _Optional[bool] = ...) -> None: ...

class SleepResponse(_message.Message):
    __slots__ = ("freed_bytes",)
    FREED_BYTES_FIELD_NUMBER: _ClassVar[int]
    freed_bytes: int
    def __init__(self, freed_bytes: _Optional[int] = ...) -> None: ...

class WakeRequest(_message.Message):
    __slots__ = ("generation",)
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    generation: int
    def __init__(self, generation: _Optional[int] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusResponse(_message.Message):
    __slots__ = ("models", "published", "available_bytes", "newest")
    MODELS_FIELD_NUMBER: _ClassVar[int]
    PUBLISHED_FIELD_NUMBER: _ClassVar[int]
    AVAILABLE_BYTES_FIELD_NUMBER: _ClassVar[int]
    NEWEST_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[ModelStatus]
    published: int
    available_bytes: int
    newest: int
    def __init__(self, models: _Optional[_Iterable[_Union[ModelStatus, _Mapping]]] = ..., published: _Optional[int] = ..., available_bytes: _Optional[int] = ..., newest: _Optional[int] = ...) -> None: ...

class ModelStatus(_message.Message):
    __slots__ = ("generation", "model_id", "revision", "state", "stage", "percent", "weight_bytes", "cache_bytes", "reason")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    PERCENT_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    CACHE_BYTES_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    generation: int
    model_id: str
    revision: str
    state: str
    stage: str
    percent: float
    weight_bytes: int
    cache_bytes: int
    reason: str
    def __init__(self, generation: _Optional[int] = ..., model_id: _Optional[str] = ..., revision: _Optional[str] = ..., state: _Optional[str] = ..., stage: _Optional[str] = ..., percent: _Optional[float] = ..., weight_bytes: _Optional[int] = ..., cache_bytes: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...
