"""The gRPC port as its clients see it: tritonclient and a TGIS client, unmodified, in environments of their own."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from builders import tiny_checkpoint
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from launched_server import LaunchedServer, await_true, free_port
from peers import PEERS

from deepseek_tgi.pb import fmaas_pb2, fmaas_pb2_grpc, inference_pb2, inference_pb2_grpc

TOKEN = "let-me-change-models"
KEY = "let-me-generate"
PEER = PEERS["grpc-clients"]
PROMPT = "hello world"

TRITON = """
import json, sys
import numpy as np
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException
url, token, key = sys.argv[1:]
admin, user = {"authorization": "Bearer " + token}, {"authorization": "Bearer " + key}
client = triton.InferenceServerClient(url)
said = {}
said["live"], said["ready"] = client.is_server_live(), client.is_server_ready()
said["metadata"] = client.get_server_metadata(as_json=True)
said["before"] = [client.is_model_ready(name) for name in ("one", "two", "nobody")]
said["index before"] = client.get_model_repository_index(as_json=True)["models"]
client.load_model("two", headers=admin)
version = lambda: client.get_model_metadata("two", as_json=True)["versions"]
first_version = version()
client.load_model("two", headers=admin)
said["loaded twice"] = first_version == version()
said["after"] = [client.is_model_ready(name) for name in ("one", "two", "nobody")]
said["index after"] = client.get_model_repository_index(as_json=True)["models"]
said["model"] = client.get_model_metadata("two", as_json=True)
def refused(call):
    try:
        call()
    except InferenceServerException as error:
        return [error.status(), error.message()]
    return None
said["spoiled"] = refused(lambda: client.load_model("spoiled", headers=admin))
said["still"] = client.is_model_ready("two")
said["without token"] = refused(lambda: client.load_model("one"))
said["wrong token"] = refused(lambda: client.load_model("one", headers={"authorization": "Bearer no"}))
text = triton.InferInput("text_input", [1], "BYTES")
text.set_data_from_numpy(np.array([b"hello world"], dtype=object))
answer = client.infer("two", [text], parameters={"max_tokens": 12}, headers=user)
said["text"] = answer.as_numpy("text_output")[0].decode()
said["other model"] = refused(lambda: client.infer("one", [text], headers=user))
said["no key"] = refused(lambda: client.infer("two", [text]))
import queue
pieces = queue.Queue()
client.start_stream(lambda result, error: pieces.put((result, error)), headers=user)
client.async_stream_infer("two", [text], parameters={"max_tokens": 12})
streamed = []
while True:
    result, error = pieces.get(timeout=60)
    assert error is None, error
    streamed.append(result.as_numpy("text_output")[0].decode())
    if result.get_response().parameters["triton_final_response"].bool_param:
        break
