"""Reading JSON written by strangers: a size limit, finite numbers only, and typed access that names file and key.

Knows nothing of models. `Fields` wraps one JSON object; every accessor checks type and range and raises
`CheckpointError` with the file, the dotted key, what was got and what was expected. `null` means absent, as
`transformers` treats it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from deepseek_tgi.errors import CheckpointError, UnsupportedModelError

MAX_CONFIG_BYTES = 32 * 2**20
"""Far above any real config (lists of excluded modules of large MoE models reach about 1 MB)."""
_SHOWN_CHARS = 80


def parse_json(text: bytes, source: str, unique_keys: bool = False) -> dict[str, object]:
    """Parse one JSON object. `unique_keys` refuses a repeated key instead of letting the last one win.

    Raises: `CheckpointError` for anything that is not strict UTF-8 JSON with an object at the top.
    """
    hook = _pairs_without_repeats if unique_keys else None
    try:
        value = json.loads(text.decode("utf-8"), parse_constant=_no_constant, object_pairs_hook=hook)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{source}: not valid JSON: {shown(str(error) or type(error).__name__)}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{source}: the top level is {type(value).__name__}; expected an object")
    return value


def read_json(path: Path, limit_bytes: int = MAX_CONFIG_BYTES, unique_keys: bool = False) -> dict[str, object]:
    """Read a JSON object from `path`, refusing files over `limit_bytes` before reading them."""
    try:
        with path.open("rb") as file:
            text = file.read(limit_bytes + 1)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    if len(text) > limit_bytes:
        raise CheckpointError(f"{path}: larger than {limit_bytes} bytes, the limit for this kind of file")
    return parse_json(text, str(path), unique_keys)


def shown(value: object) -> str:
    """`value` as it appears in a message: its repr (a string as it is), cut to a readable length."""
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= _SHOWN_CHARS else text[: _SHOWN_CHARS - 1] + "…"


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _pairs_without_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result: dict[str, object] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"the key {shown(key)!r} appears twice")
        result[key] = value
    return result


@dataclass(frozen=True, slots=True)
class Fields:
    """Typed access to one JSON object. `source` is the file, `prefix` the dotted path of the object within it."""

    source: str
    data: Mapping[str, object]
    prefix: str = ""

    def fail(self, key: str, expected: str) -> NoReturn:
        """Raise the error for `key`: file, key, what was got, what was expected."""
        got = "missing" if self.data.get(key) is None else shown(repr(self.data[key]))
        raise CheckpointError(f"{self.source}: {self.prefix}{key} is {got}; expected {expected}")

    def unsupported(self, key: str, instead: str) -> UnsupportedModelError:
        """The error for a value of `key` that makes sense and is not implemented; `instead` says what is."""
        got = shown(repr(self.data.get(key)))
        return UnsupportedModelError(f"{self.source}: {self.prefix}{key} {got} is not implemented; {instead}")

    def has(self, key: str) -> bool:
        """True if `key` is there and not null."""
        return self.data.get(key) is not None

    def integer(self, key: str, default: int | None = None, low: int = 1, high: int = 2**31 - 1) -> int:
        """An integer within `low..high`; required unless `default` is given."""
        value = self.data.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            self.fail(key, f"an integer from {low} to {high}")
        return value

    def number(
        self, key: str, default: float | None = None, low: float = 0.0, high: float = math.inf, above: bool = True
    ) -> float:
        """A finite number up to `high`, greater than `low` (`above`) or at least that; required without `default`."""
        value = self.data.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            self.fail(key, "a number")
        if not _is_finite(value) or not low <= value <= high or (above and value == low):
            end = "" if high == math.inf else f" up to {high:g}"
            self.fail(key, f"a finite number {'above' if above else 'of at least'} {low:g}{end}")
        return float(value)

    def optional_number(self, key: str, high: float = math.inf, above: bool = True) -> float | None:
        """As `number` from 0 on, or None when absent."""
        return self.number(key, high=high, above=above) if self.has(key) else None

    def flag(self, key: str, default: bool | None = None) -> bool:
        """A JSON boolean; required unless `default` is given."""
        value = self.data.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, bool):
            self.fail(key, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """A string; required unless `default` is given."""
        value = self.data.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, str):
            self.fail(key, "a string")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of strings; absent, null and empty are the same."""
        value = self.data.get(key)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            self.fail(key, "a list of strings")
        return tuple(value)

    def pair(self, key: str, expected: str) -> tuple[int, int]:
        """Two positive integers."""
        value = self.data.get(key)
        if not isinstance(value, list) or len(value) != 2 or not all(type(side) is int and side > 0 for side in value):
            self.fail(key, expected)
        return value[0], value[1]

    def section(self, key: str) -> Fields | None:
        """The object under `key`, or None when absent."""
        value = self.data.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            self.fail(key, "an object")
        return Fields(self.source, value, f"{self.prefix}{shown(key)}.")

    def token_ids(self, key: str) -> tuple[int, ...]:
        """Token ids given as one integer, a list or nothing. Negative ids mean "none" in old checkpoints."""
        value = self.data.get(key)
        ids: list[int] = []
        for item in value if isinstance(value, list) else [] if value is None else [value]:
            if isinstance(item, bool) or not isinstance(item, int) or item >= 2**31:
                self.fail(key, "a token id or a list of token ids")
            if item >= 0 and item not in ids:
                ids.append(item)
        return tuple(ids)


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:
        return False
