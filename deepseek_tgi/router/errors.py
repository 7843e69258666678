"""What the door answers when it refuses or fails: each class carries its status, its `error_type` and its metric label.

`app.py` and `sse.py` read these attributes; nobody else translates.
"""

from __future__ import annotations

from typing import ClassVar

from deepseek_tgi.errors import DeepseekTgiError, GenerationError, RequestError


class PlainError(DeepseekTgiError):
    """A request that never reaches a handler; answered as plain text, an empty text as an empty body."""

    def __init__(self, status: int, text: str = "") -> None:
        super().__init__(text)
        self.status = status


class ShapeError(PlainError):
    """Valid JSON that does not fit the request's type: 422, `<path>: <reason>`."""

    def __init__(self, path: str, reason: str) -> None:
        where = f"{path}: " if path else ""
        super().__init__(422, f"Failed to deserialize the JSON body into the target type: {where}{reason}")
        self.path = path
        self.reason = reason


class ValidationError(RequestError):
    """A value that the rules of the API or the limits of this server do not allow."""

    def __init__(self, rule: str) -> None:
        super().__init__(f"Input validation error: {rule}")


class ShardError(GenerationError):
    """The shard answered a call with an error, whose status is `code` (the name of a `grpc.StatusCode`)."""

    def __init__(self, message: str, code: str = "INTERNAL") -> None:
        super().__init__(f"Request failed during generation: Server error: {message}")
        self.code = code
        self.detail = message


class ModelChangeError(DeepseekTgiError):
    """A model could not be loaded, swapped or unloaded; `kind` is what it would be in the process that refused."""

    grpc_code = "FAILED_PRECONDITION"
    http_status = 409
    error_type = "model_change"

    def __init__(self, reason: str, kind: type[DeepseekTgiError] = DeepseekTgiError) -> None:
        super().__init__(reason)
        self.kind = kind


class IncompleteGenerationError(DeepseekTgiError):
    """The shard stopped naming a request that was not finished."""

    error_type = "incomplete_generation"

    def __init__(self) -> None:
        super().__init__("Incomplete generation")


class IncompleteStreamError(IncompleteGenerationError):
    """The same, told inside a stream."""

    error_type = "incomplete_generation_stream"

    def __init__(self) -> None:
        DeepseekTgiError.__init__(self, "Incomplete generation stream")


class ToolError(RequestError):
    """Tools that cannot be offered, or a tool call that cannot be read."""

    error_type = "tool_error"

    def __init__(self, text: str) -> None:
        super().__init__(f"Tool error: {text}")


class SuffixError(RequestError):
    """`/v1/completions` with a `suffix`."""

    error_type = "suffix not supported"

    def __init__(self) -> None:
        super().__init__("Suffix is not supported and can be achieved by preprocessing the prompt.")


class BatchSizeError(RequestError):
    """`/v1/completions` with too many prompts."""

    error_type = "batch size exceeded"

    def __init__(self, limit: int) -> None:
        super().__init__(f"Number of prompts exceeds the maximum allowed batch size of {limit}")


class UnhealthyError(DeepseekTgiError):
    """The shard did not pass its liveness check."""

    http_status = 503
    error_type = "healthcheck"

    def __init__(self) -> None:
        super().__init__("unhealthy")


class FailureLabel:
    """Values of the `err` label of `tgi_request_failure`."""

    BY_TYPE: ClassVar[dict[str, str]] = {
        "overloaded": "overloaded",
        "validation": "validation",
        "template_error": "template",
        "incomplete_generation": "incomplete",
        "incomplete_generation_stream": "incomplete",
        "generation": "generation",
    }
