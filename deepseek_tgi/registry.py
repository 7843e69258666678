"""Backend name to adapter class, by entry point or in process; no backend is imported before it is asked for.

A package offers a backend with an entry point of the group `deepseek_tgi.backends`; this package's own
`deepseek-quant` comes in by that same door. `module:Class` works wherever a name does, for a backend in development.
"""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING

from deepseek_tgi.errors import ConfigError

if TYPE_CHECKING:
    from deepseek_tgi.adapters.base import ModelAdapter

GROUP = "deepseek_tgi.backends"
RESERVED = "tgi"
NAME_RULE = "lower-case words of letters and digits joined by single dashes, starting with a letter, 2 to 40 characters"
BROKEN_IMPORT = (
    *(ImportError, SyntaxError, OSError, RuntimeError, NameError, AttributeError),
    *(TypeError, ValueError, LookupError, ArithmeticError, AssertionError),
)
"""What a stranger's module may raise while it is imported; not what ends a process."""
_NAME = re.compile(r"[a-z][a-z0-9]*(?:-[a-z0-9]+)*")
_TARGET = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


@dataclass(frozen=True, slots=True)
class BackendInfo:
    """Where a backend comes from. `target` is `module:Class`; nothing of it has been imported."""

    name: str
    target: str
    distribution: str
    version: str


# The registry is this module's one mutable thing: `register_backend` alone writes it, names are never replaced.
_in_process: dict[str, type[ModelAdapter]] = {}


def check_name(name: str) -> None:
    """Raise `ConfigError` unless `name` obeys the name rule; `tgi` stands for TGI's own server and is reserved."""
    if name == RESERVED:
        raise ConfigError(f"backend name {name!r} is reserved for TGI's own server; choose another")
    if not 2 <= len(name) <= 40 or not _NAME.fullmatch(name):
        raise ConfigError(f"backend name {name!r}: expected {NAME_RULE}, such as my-backend")


def check_adapter(name: str, adapter_cls: object) -> type[ModelAdapter]:
    """Return `adapter_cls` if it keeps the ABI; raise `ConfigError` saying what it lacks."""
    from deepseek_tgi.adapters.base import ABI_VERSION, ModelAdapter

    if not isinstance(adapter_cls, type) or not issubclass(adapter_cls, ModelAdapter):
        raise ConfigError(
            f"backend {name!r}: {adapter_cls!r} is not a subclass of deepseek_tgi.adapters.base.ModelAdapter"
        )
    version = getattr(adapter_cls, "abi_version", None)
    if version != ABI_VERSION:
        raise ConfigError(
            f"backend {name!r}: {adapter_cls.__qualname__} has abi_version {version!r}, this package speaks "
            f"{ABI_VERSION}; install matching versions of both"
        )
    missing = sorted(getattr(adapter_cls, "__abstractmethods__", ()))
    if missing:
        raise ConfigError(f"backend {name!r}: {adapter_cls.__qualname__} does not implement {', '.join(missing)}")
    return adapter_cls


def register_backend(name: str, adapter_cls: type[ModelAdapter]) -> None:
    """Make `adapter_cls` selectable as `name` in this process. Registering the same class again changes nothing.

    Raises `ConfigError` for a bad or taken name, or a class that does not keep the ABI.
    """
    check_name(name)
    check_adapter(name, adapter_cls)
    if _in_process.get(name) is adapter_cls:
        return
    taken = {info.name: info for info in list_backends()}
    if name in taken:
        owner = taken[name]
        raise ConfigError(
            f"backend name {name!r} is taken by {owner.target} ({owner.distribution} {owner.version}); "
            f"known: {', '.join(sorted(taken))}"
        )
    _in_process[name] = adapter_cls


def list_backends() -> list[BackendInfo]:
    """All known backends by name, imported or not. Two packages with one name give two entries."""
    found = [_info(point) for point in metadata.entry_points(group=GROUP)]
    found += [
        BackendInfo(name, f"{cls.__module__}:{cls.__qualname__}", "(this process)", "-")
        for name, cls in _in_process.items()
    ]
    return sorted(set(found), key=lambda info: (info.name, info.distribution, info.target))


def _info(point: metadata.EntryPoint) -> BackendInfo:
    owner = (point.dist.name, point.dist.version) if point.dist is not None else ("(unknown)", "-")
    target = "".join(point.value.partition("[")[0].split())  # extras of the package may follow
    return BackendInfo(point.name, target, *owner)


def load_backend(name: str) -> type[ModelAdapter]:
    """The adapter class of `name`, or of a `module:Class` spelling. Imports the backend.

    Raises `ConfigError` for an unknown, doubly offered, broken or incompatible backend.
    """
    if _TARGET.fullmatch(name):
        return check_adapter(name, _import_target(name, name))
    find_backend(name)
    if name in _in_process:
        return _in_process[name]
    return check_adapter(name, _import_target(name, find_backend(name).target))


def find_backend(name: str) -> BackendInfo:
    """Where `name` comes from, without importing it. Raises `ConfigError` if unknown, ill-named or offered twice."""
    if _TARGET.fullmatch(name):
        return BackendInfo(name, name, "(given by target)", "-")
    known = list_backends()
    check_name(name)
    matches = [info for info in known if info.name == name]
    if not matches:
        names = ", ".join(sorted({info.name for info in known})) or "none"
        raise ConfigError(f"unknown backend {name!r}; known: {names} (and tgi for TGI's own server)")
    if len(matches) > 1:
        owners = " and ".join(f"{m.distribution} {m.version} ({m.target})" for m in matches)
        raise ConfigError(f"backend name {name!r} is offered by {owners}; uninstall one, or use its module:Class")
    return matches[0]


def _import_target(name: str, target: str) -> object:
    module_name, _, attribute = target.partition(":")
    try:
        found: object = importlib.import_module(module_name)
    except BROKEN_IMPORT as error:
        raise ConfigError(f"backend {name!r}: cannot import {module_name}: {type(error).__name__}: {error}") from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise ConfigError(f"backend {name!r}: {module_name} has no {attribute}")
        found = getattr(found, part)
    return found
