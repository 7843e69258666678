"""Options as data: one dataclass field is one flag, one environment name, one default and one line of help.

Choice: a field declares everything about its option and `resolve` reads argv and the environment in one place.
Prevents: a flag whose help, default and environment name drift apart, and environment reads scattered over the
code. Rejected: argparse alone, which cannot tell a given value from a default and says little about a wrong one.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import ipaddress
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NoReturn, TypeVar

from deepseek_tgi.errors import ConfigError

OWN_PREFIX = "DEEPSEEK_TGI_"
_LARGEST = 2**63 - 1
_NO_VALUE = "\0"
"""What no option takes but those for any text: the refusal tells `--help` what a parser expects."""

C = TypeVar("C")
Parse = Callable[[str], Any]


@dataclass(frozen=True, slots=True)
class Option:
    """How one field is given.

    `env` names are tried in order; with `env_first` an own name beats the flag (a launcher that is not ours writes
    the flags). A `switch` needs no value on the command line; a `secret` is never shown; `hidden` leaves `--help`.
    """

    parse: Parse
    help: str
    group: str = "options"
    env: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    switch: bool = False
    repeat: bool = False
    positional: bool = False
    flag: bool = True
    env_first: bool = False
    secret: bool = False
    hidden: bool = False


@dataclass(frozen=True, slots=True)
class Resolved(Generic[C]):
    """A config and, field by field, where its value came from (`flag --x`, `environment X` or `default`)."""

    config: C
    origins: Mapping[str, str]


def option(parse: Parse, help_text: str, *, default: Any = None, **how: Any) -> Any:
    """A dataclass field that carries its `Option`."""
    return dataclasses.field(default=default, metadata={"option": Option(parse, help_text, **how)})


def options_of(cls: type[Any]) -> dict[str, Option]:
    """Field name to `Option`, in declaration order."""
    return {f.name: f.metadata["option"] for f in dataclasses.fields(cls) if "option" in f.metadata}


def text(value: str) -> str:
    """Any text, as it stands."""
    return value


def integer(minimum: int = 0, maximum: int = _LARGEST) -> Parse:
    """A whole number in [minimum, maximum]."""
    span = f"of at least {minimum}" if maximum == _LARGEST else f"from {minimum} to {maximum}"

    def parse(value: str) -> int:
        if not re.fullmatch(r"[+-]?[0-9]{1,20}", value) or not minimum <= int(value) <= maximum:
            raise ValueError(f"a whole number {span}")
        return int(value)

    return parse


def token_count(value: str) -> int:
    """A number of tokens, at least 1; the wire carries 32 bits."""
    return int(integer(1, 2**32 - 1)(value))


def multiple_of(step: int, maximum: int) -> Parse:
    """A positive multiple of `step` up to `maximum`."""
    whole = integer(step, maximum)

    def parse(value: str) -> int:
        try:
            if (result := int(whole(value))) % step == 0:
                return result
        except ValueError:
            pass
        raise ValueError(f"a multiple of {step} from {step} to {maximum}")

    return parse


def number(minimum: float = 0.0, maximum: float = float("inf")) -> Parse:
    """A finite number in [minimum, maximum]."""

    def parse(value: str) -> float:
        try:
            result = float(value)
        except ValueError:
            result = float("nan")
        if not minimum <= result <= maximum or result in (float("inf"), float("-inf")):
            upper = "" if maximum == float("inf") else f" and at most {maximum:g}"
            lower = "" if minimum == float("-inf") else f" of at least {minimum:g}"
            raise ValueError(f"a number{lower}{upper}")
        return result

    return parse


def boolean(value: str) -> bool:
    """`true` or `false`, and the usual spellings of both."""
    lowered = value.strip().lower()
    if lowered in {"true", "1", "yes", "y", "on", "t"}:
        return True
    if lowered in {"false", "0", "no", "n", "off", "f"}:
        return False
    raise ValueError("true or false")


def choice(*names: str) -> Parse:
    """One of `names`, whatever the case."""

    def parse(value: str) -> str:
        for name in names:
            if value.strip().lower() == name.lower():
                return name
        raise ValueError("one of " + ", ".join(names))

    return parse


def device(value: str) -> str:
    """`auto`, `cpu`, `cuda` or `cuda:N`, whatever the case."""
    name = value.strip().lower()
    if re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,4})?", name) is None:
        raise ValueError("auto, cpu, cuda or cuda:N")
    return name


def comma_list(item: Parse) -> Parse:
    """A comma list of what `item` parses; empty pieces are dropped."""

    def parse(value: str) -> tuple[Any, ...]:
        try:
            return tuple(item(piece.strip()) for piece in value.split(",") if piece.strip())
        except ValueError as error:
            raise ValueError(f"a comma list, each item {error}") from None

    return parse


def byte_size(value: str) -> int:
    """A number of bytes: `4294967296`, `4GiB`, `4G`, `512MB`, `1.5 GiB`; `auto` and `0` give 0 (measure)."""
    if value.strip().lower() == "auto":
        return 0
    match = re.fullmatch(r"\s*([0-9]{1,18}(?:\.[0-9]{1,6})?)\s*([kKmMgGtT]?)(i?)[bB]?\s*", value)
    if match is None:
        raise ValueError("auto, or a size such as 4GiB, 512MiB or 4294967296")
    amount, unit, binary = match.groups()
    decimal = unit and not binary and value.rstrip()[-1] in "bB"
    size = int(float(amount) * (1000 if decimal else 1024) ** " kmgt".index(unit.lower() or " "))
    if not size and float(amount):
        raise ValueError("at least 1 byte, or auto to measure")
    return size


def listen_address(value: str) -> str:
    """An IP address; anything else means every address, since containers set HOSTNAME to a name (TGI does the same)."""
    try:
        return str(ipaddress.ip_address(value))
    except ValueError:
        return "0.0.0.0"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """As `ConfigError`, which has the exit code argparse would leave with."""
        raise ConfigError(f"{self.prog}: {message}; see {self.prog} --help")


def flag_of(name: str) -> str:
    """`max_total_tokens` to `--max-total-tokens`."""
    return "--" + name.replace("_", "-")


def _expected(spec: Option) -> str:
    """What the option's parser says it expects; empty for any text."""
    try:
        spec.parse(_NO_VALUE)
    except ValueError as error:
        return str(error)
    return ""


