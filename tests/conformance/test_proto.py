"""Checklist basis: the wire facts of TGI v3, restated by hand from the contract and pinned field by field."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2

from deepseek_tgi.pb import generate_pb2 as pb
from deepseek_tgi.pb import generate_pb2_grpc

ROOT = Path(__file__).resolve().parents[2]

# message -> "number name type" a field; `opt` tracks presence, `rep` repeats, a capitalised type is a message or enum.
MESSAGES: dict[str, list[str]] = {
    "HealthRequest": [],
    "HealthResponse": [],
    "InfoRequest": [],
    "InfoResponse": [
        "1 requires_padding bool",
        "2 dtype string",
        "3 device_type string",
        "4 window_size opt uint32",
        "5 speculate uint32",
        "6 support_chunking bool",
        "7 use_prefix_caching bool",
        "8 attention_impl string",
        "9 block_size uint32",
    ],
    "ServiceDiscoveryRequest": [],
    "ServiceDiscoveryResponse": ["1 urls rep string"],
    "ClearCacheRequest": ["1 id opt uint64"],
    "ClearCacheResponse": [],
    "Image": ["1 data bytes", "2 mimetype string"],
    "InputChunk": ["1 text oneof:chunk string", "2 image oneof:chunk Image"],
    "Input": ["1 chunks rep InputChunk"],
    "NextTokenChooserParameters": [
        "1 temperature float",
        "2 top_k uint32",
        "3 top_p float",
        "4 typical_p float",
        "5 do_sample bool",
        "6 seed uint64",
        "7 repetition_penalty float",
        "8 watermark bool",
        "9 frequency_penalty float",
        "10 grammar string",
        "11 grammar_type GrammarType",
    ],
    "StoppingCriteriaParameters": [
        "1 max_new_tokens uint32",
        "2 stop_sequences rep string",
        "3 ignore_eos_token bool",
    ],
    "Request": [
        "1 id uint64",
        "2 inputs string",
        "3 truncate uint32",
        "4 parameters NextTokenChooserParameters",
        "5 stopping_parameters StoppingCriteriaParameters",
        "6 prefill_logprobs bool",
        "7 top_n_tokens uint32",
        "8 input_chunks Input",
        "9 blocks rep uint32",
        "10 slots rep uint32",
        "11 adapter_id opt string",
        "12 cache_len uint32",
        "13 add_special_tokens bool",
        "14 chunk_len opt uint32",
    ],
    "Batch": ["1 id uint64", "2 requests rep Request", "3 size uint32", "4 max_tokens uint32", "5 max_blocks uint32"],
    "CachedBatch": [
        "1 id uint64",
        "2 request_ids rep uint64",
        "3 size uint32",
        "4 max_tokens uint32",
        "5 current_tokens uint32",
    ],
    "GeneratedText": [
        "1 text string",
        "2 generated_tokens uint32",
        "3 finish_reason FinishReason",
        "4 seed opt uint64",
    ],
    "Tokens": ["1 ids rep uint32", "2 logprobs rep float", "3 texts rep string", "4 is_special rep bool"],
    "Generation": [
        "1 request_id uint64",
        "2 prefill_tokens Tokens",
        "3 tokens Tokens",
        "4 generated_text opt GeneratedText",
        "5 top_tokens rep Tokens",
    ],
    "FilterBatchRequest": ["1 batch_id uint64", "2 request_ids rep uint64"],
    "FilterBatchResponse": ["1 batch CachedBatch"],
    "PrefillRequest": ["1 batch Batch", "2 cached_batch CachedBatch"],
    "PrefillResponse": [
        "1 generations rep Generation",
        "2 batch opt CachedBatch",
        "3 forward_ns uint64",
        "4 decode_ns uint64",
        "5 total_ns uint64",
        "6 concat_ns opt uint64",
    ],
    "DecodeRequest": ["1 batches rep CachedBatch"],
    "DecodeResponse": [
        "1 generations rep Generation",
        "2 batch opt CachedBatch",
        "3 forward_ns uint64",
        "4 decode_ns uint64",
        "5 total_ns uint64",
        "6 concat_ns opt uint64",
    ],
    "WarmupRequest": [
        "1 batch Batch",
        "2 max_input_tokens opt uint32",
        "3 max_prefill_tokens uint32",
        "4 max_total_tokens opt uint32",
    ],
    "WarmupResponse": [
        "1 max_supported_total_tokens opt uint32",
        "2 max_input_tokens uint32",
        "3 max_total_tokens uint32",
    ],
}

ENUMS: dict[str, dict[str, int]] = {
    "GrammarType": {"GRAMMAR_TYPE_NONE": 0, "GRAMMAR_TYPE_JSON": 1, "GRAMMAR_TYPE_REGEX": 2},
    "FinishReason": {
        "FINISH_REASON_LENGTH": 0,
        "FINISH_REASON_EOS_TOKEN": 1,
        "FINISH_REASON_STOP_SEQUENCE": 2,
    },
}

CALLS = ("Info", "ServiceDiscovery", "ClearCache", "FilterBatch", "Warmup", "Prefill", "Decode", "Health")

FIELD = descriptor_pb2.FieldDescriptorProto


def file_proto() -> descriptor_pb2.FileDescriptorProto:
    proto = descriptor_pb2.FileDescriptorProto()
    pb.DESCRIPTOR.CopyToProto(proto)
    return proto


def describe(field: descriptor_pb2.FieldDescriptorProto, message: descriptor_pb2.DescriptorProto) -> str:
    """One field in the notation of `MESSAGES`."""
    if field.type in (FIELD.TYPE_MESSAGE, FIELD.TYPE_ENUM):
        kind = field.type_name.removeprefix(".generate.v3.")
    else:
        kind = FIELD.Type.Name(field.type).removeprefix("TYPE_").lower()
    mark = ""
    if field.label == FIELD.LABEL_REPEATED:
        mark = "rep "
    elif field.proto3_optional:
        mark = "opt "
    elif field.HasField("oneof_index"):
        mark = f"oneof:{message.oneof_decl[field.oneof_index].name} "
    return f"{field.number} {field.name} {mark}{kind}"


def test_package_and_syntax() -> None:
    assert (file_proto().package, file_proto().syntax) == ("generate.v3", "proto3")


def test_no_message_or_enum_is_missing_or_extra() -> None:
    proto = file_proto()
    nested = [e.name for m in proto.message_type for e in m.enum_type]
    assert {m.name for m in proto.message_type} == set(MESSAGES)
    assert {e.name for e in proto.enum_type} | set(nested) == set(ENUMS)


@pytest.mark.parametrize("name", MESSAGES)
def test_fields_of(name: str) -> None:
    message = next(m for m in file_proto().message_type if m.name == name)
    assert [describe(field, message) for field in message.field] == MESSAGES[name]


@pytest.mark.parametrize("name", ENUMS)
def test_values_of(name: str) -> None:
    enum = next(e for e in file_proto().enum_type if e.name == name)
    assert {value.name: value.number for value in enum.value} == ENUMS[name]


def test_service_has_eight_unary_calls() -> None:
    (service,) = file_proto().service
    assert service.name == "TextGenerationService"
    assert {m.name for m in service.method} == set(CALLS)
    for method in service.method:
        assert not method.client_streaming
        assert not method.server_streaming
        assert method.input_type == f".generate.v3.{method.name}Request"
        assert method.output_type == f".generate.v3.{method.name}Response"


def test_stub_calls_the_paths_that_the_router_calls() -> None:
    paths = []

    class Channel:
        def unary_unary(self, path: str, **_: object) -> None:
            paths.append(path)

    stub: Any = generate_pb2_grpc.TextGenerationServiceStub
    stub(Channel())
    assert sorted(paths) == sorted(f"/generate.v3.TextGenerationService/{call}" for call in CALLS)


def test_bytes_of_a_request_written_by_hand() -> None:
    # Tag = number << 3 | wire type; 9 and 10 are packed runs; 12 and 14 are varints; 13 is a bool.
    wire = bytes.fromhex("0807" + "12026869" + "18800a" + "4a020102" + "5202100b" + "6020" + "6801" + "7000")
    request = pb.Request.FromString(wire)
    assert (request.id, request.inputs, request.truncate) == (7, "hi", 1280)
    assert (list(request.blocks), list(request.slots)) == ([1, 2], [16, 11])
    assert (request.cache_len, request.add_special_tokens) == (32, True)
    assert request.HasField("chunk_len")
    assert not request.HasField("adapter_id")
    assert request.SerializeToString(deterministic=True) == wire


def test_committed_code_is_what_the_proto_generates(tmp_path: Path) -> None:
    subprocess.run(
        [
            *(sys.executable, "-m", "grpc_tools.protoc", f"-Ideepseek_tgi/pb={ROOT / 'proto' / 'v3'}"),
            *(f"--python_out={tmp_path}", f"--pyi_out={tmp_path}", f"--grpc_python_out={tmp_path}"),
            "deepseek_tgi/pb/generate.proto",
        ],
        check=True,
    )
    for name in ("generate_pb2.py", "generate_pb2.pyi", "generate_pb2_grpc.py"):
        fresh = (tmp_path / "deepseek_tgi" / "pb" / name).read_text()
        assert (ROOT / "deepseek_tgi" / "pb" / name).read_text() == fresh, f"{name} is stale: run .ci/proto"
