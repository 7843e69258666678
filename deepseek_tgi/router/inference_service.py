"""The Open Inference Protocol, version 2: is it ready, what is it, what could it be; and generation as one tensor."""

# ruff: noqa: N802 - the methods carry the wire's names

from __future__ import annotations

import struct
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

from deepseek_tgi import __version__
from deepseek_tgi.errors import RequestError
from deepseek_tgi.pb import inference_pb2 as pb
from deepseek_tgi.pb import inference_pb2_grpc
from deepseek_tgi.probes.kubernetes import describe
from deepseek_tgi.probes.owner import Owner
from deepseek_tgi.router.change import PLANS, Wish
from deepseek_tgi.router.errors import ShapeError
from deepseek_tgi.router.fields import float32, signed32, u32, u64
from deepseek_tgi.router.grpc_calls import Calls, ForbiddenError, UnknownModelError, answered, streamed
from deepseek_tgi.router.model_changes import ModelChanges
from deepseek_tgi.router.models import Models
from deepseek_tgi.router.requests import GenerateRequest, Parameters
from deepseek_tgi.router.served_model import ServedModel

INFERENCE = "inference.GRPCInferenceService"
NAME = "deepseek-tgi"
PLATFORM = "deepseek_tgi"
EXTENSIONS = ("model_repository",)
TEXT_IN, TEXT_OUT, BYTES = "text_input", "text_output", "BYTES"
FINAL = "triton_final_response"
LOAD_PARAMETERS = ("revision", "quantize", "manifest_sha256", "plan")
KNOWN = frozenset(
    ("max_tokens", "max_new_tokens", "temperature", "top_k", "top_p", "seed", "stop", "repetition_penalty", "stream")
)

T = TypeVar("T")


