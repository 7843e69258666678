"""A Jinja environment for templates that come with a model: they cannot reach Python, nor run or grow for ever.

Choice: the parsed template is instrumented. Each loop and macro body charges a budget of steps, time and characters;
`~`, `+`, `*`, `%` and the padding methods are measured before they run. Prevents a model folder from stalling the
server. Rejected: a time limit on a thread (a thread cannot be stopped) and a child process (milliseconds a request).
"""

from __future__ import annotations

import json
import re
import threading
import time
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, TemplateRuntimeError, nodes
from jinja2.ext import Extension, do, loopcontrols
from jinja2.filters import do_center, do_format, do_indent
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_STEPS = 200_000
MAX_SECONDS = 2.0
MAX_CHARACTERS = 16_000_000
MAX_NUMBER_BITS = 4096
_WIDE = re.compile(r"[:%][^}\s]{0,64}[0-9]{6}|%[^a-zA-Z%]*\*")
_GROWING = frozenset({"ljust", "rjust", "center", "zfill", "expandtabs", "replace", "join", "format", "format_map"})


class Budget:
    """What one rendering may still use."""

    def __init__(self) -> None:
        self._steps = MAX_STEPS
        self._characters = MAX_CHARACTERS
        self._deadline = time.monotonic() + MAX_SECONDS

    def step(self, characters: int) -> None:
        """One pass of a loop or macro whose literal text has so many characters."""
        self._steps -= 1
        if self._steps < 0 or time.monotonic() > self._deadline:
            raise TemplateRuntimeError(f"the template ran for more than {MAX_STEPS} steps or {MAX_SECONDS:g} s")
        self.grow(characters)

    def grow(self, characters: int) -> None:
        """So many characters of output."""
        self._characters -= characters
        if self._characters < 0:
            raise _too_long()


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Blocks are neither trimmed nor stripped, one trailing newline is dropped, undefined names are empty."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(extensions=[loopcontrols, do, GenerationTag], finalize=self._emit)
        self._local = threading.local()
        self.globals.clear()
        self.globals.update(range=ImmutableSandboxedEnvironment().globals["range"], namespace=_namespace())
        self.globals.update(dict=dict, raise_exception=_raise_exception, strftime_now=_strftime_now)
        self.filters.update(tojson=_tojson, center=_center, indent=_indent, replace=_replace_text, format=_format)

    def prepare(self, source: str) -> tuple[Any, bool]:
        """Compile `source`; also whether it uses the variable `tools`. Raises `jinja2.TemplateError`."""
        tree = self.parse(source)
        uses_tools = any(name.name == "tools" and name.ctx == "load" for name in tree.find_all(nodes.Name))
        for body in list(tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock))):
            literal = sum(len(data.data) for data in body.find_all(nodes.TemplateData))
            charge = nodes.Call(nodes.EnvironmentAttribute("charge_step"), [nodes.Const(literal)], [], None, None)
            body.body.insert(0, nodes.ExprStmt(charge).set_lineno(body.lineno))  # type: ignore[attr-defined]
        tree = _GuardConcat().visit(tree)
        code = self.compile(tree, filename="<template>")
        return self.template_class.from_code(self, code, self.make_globals(None)), uses_tools

    def run(self, template: Any, variables: dict[str, Any]) -> str:
        """Render within a fresh budget. Raises `jinja2.TemplateError`."""
        self._local.budget = Budget()
        try:
            text: str = template.render(variables)
        except TemplateError:
            raise
        except RecursionError:
            raise TemplateRuntimeError("the template calls itself too deeply") from None
        except (ArithmeticError, AttributeError, LookupError, MemoryError, TypeError, ValueError) as error:
            raise TemplateRuntimeError(f"{type(error).__name__}: {error}") from None
        return text

    def charge_step(self, characters: int) -> None:
        """Called by instrumented bodies."""
        self._local.budget.step(characters)

    def concat_guarded(self, *parts: Any) -> str:
        """The `~` operator."""
        text = "".join(str(part) for part in parts)
        if len(text) > MAX_CHARACTERS:
            raise _too_long()
        return text

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Refuse results that would not fit before computing them."""
        _check_binop(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 - jinja's own signature
        """Refuse string methods that would pad or multiply without bound."""
        owner = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)  # `format` comes wrapped by the sandbox
        if isinstance(owner, str) and getattr(__obj, "__name__", "") in _GROWING:
            _check_growth(__obj.__name__, owner, args)
        return super().call(__context, __obj, *args, **kwargs)

    def _emit(self, value: Any) -> Any:
        if isinstance(value, str):
            budget = getattr(self._local, "budget", None)
            if budget is not None:  # constants are finalised while compiling
                budget.grow(len(value))
        return value


class GenerationTag(Extension):
    """`{% generation %}` marks training masks; here its body is ordinary text."""

    tags = {"generation"}  # noqa: RUF012 - jinja's own declaration

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The body, unchanged."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _GuardConcat(NodeTransformer):
    def visit_Concat(self, node: nodes.Concat, *args: Any, **kwargs: Any) -> nodes.Node:  # noqa: N802 - jinja's naming
        """`a ~ b` becomes a measured call."""
        self.generic_visit(node)
        call = nodes.Call(nodes.EnvironmentAttribute("concat_guarded"), node.nodes, [], None, None)
        return call.set_lineno(node.lineno)


def _namespace() -> Any:
    from jinja2.utils import Namespace

    return Namespace


def _too_long() -> TemplateRuntimeError:
    return TemplateRuntimeError(f"the template made a text of more than {MAX_CHARACTERS} characters")


def _check_binop(operator: str, left: Any, right: Any) -> None:
    sized = [len(side) for side in (left, right) if isinstance(side, str | list | tuple)]
    numbers = [side for side in (left, right) if isinstance(side, int)]
    if operator == "+" and len(sized) == 2 and sum(sized) > MAX_CHARACTERS:
        raise _too_long()
    if operator == "*" and sized and numbers and sized[0] * max(numbers[0], 0) > MAX_CHARACTERS:
        raise _too_long()
    if operator in "**" and len(numbers) == 2:
        bits = left.bit_length() * max(right, 1) if operator == "**" else left.bit_length() + right.bit_length()
        if bits > MAX_NUMBER_BITS:
            raise TemplateRuntimeError("the template computes with numbers that are too large")
    if operator == "%" and isinstance(left, str) and _WIDE.search(left):
        raise _too_long()


def _check_growth(name: str, owner: str, args: tuple[Any, ...]) -> None:
    if any(isinstance(arg, int) and arg > MAX_CHARACTERS for arg in args):
        raise _too_long()
    if name in {"format", "format_map"} and _WIDE.search(owner):
        raise _too_long()
    if name == "replace" and len(args) >= 2 and isinstance(args[0], str) and isinstance(args[1], str):
        _check_replace(owner, args[0], args[1])
    pieces = args[0] if name == "join" and args and isinstance(args[0], list | tuple) else ()
    if sum(len(str(item)) + len(owner) for item in pieces) > MAX_CHARACTERS:
        raise _too_long()


def _check_replace(text: str, old: str, new: str) -> None:
    if len(text) + text.count(old) * len(new) > MAX_CHARACTERS:
        raise _too_long()


def _raise_exception(message: str) -> None:
    raise TemplateRuntimeError(str(message))


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _tojson(value: Any, indent: int | None = None, ensure_ascii: bool = False, **how: Any) -> str:
    """Plain JSON as transformers' templates expect it: no HTML escapes, spaces after `,` and `:`."""
    allowed = {key: how[key] for key in ("separators", "sort_keys") if key in how}
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent and min(int(indent), 16), **allowed)


def _center(value: str, width: int = 80) -> str:
    if width > MAX_CHARACTERS:
        raise _too_long()
    return do_center(value, width)


def _indent(value: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    size = width if isinstance(width, int) else len(width)
    if size * (value.count("\n") + 1) > MAX_CHARACTERS:
        raise _too_long()
    return do_indent(value, width, first, blank)


def _replace_text(value: Any, old: str, new: str, count: int | None = None) -> str:
    _check_replace(str(value), old, new)
    text = str(value)
    return text.replace(old, new) if count is None else text.replace(old, new, count)


def _format(value: Any, *args: Any, **kwargs: Any) -> str:
    if _WIDE.search(str(value)):
        raise _too_long()
    return do_format(value, *args, **kwargs)
