"""Our copies of two public wires, held field by field against the generated code that published clients carry."""

from __future__ import annotations

import json
import subprocess
from functools import cache
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, json_format
from peers import PEERS

from deepseek_tgi.pb import fmaas_pb2, inference_pb2

PEER = PEERS["grpc-clients"]
DUMP = """
import importlib.util, json, sys
from google.protobuf import descriptor_pb2, json_format
package, path = sys.argv[1:]
# By path: the packages around these modules import servers and benchmarks.
spec = importlib.util.find_spec(package)
where = spec.submodule_search_locations[0] + "/" + path
spec = importlib.util.spec_from_file_location("theirs", where)
module = importlib.util.module_from_spec(spec)
sys.path.insert(0, spec.origin.rpartition("/")[0])
spec.loader.exec_module(module)
proto = descriptor_pb2.FileDescriptorProto()
module.DESCRIPTOR.CopyToProto(proto)
print(json.dumps(json_format.MessageToDict(proto)))
"""
WIRES = {
    "inference": (inference_pb2, "tritonclient", "grpc/service_pb2.py"),
    "fmaas": (fmaas_pb2, "vllm_tgis_adapter", "grpc/pb/generation_pb2.py"),
}
Facts = dict[str, Any]

pytestmark = pytest.mark.skipif(not PEER.ready, reason="python -m tests.peers prepares the published clients")


@cache
def theirs(package: str) -> Facts:
    _, distribution, path = WIRES[package]
    argv = [str(PEER.python), "-c", DUMP, distribution, path]
    done = subprocess.run(argv, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return facts(json.loads(done.stdout))


@cache
def ours(package: str) -> Facts:
    proto = descriptor_pb2.FileDescriptorProto()
    WIRES[package][0].DESCRIPTOR.CopyToProto(proto)
    return facts(json_format.MessageToDict(proto))


def facts(proto: dict[str, Any]) -> Facts:
    """What decides the wire, by full name: each field's number, type, label and presence; values; calls."""
    found: Facts = {"package": proto["package"], "syntax": proto["syntax"]}

    def message(value: dict[str, Any], path: str) -> None:
        oneofs = [each["name"] for each in value.get("oneofDecl", [])]
        found[path] = {
            field["number"]: [
                *(field["name"], field["type"], field.get("typeName"), field["label"]),
                *(field.get("proto3Optional", False), oneofs[field["oneofIndex"]] if "oneofIndex" in field else None),
            ]
            for field in value.get("field", [])
        }
        for inner in value.get("nestedType", []):
            message(inner, f"{path}.{inner['name']}")
        for inner in value.get("enumType", []):
            enum(inner, f"{path}.{inner['name']}")

    def enum(value: dict[str, Any], path: str) -> None:
        found[path] = {each["name"]: each.get("number", 0) for each in value["value"]}

    for each in proto.get("messageType", []):
        message(each, each["name"])
    for each in proto.get("enumType", []):
        enum(each, each["name"])
    for service in proto["service"]:
        for call in service["method"]:
            streams = call.get("clientStreaming", False), call.get("serverStreaming", False)
            found[f"{service['name']}/{call['name']}"] = (call["inputType"], call["outputType"], streams)
    return found


@pytest.mark.parametrize("package", WIRES)
def test_what_we_declare_is_what_they_declare(package: str) -> None:
    mine, published = ours(package), theirs(package)
    assert len(mine) > 20, "the reader found next to nothing"
    assert mine == {name: published.get(name) for name in mine}


def test_nothing_of_the_text_generation_service_is_missing() -> None:
    assert theirs("fmaas").keys() == ours("fmaas").keys()


def test_only_named_parts_of_the_inference_protocol_are_left_out() -> None:
    missing = {name.partition(".")[0] for name in theirs("inference").keys() - ours("inference").keys()}
    calls = {name.partition("/")[2] for name in missing if "/" in name}
    assert calls == {
        "ModelConfig",
        "ModelStatistics",
        "TraceSetting",
        "LogSettings",
        *(f"{kind}SharedMemory{verb}" for kind in ("System", "Cuda") for verb in ("Status", "Register", "Unregister")),
    }
