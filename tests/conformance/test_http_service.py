"""Routes about the server: health and readiness, metrics, info, tokenize, other clouds' spellings."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from router_bench import router_bench

GENERATE = {"inputs": "hello", "parameters": {"max_new_tokens": 2}}
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
COMPLETION = {"prompt": "hello", "max_tokens": 2}


async def test_c32_a_full_queue_is_neither_dead_nor_unready(tmp_path: Path) -> None:
    async with router_bench(tmp_path, ["--max-concurrent-requests", "2"]) as bench:
        bench.shard.gate.clear()
        held = [await bench.connect("/generate_stream", {"inputs": "x"}) for _ in range(2)]
        await bench.until(lambda: bench.in_flight == 2)
        third = await bench.post("/generate", GENERATE)
        assert (third.status_code, third.json()["error_type"]) == (429, "overloaded")
        probes = ("/health", "/ready", "/livez", "/readyz", "/startupz")
        assert [(await bench.client.get(path)).status_code for path in probes] == [200] * 5
        for _, writer in held:
            writer.close()
        bench.shard.gate.set()


async def test_line_66_health_follows_the_shard(tmp_path: Path) -> None:
    unhealthy = {"error": "unhealthy", "error_type": "healthcheck"}
    async with router_bench(tmp_path) as bench:
        assert (await bench.client.get("/health")).content == b""
        assert bench.shard.count("Health") == 1
        bench.shard.fail_next["Prefill"] = "boom"
        failed = await bench.post("/generate", GENERATE)
        assert failed.status_code == 424
        assert failed.json() == {
            "error": "Request failed during generation: Server error: boom",
            "error_type": "generation",
        }
        bench.shard.fail_next["Liveness"] = "still bad"
        sick = await bench.client.get("/health")
        assert (sick.status_code, sick.json()) == (503, unhealthy)
        assert (await bench.client.get("/health")).status_code == 200, "a good dummy generation heals"
        assert bench.shard.count("Liveness") == 2
        assert (await bench.client.get("/ping")).status_code == 200
        assert bench.shard.count("Health") == 2


async def test_line_67_metrics(tmp_path: Path) -> None:
    async with router_bench(tmp_path) as bench:
        await bench.post("/generate", GENERATE)
        await bench.post("/generate", {"inputs": ""})
        answer = await bench.client.get("/metrics")
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"
    text = answer.text
    types = dict(re.findall(r"^# TYPE (\w+) (\w+)$", text, re.MULTILINE))
    assert types["tgi_request_count"] == types["tgi_batch_inference_count"] == "counter"
    assert types["tgi_queue_size"] == types["tgi_batch_current_size"] == "gauge"
    assert types["tgi_request_skipped_tokens"] == "summary"
    assert "tgi_request_count 2\n" in text, "refused ones count, so that failures are a share of it"
    assert "tgi_request_success 1\n" in text
    assert 'tgi_request_failure{err="validation"} 1\n' in text
    assert 'tgi_batch_inference_success{method="decode"} 1\n' in text
    edges = {name: re.findall(rf'^{name}_bucket{{.*?le="(.*?)"}}', text, re.MULTILINE) for name in types}
    for name in ("tgi_request_duration", "tgi_request_queue_duration", "tgi_request_mean_time_per_token_duration"):
        assert types[name] == "histogram"
        assert [float(e) for e in edges[name][:-1]] == pytest.approx([0.00015 * 1.5**i for i in range(35)])
    assert [float(e) for e in edges["tgi_request_generated_tokens"][:-1]] == pytest.approx(
        [5.12 * i for i in range(1, 101)]
    )
    assert [float(e) for e in edges["tgi_request_input_length"][:-1]] == pytest.approx(
        [5.11 * i for i in range(1, 101)]
    )
    assert edges["tgi_batch_next_size"][:-1] == [str(2**i) for i in range(11)]
    quantiles = re.findall(r'tgi_request_skipped_tokens{quantile="(.*?)"}', text)
    assert quantiles == ["0", "0.5", "0.9", "0.95", "0.99", "0.999", "1"]
    assert "_total{" not in text


async def test_line_69_info_and_models(tmp_path: Path) -> None:
    async with router_bench(tmp_path, ["--served-model-id", "the/model", "--max-best-of", "3"]) as bench:
        info = (await bench.client.get("/info")).json()
        models = (await bench.client.get("/v1/models")).json()
    assert list(info) == [
        *("model_id", "model_sha", "model_pipeline_tag", "max_concurrent_requests", "max_best_of"),
        *("max_stop_sequences", "max_input_tokens", "max_total_tokens", "validation_workers"),
        *("max_client_batch_size", "router", "version", "sha", "docker_label"),
    ]
    assert (info["model_id"], info["max_best_of"], info["router"]) == ("the/model", 3, "text-generation-router")
    assert (info["max_input_tokens"], info["max_total_tokens"]) == (511, 512)
    model = {"id": "the/model", "object": "model", "created": 0, "owned_by": "the/model"}
    assert models == {"object": "list", "data": [model]}


async def test_line_69_tokenize(tmp_path: Path) -> None:
    async with router_bench(tmp_path) as bench:
        tokens = (await bench.post("/tokenize", {"inputs": "thé ing"})).json()
        chat = (await bench.post("/chat_tokenize", CHAT)).json()
    assert tokens[0] == {"id": 272, "text": "", "start": 0, "stop": 0}
    assert [(t["text"], t["start"], t["stop"]) for t in tokens[1:2]] == [("th", 0, 2)]
    assert tokens[-1] == {"id": 270, "text": "ing", "start": 5, "stop": 8}
    assert chat["templated_text"] == "<s><|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert [t["id"] for t in chat["tokenize_response"]].count(272) == 1


async def test_line_69_invocations_and_vertex(tmp_path: Path) -> None:
    async with router_bench(tmp_path) as bench:
        native = (await bench.post("/invocations", GENERATE)).json()
        chat = (await bench.post("/invocations", CHAT)).json()
        completion = (await bench.post("/invocations", COMPLETION)).json()
        instances = [{"inputs": "say[x]"}, {"messages": CHAT["messages"], "max_tokens": 1}]
        vertex = (await bench.post("/vertex", {"instances": instances})).json()
        empty = await bench.post("/vertex", {"instances": []})
        failing = await bench.post("/vertex", {"instances": [{"inputs": ""}]})
    assert native == [{"generated_text": "hellow0 w1 "}]
    assert (chat["object"], completion["object"]) == ("chat.completion", "text_completion")
    assert vertex == {"predictions": ["x", "w0 "]}
    both = {"error": "Input validation error", "error_type": "Input validation error"}
    assert (empty.status_code, empty.json()) == (422, both)
    incomplete = {"error": "Incomplete generation", "error_type": "Incomplete generation"}
    assert (failing.status_code, failing.json()) == (500, incomplete)


@pytest.mark.parametrize("wrong", [{"inputs": 5}, {"messages": [{"role": 1}]}, {"prompt": "x"}, 7])
async def test_line_69_a_vertex_instance_of_the_wrong_shape_is_told_as_any_body(tmp_path: Path, wrong: object) -> None:
    async with router_bench(tmp_path) as bench:
        refused = await bench.post("/vertex", {"instances": [{"inputs": "say[x]"}, wrong]})
        assert bench.shard.requests == []
    assert (refused.status_code, refused.text) == (
        422,
        "Failed to deserialize the JSON body into the target type: instances[1]: "
        "data did not match any variant of untagged enum VertexInstance",
    )


async def test_more_vertex_instances_than_permits_are_refused_before_any_starts(tmp_path: Path) -> None:
    async with router_bench(tmp_path, ["--max-concurrent-requests", "3"]) as bench:
        few = await bench.post("/vertex", {"instances": [{"inputs": "say[x]"}] * 3})
        many = await bench.post("/vertex", {"instances": [{"inputs": "say[x]"}] * 4})
        assert len(bench.shard.requests) == 3
        text = (await bench.client.get("/metrics")).text
    assert few.json() == {"predictions": ["x"] * 3}
    assert (many.status_code, many.json()["error"]) == (500, "Incomplete generation")
    assert 'tgi_request_failure{err="overloaded"} 1' in text