def _metavar(name: str, spec: Option) -> str:
    """`N` for a number, else the last word of the field."""
    counts = re.match(r"a (whole number|number|multiple)\b", _expected(spec))
    return "N" if counts else name.rsplit("_", maxsplit=1)[-1].upper()


def _described(spec: Option, default: Any) -> str:
    expected = _expected(spec)
    names = expected.removeprefix("one of ").split(", ") if expected.startswith("one of ") else []
    parts = [] if all(name in spec.help for name in names[:3]) else [expected]  # the help may say it itself
    parts += [f"env {', '.join(spec.env)}"] if spec.env else []
    if default not in (None, False, ()):
        parts.append(f"default {default}")
    return (spec.help + (f" ({'; '.join(parts)})" if parts else "")).replace("%", "%%")


@dataclass(frozen=True, slots=True)
class Program:
    """What `--help` says around the options."""

    name: str
    description: str
    usage: str = "[options]"
    epilog: str = ""


def build_parser(cls: type[Any], program: Program) -> argparse.ArgumentParser:
    """The parser of `cls`: every value stays text, absent flags stay absent."""
    parser = _Parser(
        prog=program.name,
        usage=f"{program.name} {program.usage}",
        description=program.description,
        epilog=program.epilog,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    groups: dict[str, Any] = {}
    defaults = {f.name: f.default for f in dataclasses.fields(cls)}
    for name, spec in options_of(cls).items():
        if not spec.flag:
            continue
        group = groups.setdefault(spec.group, None) or parser.add_argument_group(spec.group)
        groups[spec.group] = group
        shown = argparse.SUPPRESS if spec.hidden else _described(spec, defaults[name])
        if spec.positional:
            group.add_argument(name, metavar=name.upper(), nargs="?", help=shown)
            continue
        how: dict[str, Any] = {"dest": name, "help": shown}
        if spec.switch:
            how.update(nargs="?", const="true", metavar="true|false")
        else:
            how.update(metavar=_metavar(name, spec))
        if spec.repeat:
            how["action"] = "append"
        group.add_argument(*_flags(name, spec), **how)
    return parser


def _flags(name: str, spec: Option) -> list[str]:
    short = [alias for alias in spec.aliases if not alias.startswith("--")]
    long = [alias for alias in spec.aliases if alias.startswith("--")]
    return [*short, flag_of(name), *long]


def _protect_switches(cls: type[Any], argv: Sequence[str]) -> list[str]:
    """Give every bare switch its value, so that a positional behind it is not swallowed."""
    specs = options_of(cls).items()
    bare = {flag: f"{flag_of(name)}=true" for name, spec in specs if spec.switch for flag in _flags(name, spec)}
    return [bare.get(arg, arg) for arg in argv]


def resolve(
    cls: type[C], parser: argparse.ArgumentParser, argv: Sequence[str], environ: Mapping[str, str]
) -> Resolved[C]:
    """Build `cls` from argv, then the environment, then its defaults. Raises `ConfigError` naming option and value.

    An environment variable that is set but empty counts as not set.
    """
    given, extra = parser.parse_known_args(_protect_switches(cls, argv))
    if extra:
        raise ConfigError(f"{parser.prog}: {_unknown(cls, extra[0])}; see {parser.prog} --help")
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for name, spec in options_of(cls).items():
        found = _find(name, spec, vars(given), environ)
        origins[name] = found[0] if found else "default"
        if found:
            values[name] = _value(spec, *found)
    return Resolved(cls(**values), origins)


def _find(name: str, spec: Option, given: Mapping[str, Any], environ: Mapping[str, str]) -> tuple[str, Any] | None:
    present = [key for key in spec.env if environ.get(key)]
    if spec.env_first and any(key.startswith(OWN_PREFIX) for key in present):
        key = next(key for key in present if key.startswith(OWN_PREFIX))
        return f"environment {key}", environ[key]
    if name in given:
        return name.upper() if spec.positional else f"flag {flag_of(name)}", given[name]
    return (f"environment {present[0]}", environ[present[0]]) if present else None


def _value(spec: Option, where: str, raw: Any) -> Any:
    try:
        if spec.repeat:
            return tuple(spec.parse(item) for item in (raw if isinstance(raw, list) else [raw]))
        return spec.parse(raw)
    except ValueError as error:
        got = "(a secret)" if spec.secret else repr(raw)
        raise ConfigError(f"{where}: got {got}, expected {error}") from None


def _unknown(cls: type[Any], argument: str) -> str:
    known = sorted(flag for name, spec in options_of(cls).items() if spec.flag for flag in _flags(name, spec))
    if not argument.startswith("-"):
        return f"unexpected argument {argument!r}"
    name = argument.split("=", maxsplit=1)[0]
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    return f"unknown option {name!r}" + (f"; did you mean {' or '.join(near)}?" if near else "")


def refuse_unknown_environment(environ: Mapping[str, str], known: frozenset[str]) -> None:
    """Raise `ConfigError` for a `DEEPSEEK_TGI_*` name that nothing reads: a typing error must not go unnoticed."""
    for name in sorted(environ):
        if name.startswith(OWN_PREFIX) and name not in known:
            near = difflib.get_close_matches(name, sorted(known), n=1)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(sorted(known))}"
            raise ConfigError(f"environment {name}: unknown name; {hint}")