client.stop_stream()
said["pieces"] = streamed
client.unload_model("two", headers=admin)
said["unloaded"] = [client.is_server_ready(), client.is_model_ready("two"), client.is_server_live()]
client.load_model("one", headers=admin)
said["again"] = [client.is_server_ready(), client.is_model_ready("one")]
print(json.dumps(said))
"""

TGIS = """
import importlib.util, json, sys
import grpc
where = importlib.util.find_spec("vllm_tgis_adapter").submodule_search_locations[0] + "/grpc/pb"
def load(name):
    spec = importlib.util.spec_from_file_location(name, f"{where}/{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
import types
for package in ("vllm_tgis_adapter", "vllm_tgis_adapter.grpc", "vllm_tgis_adapter.grpc.pb"):
    sys.modules[package] = types.ModuleType(package)
pb = load("generation_pb2")
sys.modules["vllm_tgis_adapter.grpc.pb.generation_pb2"] = pb
sys.modules["vllm_tgis_adapter.grpc.pb"].generation_pb2 = pb
stubs = load("generation_pb2_grpc")
url, key = sys.argv[1:]
user = (("authorization", "Bearer " + key),)
stub = stubs.GenerationServiceStub(grpc.insecure_channel(url))
said = {}
params = pb.Parameters(
    method=pb.GREEDY,
    stopping=pb.StoppingCriteria(max_new_tokens=12),
    response=pb.ResponseOptions(generated_tokens=True, token_logprobs=True, top_n_tokens=2),
)
prompts = ["hello world", "once upon a time"]
batch = pb.BatchedGenerationRequest(requests=[pb.GenerationRequest(text=t) for t in prompts], params=params)
answer = stub.Generate(batch, metadata=user)
said["texts"] = [r.text for r in answer.responses]
said["counts"] = [[r.input_token_count, r.generated_token_count, r.stop_reason] for r in answer.responses]
said["tokens"] = [[[t.text, round(t.logprob, 4), len(t.top_tokens)] for t in r.tokens] for r in answer.responses]
single = pb.SingleGenerationRequest(request=pb.GenerationRequest(text=prompts[0]), params=params)
pieces = list(stub.GenerateStream(single, metadata=user))
said["pieces"] = [[p.text, p.input_token_count, p.generated_token_count, p.stop_reason] for p in pieces]
tokens = stub.Tokenize(
    pb.BatchedTokenizeRequest(
        requests=[pb.TokenizeRequest(text="h\\u00e9llo world")], return_tokens=True, return_offsets=True
    ),
    metadata=user,
).responses[0]
said["tokenized"] = [tokens.token_count, list(tokens.tokens), [[o.start, o.end] for o in tokens.offsets]]
info = stub.ModelInfo(pb.ModelInfoRequest(model_id="one"))
said["info"] = [info.model_kind, info.max_sequence_length, info.max_new_tokens]
stopped = pb.Parameters(stopping=pb.StoppingCriteria(max_new_tokens=12, stop_sequences=[said["texts"][0][3:5]]))
def stop(include):
    stopped.stopping.include_stop_sequence = include
    r = stub.Generate(pb.BatchedGenerationRequest(requests=[pb.GenerationRequest(text=prompts[0])], params=stopped),
                      metadata=user).responses[0]
    s = list(stub.GenerateStream(pb.SingleGenerationRequest(request=pb.GenerationRequest(text=prompts[0]),
                                                            params=stopped), metadata=user))
    return [r.text, r.stop_reason, r.stop_sequence, "".join(p.text for p in s)]
said["stop kept"], said["stop left out"] = stop(True), stop(False)
print(json.dumps(said))
"""


@dataclass
class Port:
    """A server with its gRPC port."""

    server: LaunchedServer
    number: int

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.number}"

    def run(self, script: str, *arguments: str) -> dict[str, Any]:
        """What a script of the clients' environment prints."""
        argv = [str(PEER.python), "-c", script, self.address, *arguments]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL, check=False)
        assert done.returncode == 0, done.stderr + self.server.words()[-2000:]
        said: dict[str, Any] = json.loads(done.stdout)
        return said

    def greedy(self, text: str, count: int) -> dict[str, Any]:
        """The same from `/generate`, which other tests hold against transformers."""
        headers = {"authorization": f"Bearer {KEY}"}
        body = {"inputs": text, "parameters": {"max_new_tokens": count, "details": True, "top_n_tokens": 2}}
        answer = self.server.http.post(f"{self.server.url}/generate", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Port]:
    folder = tmp_path_factory.mktemp("grpc")
    repository = folder / "models"
    for name, seed in (("one", 1), ("two", 2), ("spoiled", 3)):
        tiny_checkpoint(repository / name, "llama", "awq-gemm", seed=seed)
    file = repository / "spoiled" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4000])
    number = free_port()
    environment = {"DEEPSEEK_TGI_ADMIN_TOKEN": TOKEN, "DEEPSEEK_TGI_MODEL_REPOSITORY": str(repository)}
    environment |= {"DEEPSEEK_TGI_GRPC_MAX_MESSAGE": "100000", "API_KEY": KEY}
    extra = ["--max-total-tokens", "512", "--max-input-tokens", "480", "--kv-memory", "2MiB", "--dtype", "float32"]
    extra += ["--grpc-port", str(number)]
    server = LaunchedServer.start(repository / "one", folder, extra, environment)
    found = Port(server, number)
    headers = {"authorization": f"Bearer {TOKEN}"}
    loaded = server.http.post(f"{server.url}/admin/models/load", json={"model_id": "one"}, headers=headers)
    assert loaded.status_code == 200, loaded.text
    yield found
    server.stop()


