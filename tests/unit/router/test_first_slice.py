"""The door end to end over loopback, in front of a scripted shard."""

from __future__ import annotations

from pathlib import Path

from router_bench import router_bench


async def test_a_stream_ends_with_the_whole_text(tmp_path: Path) -> None:
    async with router_bench(tmp_path) as bench:
        events = await bench.json_events("/generate_stream", {"inputs": "say[a|b]", "parameters": {"max_new_tokens": 5}})
    assert [event["token"]["text"] for event in events] == ["a", "b", "</s>"]
    assert [event["index"] for event in events] == [1, 2, 3]
    assert [event["generated_text"] for event in events] == [None, None, "ab"]
