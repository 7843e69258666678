"""Chat messages to one prompt text, by the template that comes with a model.

Source: the rules of TGI's router (`router/src/infer/chat_template.rs`), which renders with minijinja's defaults: blocks
are not trimmed. Where Hugging Face's own Jinja is followed instead: `tojson` writes plain JSON without HTML escapes,
because models were trained on that.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from deepseek_tgi.errors import CheckpointError, RequestError
from deepseek_tgi.text.template_sandbox import TemplateEnvironment

MAX_FILE_BYTES = 64 * 1024 * 1024
MAX_TEMPLATE_CHARACTERS = 1_000_000
DOUBLE_INDEXED = "messages[0]['content'][0]['text']"
"""Some templates expect content as a list of parts; here it is one string."""


class TemplateError(RequestError):
    """The template refused the messages, or cannot be used at all."""

    error_type = "template_error"

    def __init__(self, text: str) -> None:
        super().__init__(f"Template error: {text}")


@dataclass(frozen=True, slots=True)
class TemplateFiles:
    """What a model folder says about its chat template; every part may be missing."""

    source: str | None
    bos_token: str | None
    eos_token: str | None


class ChatTemplate:
    """A compiled template. May be used by several threads at once."""

    def __init__(self, source: str, bos_token: str | None = None, eos_token: str | None = None) -> None:
        self._environment = TemplateEnvironment()
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._fault: str | None = None
        self.uses_tools = False
        if len(source) > MAX_TEMPLATE_CHARACTERS:
            self._fault = f"the template has {len(source)} characters, at most {MAX_TEMPLATE_CHARACTERS} are allowed"
            return
        patched = source.replace(DOUBLE_INDEXED, "messages[0]['content']")
        try:
            self._template, self.uses_tools = self._environment.prepare(patched)
        except (jinja2.TemplateError, RecursionError, SyntaxError) as error:
            self._fault = f"syntax error: {error}"

    def render(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> str:
        """The prompt for `messages` (`role`, `content`).

        A last message of the assistant is continued: the text is cut right after it and right-trimmed.
        Raises: `TemplateError` with the template's own words.
        """
        if self._fault is not None:
            raise TemplateError(self._fault)
        variables = {"messages": messages, "tools": tools, "add_generation_prompt": True, **self._tokens}
        try:
            text = self._environment.run(self._template, variables)
        except jinja2.TemplateError as error:
            raise TemplateError(str(error.message)) from error
        return _continued(text, messages)


def _continued(text: str, messages: list[dict[str, Any]]) -> str:
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant":
        return text
    content = last.get("content") or ""
    found = text.rfind(content) if content else -1
    return text if found < 0 else text[: found + len(content)].rstrip()


def load_chat_template(folder: Path, override: Path | None = None) -> ChatTemplate | None:
    """The folder's template, or that of the `override` file (a `tokenizer_config.json`); None if there is none.

    Raises: `CheckpointError` for a file that is there but unreadable.
    """
    files = read_template_files(folder, override)
    return None if files.source is None else ChatTemplate(files.source, files.bos_token, files.eos_token)


def read_template_files(folder: Path, override: Path | None = None) -> TemplateFiles:
    """Look through `chat_template.json`, `tokenizer_config.json`, `chat_template.jinja` and `processor_config.json`.

    Raises: `CheckpointError` for a file that is there but is not what its name says, or an `override` that is missing.
    """
    if override is not None and not override.is_file():
        raise CheckpointError(f"{override}: no such file; expected a tokenizer_config.json with a chat_template")
    config = _object(override if override is not None else folder / "tokenizer_config.json")
    special = _object(folder / "special_tokens_map.json")
    candidates = [_template_of(_object(folder / "chat_template.json")), _template_of(config), None, None]
    if override is not None:
        candidates[0], candidates[1] = candidates[1], candidates[0]
    if candidates[0] is None and candidates[1] is None:
        candidates[2] = _text(folder / "chat_template.jinja")
        candidates[3] = _template_of(_object(folder / "processor_config.json"))
    source = next((found for found in candidates if found is not None), None)
    names = {name: _token(config.get(name, special.get(name))) for name in ("bos_token", "eos_token")}
    return TemplateFiles(source, names["bos_token"], names["eos_token"])


def _template_of(config: dict[str, Any]) -> str | None:
    value = config.get("chat_template")
    if isinstance(value, list):
        named = {item.get("name"): item.get("template") for item in value if isinstance(item, dict)}
        value = named.get("default")
    return value if isinstance(value, str) else None


def _token(value: Any) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _text(file: Path) -> str | None:
    if not file.is_file():
        return None
    try:
        if file.stat().st_size > MAX_FILE_BYTES:
            raise CheckpointError(f"{file}: {file.stat().st_size} bytes; at most {MAX_FILE_BYTES} are read")
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file}: cannot be read: {error}") from error


def _object(file: Path) -> dict[str, Any]:
    text = _text(file)
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file}: got {type(value).__name__}, expected a JSON object")
    return value