@pytest.fixture
def channel(port: Port) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(port.address) as channel:
        yield channel


needs_peer = pytest.mark.skipif(not PEER.ready, reason=f"`python -m tests.peers` makes it ({PEER.reason})")


@needs_peer
def test_tritonclient_loads_asks_and_unloads(port: Port) -> None:
    said = port.run(TRITON, TOKEN, KEY)
    assert (said["live"], said["ready"]) == (True, True)
    assert said["metadata"]["name"] == "deepseek-tgi"
    assert said["before"] == [True, False, False]
    assert {each["name"]: each["state"] for each in said["index before"]} == {
        "one": "READY",
        "two": "UNAVAILABLE",
        "spoiled": "UNAVAILABLE",
    }
    assert said["after"] == [False, True, False]
    assert said["loaded twice"] is True
    assert {each["name"]: each["state"] for each in said["index after"]}["two"] == "READY"
    assert [each["name"] for each in said["model"]["inputs"]] == ["text_input"]
    status, reason = said["spoiled"]
    assert (status, "model.safetensors" in reason) == ("StatusCode.FAILED_PRECONDITION", True), reason
    assert said["still"] is True
    assert said["without token"][0] == said["wrong token"][0] == "StatusCode.UNAUTHENTICATED"
    assert said["no key"][0] == "StatusCode.UNAUTHENTICATED"
    assert said["other model"][0] == "StatusCode.NOT_FOUND"
    assert said["text"]
    assert "".join(said["pieces"]) == said["text"]
    assert len(said["pieces"]) == 12
    assert said["unloaded"] == [False, False, True]
    assert said["again"] == [True, True]


@needs_peer
def test_a_tgis_client_gets_what_http_gives(port: Port) -> None:
    said = port.run(TGIS, KEY)
    expected = [port.greedy(text, 12) for text in (PROMPT, "once upon a time")]
    assert said["texts"] == [each["generated_text"] for each in expected]
    for (inputs, generated, reason), each in zip(said["counts"], expected, strict=True):
        assert generated == each["details"]["generated_tokens"]
        assert inputs > 2
        assert reason in {1, 2}  # MAX_TOKENS, EOS_TOKEN
    for tokens, each in zip(said["tokens"], expected, strict=True):
        assert [text for text, _, _ in tokens] == [token["text"] for token in each["details"]["tokens"]]
        assert [value for _, value, _ in tokens] == pytest.approx(
            [token["logprob"] for token in each["details"]["tokens"]], abs=1e-3
        )
        assert all(tops >= 2 for _, _, tops in tokens)
    first, *rest = said["pieces"]
    assert first == ["", said["counts"][0][0], 0, 0]
    assert "".join(piece[0] for piece in rest) == said["texts"][0]
    assert [piece[2] for piece in rest] == list(range(1, said["counts"][0][1] + 1))
    assert [piece[3] for piece in rest[:-1]] == [0] * (len(rest) - 1)
    count, tokens, offsets = said["tokenized"]
    assert count == len(tokens) == len(offsets)
    assert offsets[0] == [0, 0]  # the token in front of every text
    assert offsets[-1][1] == len("h\u00e9llo world")
    assert said["info"] == [0, 512, 511]
    stop = said["texts"][0][3:5]
    cut = said["texts"][0][: said["texts"][0].index(stop)]
    assert said["stop kept"][1:3] == [5, stop]
    assert stop in said["stop kept"][0]
    assert said["stop kept"][3] == said["stop kept"][0]
    assert said["stop left out"] == [cut, 5, stop, cut]


def stub_of(channel: grpc.Channel) -> Any:
    return fmaas_pb2_grpc.GenerationServiceStub(channel)


