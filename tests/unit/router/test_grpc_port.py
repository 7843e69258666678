"""Who may come in at the gRPC port (certificates, keys, options that contradict each other), and which numbers."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from router_bench import router_bench

from deepseek_tgi.errors import ConfigError, RequestError, ResourceError
from deepseek_tgi.pb import fmaas_pb2, fmaas_pb2_grpc, inference_pb2, inference_pb2_grpc
from deepseek_tgi.probes.grpc_health import Directory
from deepseek_tgi.probes.owner import Owner
from deepseek_tgi.probes.state import Event
from deepseek_tgi.router.certificates import check_certificates
from deepseek_tgi.router.config import RouterConfig
from deepseek_tgi.router.grpc_port import GrpcPort, credentials_of
from deepseek_tgi.router.late_services import FMAAS
from deepseek_tgi.router.model_state import GRPC_SERVICES
from deepseek_tgi.router.requests import Parameters
from deepseek_tgi.router.stop_text import StopText
from deepseek_tgi.router.validation import Limits, check_parameters

WISH = fmaas_pb2.BatchedGenerationRequest(requests=[fmaas_pb2.GenerationRequest(text="hello")])
LOAD = inference_pb2.RepositoryModelLoadRequest(model_name="other")


@dataclasses.dataclass(frozen=True)
class Authority:
    """A CA made with openssl, and what it signed."""

    folder: Path

    def openssl(self, *argv: str) -> None:
        subprocess.run(["openssl", *argv], cwd=self.folder, check=True, capture_output=True, stdin=subprocess.DEVNULL)

    @classmethod
    def make(cls, folder: Path) -> Authority:
        folder.mkdir()
        found = cls(folder)
        request = ["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=authority"]
        found.openssl(*request, "-keyout", "ca.key", "-out", "ca.pem")
        return found

    def sign(self, name: str) -> None:
        subject = ["-subj", f"/CN={name}", "-addext", "subjectAltName=DNS:localhost"]
        self.openssl(
            *("req", "-newkey", "rsa:2048", "-nodes", *subject), "-keyout", f"{name}.key", "-out", f"{name}.csr"
        )
        signing = ["-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-copy_extensions", "copy"]
        self.openssl("x509", "-req", "-in", f"{name}.csr", *signing, "-out", f"{name}.pem")

    def path(self, name: str) -> str:
        return str(self.folder / name)

    def read(self, name: str) -> bytes:
        return (self.folder / name).read_bytes()


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificates")
    found = Authority.make(tmp_path_factory.mktemp("tls") / "ca")
    for name in ("server", "client"):
        found.sign(name)
    return found


@asynccontextmanager
async def served(folder: Path, **options: Any) -> AsyncIterator[int]:
    async with router_bench(folder) as bench:
        config = dataclasses.replace(bench.router.state.config, hostname="127.0.0.1", grpc_port=0, **options)
        port = GrpcPort(config, bench.router.directory, bench.router.owner)
        port.open(bench.router)
        await port.start()
        try:
            yield port.port
        finally:
            await port.stop(1)


async def status(call: Any) -> grpc.StatusCode:
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def test_only_clients_with_a_signed_certificate_come_in_and_they_may_do_all(
    tmp_path: Path, authority: Authority
) -> None:
    tls = {"grpc_tls_cert": authority.path("server.pem"), "grpc_tls_key": authority.path("server.key")}
    trusting = {"root_certificates": authority.read("ca.pem")}
    signed = grpc.ssl_channel_credentials(
        private_key=authority.read("client.key"), certificate_chain=authority.read("client.pem"), **trusting
    )
    async with served(tmp_path, **tls, grpc_client_ca=authority.path("ca.pem"), api_key="k") as port:
        address = f"localhost:{port}"
        async with grpc.aio.secure_channel(address, signed) as channel:
            generation: Any = fmaas_pb2_grpc.GenerationServiceStub(channel)
            inference: Any = inference_pb2_grpc.GRPCInferenceServiceStub(channel)
            assert len((await generation.Generate(WISH)).responses) == 1
            # Let in, and told what is missing: these shards hold one model for good.
            assert await status(inference.RepositoryModelLoad(LOAD)) is grpc.StatusCode.PERMISSION_DENIED
        async with grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(**trusting)) as channel:
            stranger: Any = fmaas_pb2_grpc.GenerationServiceStub(channel)
            assert await status(stranger.Generate(WISH, timeout=5)) is grpc.StatusCode.UNAVAILABLE
        async with grpc.aio.insecure_channel(address) as channel:
            plain: Any = fmaas_pb2_grpc.GenerationServiceStub(channel)
            assert await status(plain.Generate(WISH, timeout=5)) is grpc.StatusCode.UNAVAILABLE


async def test_the_port_tells_the_state_before_there_is_a_model_and_serves_when_there_is(tmp_path: Path) -> None:
    async with router_bench(tmp_path) as bench:
        owner = Owner()
        directory = Directory(owner, *GRPC_SERVICES)
        config = dataclasses.replace(bench.router.state.config, hostname="127.0.0.1", grpc_port=0)
        port = GrpcPort(config, directory, owner)
        await port.start()
        owner.apply(Event.LOAD, stage="waiting for the shards")
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port.port}") as channel:
                health: Any = health_pb2_grpc.HealthStub(channel)
                inference: Any = inference_pb2_grpc.GRPCInferenceServiceStub(channel)
                generation: Any = fmaas_pb2_grpc.GenerationServiceStub(channel)
                watch = health.Watch(health_pb2.HealthCheckRequest(service=FMAAS))
                assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
                assert (await inference.ServerLive(inference_pb2.ServerLiveRequest())).live
                assert not (await inference.ServerReady(inference_pb2.ServerReadyRequest())).ready
                name = inference_pb2.ModelReadyRequest(name=config.model_id)
                assert not (await inference.ModelReady(name)).ready
                single = fmaas_pb2.SingleGenerationRequest(request=WISH.requests[0])
                for call in (
                    generation.Generate(WISH, timeout=5),
                    generation.GenerateStream(single, timeout=5).read(),
                    inference.ModelStreamInfer(timeout=5).read(),  # nothing is sent, and nothing waited for
                    inference.RepositoryIndex(inference_pb2.RepositoryIndexRequest(), timeout=5),
                ):
                    with pytest.raises(grpc.aio.AioRpcError) as caught:
                        await call
                    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
                    assert caught.value.details() == "The server is not ready: loading, waiting for the shards"
                nothing = channel.unary_unary("/other.Service/Call")
                with pytest.raises(grpc.aio.AioRpcError, match="UNIMPLEMENTED"):
                    await nothing(b"", timeout=5)

                port.open(bench.router)
                owner.apply(Event.LOADED)
                owner.apply(Event.WARMED)
                assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
                assert len((await generation.Generate(WISH)).responses) == 1
                assert (await inference.ModelReady(name)).ready
                watch.cancel()
        finally:
            directory.close()
            await port.stop(1)


async def test_without_a_token_nobody_changes_models(tmp_path: Path) -> None:
    async with served(tmp_path) as port, grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub: Any = inference_pb2_grpc.GRPCInferenceServiceStub(channel)
        bearer = (("authorization", "Bearer "),)
        assert await status(stub.RepositoryModelLoad(LOAD)) is grpc.StatusCode.PERMISSION_DENIED
        assert await status(stub.RepositoryModelLoad(LOAD, metadata=bearer)) is grpc.StatusCode.PERMISSION_DENIED
        assert (await stub.ServerReady(inference_pb2.ServerReadyRequest())).ready


def wish(**parameters: Any) -> inference_pb2.ModelInferRequest:
    """As `tritonclient` puts parameters: whole numbers in `int64_param`, others in `double_param`, and text."""
    found = inference_pb2.ModelInferRequest(inputs=[{"name": "text_input", "datatype": "BYTES", "shape": [1]}])
    found.inputs[0].contents.bytes_contents.append(b"hello")
    for name, value in parameters.items():
        kind = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}[type(value)]
        setattr(found.parameters[name], kind, value)
    return found


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({"max_tokens": -6}, "parameters.max_tokens: invalid value: integer `-6`, expected u32"),
        ({"max_tokens": float("inf")}, "parameters.max_tokens: invalid type: floating point `inf`, expected u32"),
        ({"max_tokens": True}, "parameters.max_tokens: invalid type: boolean `true`, expected u32"),
        ({"max_new_tokens": 0}, "`max_new_tokens` must be strictly positive"),
        ({"temperature": float("nan")}, "parameters.temperature: invalid value: floating point `nan`, expected f32"),
        ({"temperature": "1e999"}, "parameters.temperature: invalid value: floating point `inf`, expected f32"),
        ({"top_p": 2.0}, "`top_p` must be > 0.0 and < 1.0"),
        ({"seed": -1}, "parameters.seed: invalid value: integer `-1`, expected u64"),
        ({"top_k": "many"}, "parameters.top_k: got 'many', expected a number"),
    ],
)
async def test_numbers_that_are_none_are_the_clients_fault_and_reach_no_shard(
    tmp_path: Path, parameters: dict[str, Any], text: str
) -> None:
    async with router_bench(tmp_path) as bench:
        config = dataclasses.replace(bench.router.state.config, hostname="127.0.0.1", grpc_port=0)
        port = GrpcPort(config, bench.router.directory, bench.router.owner)
        port.open(bench.router)
        await port.start()
        request = wish(**parameters)
        request.model_name = bench.router.state.config.model_id
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port.port}") as channel:
                stub: Any = inference_pb2_grpc.GRPCInferenceServiceStub(channel)
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await stub.ModelInfer(request)
        finally:
            await port.stop(1)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert text in caught.value.details()
        assert bench.router.state.liveness.healthy


@pytest.mark.parametrize("field", ["temperature", "repetition_penalty"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, 0.0])
def test_no_wire_brings_a_number_to_the_shard_that_is_not_above_zero_and_finite(field: str, value: float) -> None:
    given: dict[str, Any] = {field: value}
    with pytest.raises(RequestError, match=f"`{field}` must be strictly positive"):
        check_parameters(Parameters(**given), Limits(2, 4, 5, 100, 200))


async def test_a_taken_port_is_named(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    async with served(tmp_path) as port, router_bench(tmp_path / "other") as bench:
        config = dataclasses.replace(bench.router.state.config, hostname="127.0.0.1", grpc_port=port)
        with pytest.raises(ResourceError, match=f"127.0.0.1:{port}"):
            GrpcPort(config, bench.router.directory, bench.router.owner)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"grpc_tls_cert": "a.pem"}, "belong together"),
        ({"grpc_tls_key": "a.key"}, "belong together"),
        ({"grpc_client_ca": "ca.pem"}, "over TLS only"),
        ({"grpc_tls_cert": "/nowhere.pem", "grpc_tls_key": "/nowhere.key"}, "/nowhere"),
    ],
)
def test_certificates_that_do_not_fit_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        credentials_of(RouterConfig(**options))


def test_certificates_are_held_against_their_keys_before_anything_is_loaded(authority: Authority) -> None:
    own, key, ca = authority.path("server.pem"), authority.path("server.key"), authority.path("ca.pem")
    check_certificates(own, key, ca)
    authority.openssl("rsa", "-aes256", "-passout", "pass:x", "-in", "server.key", "-out", "locked.key")
    for files, named in (
        ((own, authority.path("client.key"), None), "client.key"),
        ((own, authority.path("locked.key"), None), "the key is encrypted"),
        ((key, own, None), "server.key and"),
        ((own, key, key), "server.key: expected certificates in PEM"),
        ((own, key, authority.path("none.pem")), "none.pem: cannot be read"),
    ):
        with pytest.raises(ConfigError, match=named):
            check_certificates(*files)


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize(
    ("pieces", "stops", "kept", "left_out"),
    [
        (["ab", "c<", "s", "top>"], ("<stop>",), "abc<stop>", "abc"),
        (["a<st", "b<sto", "c"], ("<stop>",), "a<stb<stoc", "a<stb<stoc"),
        (["aa", "ab"], ("aab", "ab"), "aaab", "a"),
        (["x", "y"], (), "xy", "xy"),
    ],
)
def test_text_is_shown_as_it_comes_but_never_what_is_left_out(
    pieces: list[str], stops: tuple[str, ...], kept: str, left_out: str, keeps: bool
) -> None:
    shown = StopText(stops, keeps)
    out = [shown.feed(piece) for piece in pieces[:-1]]
    out.append(shown.finish("".join(pieces)))
    assert "".join(out) == (kept if keeps else left_out)
    if keeps:
        assert out == pieces