class ServerFacts(inference_pb2_grpc.GRPCInferenceServiceServicer):
    """What can be said of a server without a model; as every probe says it."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner

    async def ServerLive(self, request: pb.ServerLiveRequest, context: Any) -> pb.ServerLiveResponse:
        """False if it should be started anew."""
        return pb.ServerLiveResponse(live=self._owner.current.report.live)

    async def ServerReady(self, request: pb.ServerReadyRequest, context: Any) -> pb.ServerReadyResponse:
        """True if some model takes requests."""
        return pb.ServerReadyResponse(ready=self._ready())

    async def ServerMetadata(self, request: pb.ServerMetadataRequest, context: Any) -> pb.ServerMetadataResponse:
        """Name, version and extensions."""
        return pb.ServerMetadataResponse(name=NAME, version=__version__, extensions=EXTENSIONS)

    async def ModelReady(self, request: pb.ModelReadyRequest, context: Any) -> pb.ModelReadyResponse:
        """There is none."""
        return pb.ModelReadyResponse(ready=False)

    def _ready(self) -> bool:
        return self._owner.current.report.ready


class InferenceService(ServerFacts):
    """Facts are told to anybody; generating and changing the model is not."""

    def __init__(self, calls: Calls, models: Models, changes: ModelChanges | None, owner: Owner) -> None:
        super().__init__(owner)
        self.calls = calls
        self._models = models
        self._changes = changes

    async def ModelReady(self, request: pb.ModelReadyRequest, context: Any) -> pb.ModelReadyResponse:
        """True if this model takes requests; its version is its generation."""
        model = self._models.open
        named = model is not None and request.name == model.name and _is_version(request.version, model)
        return pb.ModelReadyResponse(ready=named and self._ready())

    @answered
    async def ModelMetadata(self, request: pb.ModelMetadataRequest, context: Any) -> pb.ModelMetadataResponse:
        """One text in, one text out."""
        model = self._named(self._models.current, request.name, request.version)
        tensor = pb.ModelMetadataResponse.TensorMetadata
        return pb.ModelMetadataResponse(
            name=model.name,
            versions=[_version(model)],
            platform=PLATFORM,
            inputs=[tensor(name=TEXT_IN, datatype=BYTES, shape=[1])],
            outputs=[tensor(name=TEXT_OUT, datatype=BYTES, shape=[1])],
        )

    @answered
    async def ModelInfer(self, request: pb.ModelInferRequest, context: Any) -> pb.ModelInferResponse:
        """One generation, whole."""
        self.calls.admit(context)
        with self.calls.traffic.request():
            model = self._named(await self._models.admitted(), request.model_name, request.model_version)
            with model.traffic.request():
                generated = await model.state.infer.generate(_generation(request))
                return _answer(request, model, generated.ending.text, final=True)

    @streamed
    async def ModelStreamInfer(
        self, requests: AsyncIterator[pb.ModelInferRequest], context: Any
    ) -> AsyncIterator[pb.ModelStreamInferResponse]:
        """Each request's text in pieces, one request after the other."""
        async for request in requests:
            self.calls.admit(context)
            with self.calls.traffic.request():
                model = self._named(await self._models.admitted(), request.model_name, request.model_version)
                with model.traffic.request():
                    async for answer in _pieces(request, model):
                        yield pb.ModelStreamInferResponse(infer_response=answer)

    @answered
    async def RepositoryIndex(self, request: pb.RepositoryIndexRequest, context: Any) -> pb.RepositoryIndexResponse:
        """The model that is served, the one that loads, and those that lie in the repository."""
        found: dict[str, pb.RepositoryIndexResponse.ModelIndex] = {}
        entry = pb.RepositoryIndexResponse.ModelIndex
        for name in [] if self._changes is None else await self._changes.repository.names():
            found[name] = entry(name=name, version="", state="UNAVAILABLE", reason="not loaded")
        running = None if self._changes is None else self._changes.running
        if running is not None and running.kind == "load":
            how_far = f"{running.stage} {running.percent:.0f} %"
            found[running.model] = entry(name=running.model, version="", state="LOADING", reason=how_far)
        current = self._models.current
        if current is not None:
            ready = self._models.open is current and self._ready()
            found[current.name] = entry(
                name=current.name,
                version=_version(current),
                state="READY" if ready else "UNAVAILABLE",
                reason="" if ready else self._models.reason or describe(self._owner.current),
            )
        wanted = [each for each in found.values() if each.state == "READY" or not request.ready]
        return pb.RepositoryIndexResponse(models=wanted)

    @answered
    async def RepositoryModelLoad(
        self, request: pb.RepositoryModelLoadRequest, context: Any
    ) -> pb.RepositoryModelLoadResponse:
        """Serve another model; answers when it takes the requests. Raises with the reason if it does not.

        As of Triton, nothing happens if it does already and its files are the same.
        """
        changes = self._changing(context)
        given = {key: value.string_param for key, value in request.parameters.items() if value.string_param}
        if unknown := sorted(given.keys() - set(LOAD_PARAMETERS)):
            raise RequestError(f"parameters {', '.join(unknown)}: unknown, expected {', '.join(LOAD_PARAMETERS)}")
        if any(value.bytes_param for value in request.parameters.values()):
            raise RequestError("files cannot be sent: a model is loaded from this machine")
        if given.get("plan", "auto") not in PLANS:
            raise RequestError(f"plan: got {given['plan']!r}, expected one of {', '.join(PLANS)}")
        wish = Wish(request.model_name, **given)
        if not await changes.serves(wish):
            await changes.started(changes.load(wish))
        return pb.RepositoryModelLoadResponse()

    @answered
    async def RepositoryModelUnload(
        self, request: pb.RepositoryModelUnloadRequest, context: Any
    ) -> pb.RepositoryModelUnloadResponse:
        """Serve nothing any more; nothing happens if this model is not served."""
        changes = self._changing(context)
        current = self._models.current
        if current is not None and current.name == request.model_name:
            await changes.started(changes.unload(request.model_name))
        elif request.model_name not in await changes.repository.names():
            raise UnknownModelError(f"{request.model_name} is neither served nor in the repository")
        return pb.RepositoryModelUnloadResponse()

    def _changing(self, context: Any) -> ModelChanges:
        self.calls.doorkeeper.change(context)
        if self._changes is None:
            raise ForbiddenError("these shards cannot change their model")
        return self._changes

    def _named(self, model: ServedModel | None, name: str, version: str) -> ServedModel:
        if model is None or name != model.name or not _is_version(version, model):
            served = "none is" if model is None else f"{model.name} (version {_version(model)}) is"
            raise UnknownModelError(f"model {name!r}, version {version or 'any'}, is not served; {served}")
        return model


