"""Every error this package raises on purpose, with what it means on each wire.

Only the two mappers (`server.interceptors`, `router.app`) and the CLI read the class attributes; everyone else
raises. A message says what, where, what was got, what was expected and what would work.
"""

from __future__ import annotations

from typing import ClassVar


class DeepseekTgiError(Exception):
    """Base of all. `grpc_code` is the name of a `grpc.StatusCode` (kept as text: no grpc import here)."""

    grpc_code: ClassVar[str] = "INTERNAL"
    http_status: ClassVar[int] = 500
    error_type: ClassVar[str] = "internal"
    exit_code: ClassVar[int] = 1
    fatal: ClassVar[bool] = False


class ConfigError(DeepseekTgiError):
    """A flag, environment variable or file of ours is wrong."""

    grpc_code = "FAILED_PRECONDITION"
    error_type = "config"
    exit_code = 2


class CheckpointError(DeepseekTgiError):
    """A model folder is unreadable, inconsistent, truncated or hostile."""

    grpc_code = "FAILED_PRECONDITION"
    error_type = "checkpoint"
    exit_code = 3


class UnsupportedModelError(CheckpointError):
    """The model is well-formed but not implemented; the message names what is."""

    grpc_code = "UNIMPLEMENTED"
    error_type = "unsupported_model"
    exit_code = 4


class ResourceError(DeepseekTgiError):
    """Memory, disk, port or process limits do not allow the work; the message gives needed and available."""

    grpc_code = "RESOURCE_EXHAUSTED"
    error_type = "resource"
    exit_code = 5


class ChildError(DeepseekTgiError):
    """A process that the launcher started has ended; nothing is restarted."""

    error_type = "child"


class RequestError(DeepseekTgiError):
    """One request is wrong; its neighbours are not touched."""

    grpc_code = "INVALID_ARGUMENT"
    http_status = 422
    error_type = "validation"


class BatchNotFoundError(DeepseekTgiError):
    """A cached batch id that the shard does not hold."""

    grpc_code = "NOT_FOUND"
    http_status = 424
    error_type = "generation"


class OverloadedError(DeepseekTgiError):
    """No permit is free; try later."""

    grpc_code = "RESOURCE_EXHAUSTED"
    http_status = 429
    error_type = "overloaded"


class NotReadyError(DeepseekTgiError):
    """The state does not admit the call (loading, draining, failed)."""

    grpc_code = "UNAVAILABLE"
    http_status = 503
    error_type = "not_ready"


class GenerationError(DeepseekTgiError):
    """A forward or sampling step failed; the shard serves on."""

    grpc_code = "INTERNAL"
    http_status = 424
    error_type = "generation"


class DeviceError(GenerationError):
    """The device itself failed: the process must leave."""

    fatal = True
