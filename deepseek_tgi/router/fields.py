"""Typed reading of a JSON body, with one clear error for each way it can be wrong.

Choice: small readers of our own. They say `<path>: <reason>` in the words that TGI's clients know, accept aliases, and
notice repeated keys, which the fast JSON libraries drop in silence. Rejected: msgspec and pydantic, which do none of
the three and would each be one more dependency.
"""

from __future__ import annotations

import json
import math
import struct
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

import orjson

from deepseek_tgi.router.errors import PlainError, ShapeError

MAX_DEPTH = 128
"""Nesting that a body may have (serde_json's limit)."""
SHOWN_CHARACTERS = 64
_NO_BRACKETS = bytes(c for c in range(256) if c not in b"[]{}")
_STEP = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}

T = TypeVar("T")


class RepeatedKeys(dict[str, Any]):
    """An object in which some keys came twice; only typed readers mind."""

    repeated: frozenset[str] = frozenset()


def parse_json(body: bytes) -> Any:
    """The value of a body.

    Raises: `PlainError` (400) for anything that is not one JSON value in UTF-8 of at most `MAX_DEPTH` levels.
    """
    if not body.strip():
        raise _not_json("EOF while parsing a value at line 1 column 0")
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH:
        _check_depth(body)
    try:
        orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise _not_json(f"{error.msg} at line {error.lineno} column {error.colno}") from None
    return json.loads(body, object_pairs_hook=_object, parse_int=_integer)


def _check_depth(body: bytes) -> None:
    """Look at the brackets outside strings. Takes time in proportion to the body, also if its strings never end."""
    plain = body.replace(rb"\\", b"").replace(rb"\"", b"")  # now every quote begins or ends a string
    depth = 0
    for bracket in b"".join(plain.split(b'"')[::2]).translate(None, _NO_BRACKETS):
        depth += _STEP[bracket]
        if depth > MAX_DEPTH:
            raise _not_json(f"recursion limit exceeded: more than {MAX_DEPTH} levels")


def _not_json(reason: str) -> PlainError:
    return PlainError(400, f"Failed to parse the request body as JSON: {reason}")


def _integer(digits: str) -> int | float:
    return int(digits) if len(digits) <= 20 else float(digits)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) == len(pairs):
        return value
    found = RepeatedKeys(value)
    found.repeated = frozenset(key for key, times in Counter(key for key, _ in pairs).items() if times > 1)
    return found


def describe(value: object) -> str:
    """A value as serde names what it got."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return f"boolean `{str(value).lower()}`"
    if isinstance(value, int):
        return f"integer `{value}`"
    if isinstance(value, float):
        return f"floating point `{value!r}`"
    if isinstance(value, str):
        shown = value if len(value) <= SHOWN_CHARACTERS else value[:SHOWN_CHARACTERS] + "…"
        return f"string {json.dumps(shown, ensure_ascii=False)}"
    return "sequence" if isinstance(value, list) else "map"


def wrong_type(path: str, value: object, expected: str) -> ShapeError:
    """`invalid type` or, for a number out of range, `invalid value`."""
    number = (
        isinstance(value, int) and not isinstance(value, bool) and expected[0] in "iu" and expected[1:] != "sequence"
    )
    return ShapeError(path, f"invalid {'value' if number else 'type'}: {describe(value)}, expected {expected}")


def unsigned(bits: int, name: str = "") -> Callable[[Any, str], int]:
    """Reader of an unsigned integer."""
    expected = name or f"u{bits}"

    def read(value: Any, path: str) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << bits:
            raise wrong_type(path, value, expected)
        return value

    return read


def signed32(value: Any, path: str) -> int:
    """Reader of an i32."""
    if isinstance(value, bool) or not isinstance(value, int) or not -(1 << 31) <= value < 1 << 31:
        raise wrong_type(path, value, "i32")
    return value


def float32(value: Any, path: str) -> float:
    """Reader of a finite f32; integers count as numbers. The value is rounded to 32 bits as on the wire."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise wrong_type(path, value, "f32")
    try:
        rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    except OverflowError:
        rounded = math.inf
    if not math.isfinite(rounded):
        raise ShapeError(path, f"invalid value: {describe(value)}, expected f32")
    return rounded


def string(value: Any, path: str) -> str:
    """Reader of a string."""
    if not isinstance(value, str):
        raise wrong_type(path, value, "a string")
    return value


def boolean(value: Any, path: str) -> bool:
    """Reader of a boolean."""
    if not isinstance(value, bool):
        raise wrong_type(path, value, "a boolean")
    return value


def anything(value: Any, path: str) -> Any:
    """Reader that takes the value as it is."""
    return value


def list_of(item: Callable[[Any, str], T]) -> Callable[[Any, str], list[T]]:
    """Reader of a list; the path of an item carries its index."""

    def read(value: Any, path: str) -> list[T]:
        if not isinstance(value, list):
            raise wrong_type(path, value, "a sequence")
        return [item(element, f"{path}[{index}]") for index, element in enumerate(value)]

    return read


u32 = unsigned(32)
u64 = unsigned(64)
usize = unsigned(64, "usize")


class Fields:
    """The fields of one object; unknown ones are ignored, unless `only` is called."""

    __slots__ = ("_path", "_value")

    def __init__(self, value: Any, path: str, type_name: str) -> None:
        if not isinstance(value, dict):
            raise wrong_type(path, value, f"struct {type_name}")
        self._value = value
        self._path = path

    def path(self, name: str) -> str:
        """Where a field is, from the top of the body."""
        return f"{self._path}.{name}" if self._path else name

    def only(self, *known: str) -> None:
        """Raise `ShapeError` for a field that is none of `known`, where a misspelt one must not be passed over."""
        for name in self._value:
            if name not in known:
                expected = ", ".join(f"`{each}`" for each in known)
                raise ShapeError(self._path, f"unknown field `{name}`, expected one of {expected}")

    def required(self, name: str, read: Callable[[Any, str], T], *aliases: str) -> T:
        """A field that must be there."""
        found = self._find(name, aliases)
        if found is None:
            raise ShapeError(self._path, f"missing field `{name}`")
        return read(self._value[found], self.path(found))

    def plain(self, name: str, read: Callable[[Any, str], T], default: T) -> T:
        """A field that may be absent but not null."""
        found = self._find(name, ())
        return default if found is None else read(self._value[found], self.path(name))

    def optional(self, name: str, read: Callable[[Any, str], T], *aliases: str) -> T | None:
        """A field that may be absent or null."""
        found = self._find(name, aliases)
        if found is None or self._value[found] is None:
            return None
        return read(self._value[found], self.path(found))

    def _find(self, name: str, aliases: tuple[str, ...]) -> str | None:
        present = [key for key in (name, *aliases) if key in self._value]
        if len(present) > 1 or (present and present[0] in getattr(self._value, "repeated", ())):
            raise ShapeError(self._path, f"duplicate field `{name}`")
        return present[0] if present else None