def wish(text: str = PROMPT, new_tokens: int = 8, **stopping: Any) -> fmaas_pb2.SingleGenerationRequest:
    params = fmaas_pb2.Parameters(stopping=fmaas_pb2.StoppingCriteria(max_new_tokens=new_tokens, **stopping))
    return fmaas_pb2.SingleGenerationRequest(request=fmaas_pb2.GenerationRequest(text=text), params=params)


USER = (("authorization", f"Bearer {KEY}"),)


def test_services_are_found_by_reflection(channel: grpc.Channel) -> None:
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
    (answer,) = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
    names = {each.name for each in answer.list_services_response.service}
    assert {"fmaas.GenerationService", "inference.GRPCInferenceService"} <= names


def test_a_deadline_and_a_cancel_end_the_generation(port: Port, channel: grpc.Channel) -> None:
    stub = stub_of(channel)
    with pytest.raises(grpc.RpcError) as caught:
        list(stub.GenerateStream(wish(new_tokens=450), metadata=USER, timeout=0.3))
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await_true(port.server.idle, "nothing runs after a deadline")
    answers = stub.GenerateStream(wish(new_tokens=450), metadata=USER)
    next(answers)
    next(answers)
    answers.cancel()
    await_true(port.server.idle, "nothing runs after a cancel")


def test_a_time_limit_ends_with_what_there_is(channel: grpc.Channel) -> None:
    started = time.monotonic()
    *_, last = stub_of(channel).GenerateStream(wish(new_tokens=450, time_limit_millis=300), metadata=USER)
    assert last.stop_reason == fmaas_pb2.TIME_LIMIT
    assert 0 < last.generated_token_count < 450
    assert time.monotonic() - started < 5


@pytest.mark.parametrize(
    ("request_", "metadata", "code", "text"),
    [
        (wish(min_new_tokens=3), USER, grpc.StatusCode.INVALID_ARGUMENT, "stopping.min_new_tokens"),
        (wish(new_tokens=4000), USER, grpc.StatusCode.INVALID_ARGUMENT, "must be <= 512"),
        (wish(text=""), USER, grpc.StatusCode.INVALID_ARGUMENT, "cannot be empty"),
        (wish(), (), grpc.StatusCode.UNAUTHENTICATED, "api key"),
        (wish(text="x" * 200_000), USER, grpc.StatusCode.RESOURCE_EXHAUSTED, ""),
    ],
    ids=["least number", "too many", "empty", "no key", "too large"],
)
def test_refusals_are_statuses_with_reasons(
    channel: grpc.Channel, request_: Any, metadata: Any, code: grpc.StatusCode, text: str
) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        list(stub_of(channel).GenerateStream(request_, metadata=metadata))
    assert (caught.value.code(), text in caught.value.details()) == (code, True), caught.value.details()


def test_guided_decoding_is_kept(channel: grpc.Channel) -> None:
    request = wish(new_tokens=20)
    request.params.decoding.choice.choices.extend(["yes (really)", "no"])
    *_, last = answers = list(stub_of(channel).GenerateStream(request, metadata=USER))
    assert "".join(each.text for each in answers) in {"yes (really)", "no"}
    assert last.stop_reason == fmaas_pb2.EOS_TOKEN


def test_ready_follows_the_model_in_place_changes_too(port: Port, channel: grpc.Channel, tmp_path: Path) -> None:
    """Asked all the time while the model sleeps and wakes: ready exactly while it takes requests."""
    stub: Any = inference_pb2_grpc.GRPCInferenceServiceStub(channel)
    headers = {"authorization": f"Bearer {TOKEN}"}

    def ready() -> bool:
        return bool(stub.ServerReady(inference_pb2.ServerReadyRequest()).ready)

    assert ready()
    assert port.server.http.post(f"{port.server.url}/admin/models/sleep", json={}, headers=headers).status_code == 200
    assert not ready()
    assert port.server.http.post(f"{port.server.url}/admin/models/wake", json={}, headers=headers).status_code == 200
    assert ready()
