"""Function calling over HTTP: which tools are offered, calls whole and streamed, answers that are no call."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fake_script import Traits
from router_bench import router_bench

ROOMY = Traits(max_total_tokens=4000)
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def chat(content: str = "hello", **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], **fields}


async def test_line_64_grammar_and_tools_exclude_each_other(tmp_path: Path) -> None:
    schema = {"type": "json", "value": {"properties": {}}}
    async with router_bench(tmp_path, traits=ROOMY) as bench:
        both = await bench.post("/v1/chat/completions", chat(tools=[WEATHER], response_format=schema))
        unknown = await bench.post("/v1/chat/completions", chat(tools=[WEATHER], tool_choice="fly"))
    assert both.json() == {"error": "Tool error: Grammar and tools are mutually exclusive", "error_type": "tool_error"}
    assert (unknown.status_code, unknown.json()["error"]) == (422, "Tool error: Tool with name fly not found")


CALL = 'say[{"function": {|"_name": "get_weather"|, "city"|: "Rome"}|}]'


@pytest.mark.parametrize(
    "choice", [None, "auto", "required", "get_weather", {"type": "function", "function": {"name": "get_weather"}}]
)
async def test_line_64_a_tool_call(tmp_path: Path, choice: Any) -> None:
    async with router_bench(tmp_path, traits=ROOMY) as bench:
        body = (await bench.post("/v1/chat/completions", chat(CALL, tools=[WEATHER], tool_choice=choice))).json()
        (request,) = bench.shard.requests
    function = {"description": None, "name": "get_weather", "arguments": '{"city": "Rome"}'}
    assert body["choices"][0]["message"] == {
        "role": "assistant",
        "tool_calls": [{"id": "0", "type": "function", "function": function}],
    }
    assert request.parameters.grammar_type == 1
    names = json.loads(request.parameters.grammar)["$functions"].keys()
    assert set(names) == ({"get_weather", "no_tool"} if choice in (None, "auto") else {"get_weather"})
    shown = request.inputs[request.inputs.index("\n---\n") :]
    assert '"arguments": "{\\"type\\": \\"object\\"' in shown
    assert "Given the functions available, please respond with a JSON for a function call" in shown


async def test_line_64_none_is_a_plain_chat(tmp_path: Path) -> None:
    async with router_bench(tmp_path) as bench:
        body = (await bench.post("/v1/chat/completions", chat("say[a]", tools=[WEATHER], tool_choice="none"))).json()
        (request,) = bench.shard.requests
    assert body["choices"][0]["message"]["content"] == "a"
    assert (request.parameters.grammar, "---" in request.inputs) == ("", False)


NO_TOOL = 'say[{"function": {"_name": "no_tool"|}}]'


async def test_line_64_no_tool_answers_in_a_second_pass(tmp_path: Path) -> None:
    async with router_bench(tmp_path, traits=ROOMY) as bench:
        whole = (await bench.post("/v1/chat/completions", chat(NO_TOOL, tools=[WEATHER], max_tokens=3))).json()
        streamed = await bench.json_events(
            "/v1/chat/completions", chat(NO_TOOL, tools=[WEATHER], max_tokens=3, stream=True)
        )
        second = bench.shard.requests[1]
    assert "tool_calls" not in whole["choices"][0]["message"]
    assert (second.parameters.grammar, "---" in second.inputs) == ("", False)
    assert "".join(e["choices"][0]["delta"]["content"] for e in streamed) == whole["choices"][0]["message"]["content"]


async def test_line_64_an_answer_that_is_no_call(tmp_path: Path) -> None:
    async with router_bench(tmp_path, traits=ROOMY) as bench:
        refused = await bench.post("/v1/chat/completions", chat("say[{}]", tools=[WEATHER]))
        streamed = await bench.events("/v1/chat/completions", chat("say[{}]", tools=[WEATHER], stream=True))
    assert (refused.status_code, refused.json()["error_type"]) == (422, "tool_error")
    assert refused.json()["error"].startswith("Tool error: Failed to parse generated text: ")
    assert "Failed to parse generated text" in json.loads(streamed[0])["error"]["message"]
    assert streamed[1:] == ["[DONE]"]


async def test_line_64_streamed_argument_pieces(tmp_path: Path) -> None:
    call = {"id": "4", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    history = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "ok"}]
    body = {"messages": [*history, {"role": "user", "content": CALL}], "tools": [WEATHER], "stream": True}
    body["stream_options"] = {"include_usage": True}
    async with router_bench(tmp_path, traits=ROOMY) as bench:
        events = await bench.json_events("/v1/chat/completions", body)
    calls = [event["choices"][0]["delta"]["tool_calls"][0] for event in events if event["choices"]]
    assert [c["function"]["name"] for c in calls] == ["get_weather", *[None] * (len(calls) - 1)]
    assert calls[0]["function"]["arguments"] == "{"
    assert json.loads("".join(c["function"]["arguments"] for c in calls)) == {"city": "Rome"}
    assert {c["id"] for c in calls} == {"5"}
    assert all(event["choices"][0]["finish_reason"] is None for event in events if event["choices"])
    assert events[-1]["usage"]["completion_tokens"] == 6