def _version(model: ServedModel) -> str:
    return str(model.generation or 1)


def _is_version(version: str, model: ServedModel) -> bool:
    return version in {"", _version(model)}


def _generation(request: pb.ModelInferRequest) -> GenerateRequest:
    """The text and the parameters of a request. Raises `RequestError` naming what is wrong."""
    if len(request.inputs) != 1 or request.inputs[0].name != TEXT_IN or request.inputs[0].datatype != BYTES:
        raise RequestError(f"inputs: expected one tensor {TEXT_IN} of {BYTES}")
    given = {key: getattr(value, value.WhichOneof("parameter_choice")) for key, value in request.parameters.items()}
    if unknown := sorted(given.keys() - KNOWN):
        raise RequestError(f"parameters {', '.join(unknown)}: unknown, expected some of {', '.join(sorted(KNOWN))}")
    return GenerateRequest(
        _text(request),
        Parameters(
            max_new_tokens=_number(given, "max_new_tokens" if "max_new_tokens" in given else "max_tokens", u32),
            temperature=_number(given, "temperature", float32),
            top_k=_number(given, "top_k", signed32),
            top_p=_number(given, "top_p", float32),
            repetition_penalty=_number(given, "repetition_penalty", float32),
            seed=_number(given, "seed", u64),
            stop=(str(given["stop"]),) if given.get("stop") else (),
            do_sample="temperature" in given or "seed" in given,
        ),
    )


def _number(given: dict[str, Any], name: str, read: Callable[[Any, str], T]) -> T | None:
    """A parameter as the HTTP routes read it, None if it is absent. A number may come as text too."""
    if name not in given:
        return None
    value = given[name]
    try:
        if isinstance(value, str):
            value = float(value) if "." in value or "e" in value.lower() else int(value)
        return read(value, f"parameters.{name}")
    except ShapeError as error:
        raise RequestError(f"{error.path}: {error.reason}") from error
    except ValueError as error:
        raise RequestError(f"parameters.{name}: got {value!r}, expected a number") from error


def _text(request: pb.ModelInferRequest) -> str:
    if request.raw_input_contents:
        raw = request.raw_input_contents[0]
        if len(raw) < 4 or struct.unpack_from("<I", raw)[0] != len(raw) - 4:
            raise RequestError(f"{TEXT_IN}: expected one string, its length in front")
        data = raw[4:]
    else:
        values = request.inputs[0].contents.bytes_contents
        if len(values) != 1:
            raise RequestError(f"{TEXT_IN}: got {len(values)} strings, expected one")
        data = values[0]
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise RequestError(f"{TEXT_IN}: not UTF-8: {error}") from error


async def _pieces(request: pb.ModelInferRequest, model: ServedModel) -> AsyncIterator[pb.ModelInferResponse]:
    stream = await model.state.infer.open(_generation(request))
    try:
        while not stream.finished:
            for event in await stream.read():
                text = "" if event.token.special else event.token.text
                yield _answer(request, model, text, final=event.ending is not None)
    finally:
        stream.close()


def _answer(request: pb.ModelInferRequest, model: ServedModel, text: str, final: bool) -> pb.ModelInferResponse:
    output = pb.ModelInferResponse.InferOutputTensor(name=TEXT_OUT, datatype=BYTES, shape=[1])
    answer = pb.ModelInferResponse(
        model_name=model.name, model_version=_version(model), id=request.id, outputs=[output]
    )
    answer.parameters[FINAL].bool_param = final
    data = text.encode(errors="replace")
    if request.raw_input_contents:
        answer.raw_output_contents.append(struct.pack("<I", len(data)) + data)
    else:
        answer.outputs[0].contents.bytes_contents.append(data)
    return answer
