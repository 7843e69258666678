"""Function calling: which tools are offered, the grammar that makes the model name one, and reading its answer.

The model writes `{"function": {"_name": NAME, …arguments}}`, held to it by a JSON schema.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from deepseek_tgi.router.errors import ToolError
from deepseek_tgi.router.openai_requests import ChatRequest, Message, Tool
from deepseek_tgi.router.requests import Grammar

NO_TOOL = "no_tool"
MAX_ID_DIGITS = 18
"""Call ids that are counted on from have at most so many digits; longer ones are names."""
DEFAULT_PROMPT = (
    "\nGiven the functions available, please respond with a JSON for a function call with its proper arguments that "
    "best answers the given prompt. Respond in the format {name: function name, parameters: dictionary of argument "
    "name and its value}.Do not use variables.\n"
)
_NAMED = re.compile(r'"_name"\s*:\s*("(?:[^"\\]|\\.)*")')


@dataclass(frozen=True, slots=True)
class Toolbox:
    """The tools that one request offers, and the words that tell the model of them."""

    tools: tuple[Tool, ...]
    prompt: str

    def grammar(self) -> Grammar:
        """A schema that allows a call of any of the tools and nothing else."""
        functions = {tool.name: _function_schema(tool) for tool in self.tools}
        references = [{"$ref": f"#/$functions/{_pointer(tool.name)}"} for tool in self.tools]
        schema: dict[str, Any] = {
            "$functions": functions,
            "type": "object",
            "properties": {"function": {"anyOf": references}},
            "required": ["function"],
            "additionalProperties": False,
        }
        for key in ("$defs", "definitions"):  # references inside a tool's schema start at the top
            found = [tool.parameters[key] for tool in self.tools if isinstance(tool.parameters.get(key), dict)]
            if found:
                schema[key] = {name: value for part in found for name, value in part.items()}
        return Grammar("json", schema)

    def appendix(self, template_knows_tools: bool) -> str:
        """What the last message gets appended."""
        if template_knows_tools:
            return f"\n---\n{self.prompt}"
        return f"\n---\n{json.dumps([_shown(tool) for tool in self.tools], ensure_ascii=False)}\n{self.prompt}"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """What the model chose; `arguments` is JSON text."""

    name: str
    arguments: str


def toolbox(request: ChatRequest) -> Toolbox | None:
    """The tools to offer; None for an ordinary chat. Raises `ToolError` for a name that is not there."""
    if not request.tools or request.tool_choice == "none":
        return None
    if request.parameters.grammar is not None:
        raise ToolError("Grammar and tools are mutually exclusive")
    tools = request.tools
    if request.tool_choice == "function":
        tools = tuple(tool for tool in tools if tool.name == request.tool_name)
        if not tools:
            raise ToolError(f"Tool with name {request.tool_name} not found")
    elif request.tool_choice == "auto":
        tools = (*tools, Tool(NO_TOOL, "Open ended response with no specific tool selected", {}, _no_tool_source()))
    return Toolbox(tools, DEFAULT_PROMPT if request.tool_prompt is None else request.tool_prompt)


def parse_call(text: str) -> ToolCall:
    """Read the model's whole answer. Raises `ToolError` if it is no call."""
    try:
        function = json.loads(text)["function"]
        name = function.pop("_name")
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
        raise ToolError(f"Failed to parse generated text: {type(error).__name__}: {error} {text!r}") from error
    if not isinstance(name, str):
        raise ToolError(f"Failed to parse generated text: `_name` is no string {text!r}")
    return ToolCall(name, json.dumps(function, ensure_ascii=False))


def next_call_id(messages: Sequence[Message]) -> str:
    """One more than the largest id in the conversation, `0` if there is none, a UUID if they are no numbers."""
    ids = [call_id for message in messages for call_id in message.tool_call_ids]
    if not all(call_id.isdecimal() and len(call_id) <= MAX_ID_DIGITS for call_id in ids):
        return str(uuid.uuid4())
    return str(max(map(int, ids)) + 1) if ids else "0"


class CallReader:
    """Reads a call token by token: first its name, then the text of its arguments without the outermost braces."""

    def __init__(self) -> None:
        self._text = ""
        self._sent = 0
        self._at_start = True
        self.name: str | None = None
        self.complete = False

    def feed(self, piece: str) -> list[str]:
        """Take a piece of the model's text; return the pieces of the arguments that it adds, a lone `{` first."""
        if self.complete:
            return []
        self._text += piece
        pieces = []
        if self.name is None:
            found = _NAMED.search(self._text)
            if found is None:
                return []
            self.name = str(json.loads(found[1]))
            self._sent = found.end()
            pieces = ["{"]
        if self._at_start:
            rest = self._text[self._sent :].lstrip(" \t\r\n,")
            self._sent = len(self._text) - len(rest)
            self._at_start = not rest
        rest = self._rest()
        return [*pieces, rest] if rest else pieces

    def _rest(self) -> str:
        rest = self._text[self._sent :]
        self._sent = len(self._text)
        if not self._text.rstrip().endswith("}"):
            return rest
        try:
            json.loads(self._text)
        except (ValueError, RecursionError):
            return rest
        self.complete = True
        return rest.rstrip().removesuffix("}")


def _function_schema(tool: Tool) -> dict[str, Any]:
    properties = tool.parameters.get("properties")
    required = tool.parameters.get("required")
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {
            "_name": {"type": "string", "const": tool.name},
            **(properties if isinstance(properties, dict) else {}),
        },
        "required": ["_name", *(required if isinstance(required, list) else [])],
        "additionalProperties": tool.parameters.get("additionalProperties") == "true",
    }
    if tool.description is not None:
        schema["description"] = tool.description
    return schema


def _pointer(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _shown(tool: Tool) -> dict[str, Any]:
    arguments = json.dumps(tool.parameters, ensure_ascii=False)
    return {
        "type": "function",
        "function": {"description": tool.description, "name": tool.name, "arguments": arguments},
    }


def _no_tool_source() -> dict[str, Any]:
    function = {"name": NO_TOOL, "description": "Open ended response with no specific tool selected", "parameters": {}}
    return {"type": "function", "function": function}
