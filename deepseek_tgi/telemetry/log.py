"""Log lines in the three forms their readers expect; stdlib `logging` everywhere else.

`shard`: what TGI's launcher parses (`text`, `record.level.name`), one write a line and never over 4 KiB, so that no
line is cut by the pipe. `tracing`: the JSON that TGI's launcher and router print. `plain`: for people.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from typing import Any

MAX_SHARD_LINE_BYTES = 4096
"""A write of up to PIPE_BUF bytes to a pipe is atomic; TGI's launcher loses a line cut by a read boundary."""
MAX_TRACING_LINE_BYTES = 32768
"""The launcher's own lines carry the end of a dead shard's stderr."""

TRACE = 5
OFF = 100
LEVELS = {
    "off": OFF,
    "critical": logging.CRITICAL,
    "error": logging.ERROR,
    "warn": logging.WARNING,
    "warning": logging.WARNING,
    "success": logging.INFO,
    "info": logging.INFO,
    "debug": logging.DEBUG,
    "trace": TRACE,
}
SHARD_LEVEL_NAMES = {TRACE: "TRACE", 10: "DEBUG", 20: "INFO", 30: "WARNING", 40: "ERROR", 50: "CRITICAL"}
TRACING_LEVEL_NAMES = {TRACE: "TRACE", 10: "DEBUG", 20: "INFO", 30: "WARN", 40: "ERROR", 50: "ERROR"}
_SECRET_NAMES = (
    *("HF_TOKEN", "HF_API_TOKEN", "HUGGING_FACE_HUB_TOKEN", "API_KEY", "NGROK_AUTHTOKEN"),
    "DEEPSEEK_TGI_ADMIN_TOKEN",
)

Formatter = Callable[[logging.LogRecord, str], str]


def level_of(name: str) -> int:
    """Number of a level name of either world, any case; INFO for a filter string that is no level."""
    return LEVELS.get(name.strip().lower(), logging.INFO)


def _named(names: Mapping[int, str], level: int) -> str:
    return names[max((known for known in names if known <= level), default=TRACE)]


def _utc(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    """Ids and numbers given as `extra={"fields": {...}}`."""
    fields = getattr(record, "fields", None)
    return dict(fields) if isinstance(fields, Mapping) else {}


_ESCAPED = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
"""Control characters as Python spells them, for `str.translate`."""


def shard_line(record: logging.LogRecord, message: str) -> str:
    """One JSON object as loguru writes it, cut down to what TGI's launcher reads."""
    fields = "".join(f" {key}={value}" for key, value in _fields(record).items())
    head = {"level": {"name": _named(SHARD_LEVEL_NAMES, record.levelno)}, "name": record.name, "time": _utc(record)}
    return fit(lambda text: json.dumps({"text": text, "record": head}), message + fields, MAX_SHARD_LINE_BYTES)


def tracing_line(record: logging.LogRecord, message: str) -> str:
    """One JSON object as Rust's `tracing` writes it."""
    head = {"timestamp": _utc(record), "level": _named(TRACING_LEVEL_NAMES, record.levelno)}
    tail = {"target": record.name.replace(".", "::"), "filename": record.filename, "line_number": record.lineno}
    fields = _fields(record)

    def render(text: str) -> str:
        return json.dumps({**head, "fields": {"message": text, **fields}, **tail}, ensure_ascii=False)

    return fit(render, message, MAX_TRACING_LINE_BYTES)


def plain_line(record: logging.LogRecord, message: str) -> str:
    """`time LEVEL target: message key=value`; further lines of a message are indented.

    What a client sent can stand in a message: it neither commands the terminal nor begins a line like one of ours.
    """
    fields = "".join(f" {key}={value}" for key, value in _fields(record).items())
    shown = (message + fields).translate(_ESCAPED).replace("\n", "\n  ")
    return f"{_utc(record)} {_named(TRACING_LEVEL_NAMES, record.levelno):>5} {record.name}: {shown}"


def fit(render: Callable[[str], str], text: str, max_bytes: int) -> str:
    """`render(text)`, cutting `text` at its end until the line and its newline fit in `max_bytes`."""
    line = render(text)
    while len(line.encode(errors="replace")) + 1 > max_bytes and text:
        keep = max(0, min(len(text) - 64, max_bytes) * 7 // 8)
        text = text[:keep]
        line = render(text + " … (cut)")
    return line


FORMS: Mapping[str, Formatter] = {"shard": shard_line, "tracing": tracing_line, "plain": plain_line}


class LineHandler(logging.Handler):
    """Writes each record as one line with one `write`; a reader that went away is not an error of ours.

    Values of the secret environment names never reach a line.
    """

    def __init__(self, form: str, descriptor: int, secrets: tuple[str, ...] = ()) -> None:
        super().__init__()
        self._render = FORMS[form]
        self._descriptor = descriptor
        self._secrets = secrets

    def emit(self, record: logging.LogRecord) -> None:
        """Write `record`; formatting errors are reported as stdlib logging does."""
        try:
            message = record.getMessage()
            if record.exc_info:
                message += "\n" + logging.Formatter().formatException(record.exc_info)
            for secret in self._secrets:
                message = message.replace(secret, "***")
            os.write(self._descriptor, (self._render(record, message) + "\n").encode(errors="replace"))
        except OSError:
            return
        except (TypeError, ValueError):
            self.handleError(record)


def configure(form: str, level: str, environ: Mapping[str, str], descriptor: int = 1) -> None:
    """Send our records, and other packages' warnings, to `descriptor` in `form`.

    `level` is any of `LEVELS`, or a filter string of TGI's launcher (`info,text_generation_router=debug`), of which the
    first plain level counts.
    """
    secrets = tuple(value for name in _SECRET_NAMES if len(value := environ.get(name, "")) >= 8)
    number = level_of(next((part for part in level.split(",") if part.strip().lower() in LEVELS), level))
    logging.addLevelName(TRACE, "TRACE")
    root = logging.getLogger()
    root.handlers[:] = [LineHandler(form, descriptor, secrets)]
    root.setLevel(max(number, logging.WARNING))
    logging.getLogger("deepseek_tgi").setLevel(number)
    logging.captureWarnings(True)


def configured() -> bool:
    """True once `configure` has been called: before that, an error can only go to stderr as it is."""
    return any(isinstance(handler, LineHandler) for handler in logging.getLogger().handlers)
