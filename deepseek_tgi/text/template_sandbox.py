"""A Jinja environment for templates that come with a model: they cannot reach Python, nor run or grow for ever.

Choice: the parsed template is instrumented. Each loop and macro body charges a budget of steps, time and characters;
operators, filters, methods and lists are measured, those that pad or multiply before they run. Prevents a model folder
from stalling the server. Rejected: a time limit on a thread (a thread cannot be stopped) and a child process
(milliseconds a request).
"""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Callable
from datetime import datetime
from typing import Any

from jinja2 import Environment, TemplateError, TemplateRuntimeError, nodes, pass_environment
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, do, loopcontrols
from jinja2.filters import do_center, do_format, do_indent, make_attrgetter
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from deepseek_tgi.text.template_limits import (
    GROWING,
    Budget,
    check_binop,
    check_format,
    check_join,
    check_length,
    check_method,
    check_replace,
    size,
)

UNBOUNDED_FILTERS = ("batch", "slice", "wordwrap", "urlize", "xmlattr", "striptags", "forceescape", "pprint")
"""Filters whose work or result has no bound that could be told before, and which no chat template needs."""
UNBOUNDED_METHODS = frozenset({"translate", "maketrans", "encode"})


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
        self.filters.update(join=_join)
        for name in UNBOUNDED_FILTERS:
            del self.filters[name]
        self.filters = {name: self._measuring(filter_) for name, filter_ in self.filters.items()}

    def prepare(self, source: str) -> tuple[Any, bool]:
        """Compile `source`; also whether it uses the variable `tools`. Raises `jinja2.TemplateError`."""
        tree = self.parse(source)
        uses_tools = any(name.name == "tools" and name.ctx == "load" for name in tree.find_all(nodes.Name))
        for body in list(tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock))):
            literal = sum(len(data.data) for data in body.find_all(nodes.TemplateData))
            charge = nodes.Call(nodes.EnvironmentAttribute("charge_step"), [nodes.Const(literal)], [], None, None)
            body.body.insert(0, nodes.ExprStmt(charge).set_lineno(body.lineno))  # type: ignore[attr-defined]
        tree = _Guard().visit(tree)
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
        check_length(sum(map(size, parts)))
        text: str = self.measured("".join(map(str, parts)))
        return text

    def measured(self, value: Any) -> Any:
        """`value`, charged to the budget if it is a text or a container."""
        budget = getattr(self._local, "budget", None)
        if budget is not None:  # constants are folded while compiling
            budget.build(size(value))
        return value

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Refuse results that would not fit before computing them."""
        check_binop(operator, left, right)
        return self.measured(super().call_binop(context, operator, left, right))

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 - jinja's own signature
        """Call what is no method, or a method of a text, list or dict whose result fits."""
        owner = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)  # `format` comes wrapped by the sandbox
        if owner is __self:
            return super().call(__context, __obj, *args, **kwargs)
        name = getattr(__obj, "__name__", "")
        if isinstance(owner, int | float | bytes) or (isinstance(owner, str) and name in UNBOUNDED_METHODS):
            raise SecurityError(f"method {name!r} is not allowed in a template")
        if isinstance(owner, str) and name in GROWING:
            if name == "join" and args and not isinstance(args[0], str):
                args = (list(args[0]), *args[1:])
            check_method(name, owner, args)
        return __self.measured(super().call(__context, __obj, *args, **kwargs))

    def _measuring(self, filter_: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(filter_)
        def run(*args: Any, **kwargs: Any) -> Any:
            return self.measured(filter_(*args, **kwargs))

        return run

    def _emit(self, value: Any) -> Any:
        budget = getattr(self._local, "budget", None)
        if budget is not None:
            budget.grow(size(value))
        return value


class GenerationTag(Extension):
    """`{% generation %}` marks training masks; here its body is ordinary text."""

    tags = {"generation"}  # noqa: RUF012 - jinja's own declaration

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The body, unchanged."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Guard(NodeTransformer):
    """Puts measured calls where jinja would compute by itself."""

    def visit_Concat(self, node: nodes.Concat, *args: Any, **kwargs: Any) -> nodes.Node:  # noqa: N802 - jinja's naming
        """`a ~ b`."""
        self.generic_visit(node)
        return _called("concat_guarded", node, node.nodes)

    def visit_List(self, node: nodes.List, *args: Any, **kwargs: Any) -> nodes.Node:  # noqa: N802 - jinja's naming
        """`[a, b]`: lists that share lists print as much more than they hold."""
        self.generic_visit(node)
        return _called("measured", node, [node])

    def visit_Dict(self, node: nodes.Dict, *args: Any, **kwargs: Any) -> nodes.Node:  # noqa: N802 - jinja's naming
        """`{a: b}`."""
        self.generic_visit(node)
        return _called("measured", node, [node])

    def visit_Tuple(self, node: nodes.Tuple, *args: Any, **kwargs: Any) -> nodes.Node:  # noqa: N802 - jinja's naming
        """`(a, b)`, where it is not assigned to."""
        self.generic_visit(node)
        return _called("measured", node, [node]) if node.ctx == "load" else node


def _called(name: str, node: nodes.Node, arguments: list[nodes.Expr]) -> nodes.Node:
    return nodes.Call(nodes.EnvironmentAttribute(name), arguments, [], None, None).set_lineno(node.lineno)


def _namespace() -> Any:
    from jinja2.utils import Namespace

    return Namespace


def _raise_exception(message: str) -> None:
    raise TemplateRuntimeError(str(message))


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _tojson(value: Any, indent: int | None = None, ensure_ascii: bool = False, **how: Any) -> str:
    """Plain JSON as transformers' templates expect it: no HTML escapes, spaces after `,` and `:`."""
    allowed = {key: how[key] for key in ("separators", "sort_keys") if key in how}
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent and min(int(indent), 16), **allowed)


def _center(value: str, width: int = 80) -> str:
    check_length(width)
    return do_center(value, width)


def _indent(value: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    columns = width if isinstance(width, int) else len(width)
    check_length(len(value) + columns * (value.count("\n") + 1))
    return do_indent(value, width, first, blank)


def _replace_text(value: Any, old: str, new: str, count: int | None = None) -> str:
    text = str(value)
    check_replace(text, old, new)
    return text.replace(old, new) if count is None else text.replace(old, new, count)


def _format(value: Any, *args: Any, **kwargs: Any) -> str:
    check_format(str(value))
    return do_format(value, *args, **kwargs)


@pass_environment
def _join(environment: Environment, value: Any, d: str = "", attribute: str | int | None = None) -> str:
    items = list(value)
    if attribute is not None:
        items = list(map(make_attrgetter(environment, attribute), items))
    check_join(str(d), items)
    return str(d).join(map(str, items))
