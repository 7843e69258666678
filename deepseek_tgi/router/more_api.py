"""Routes that lead to the others: `/tokenize`, `/v1/models`, SageMaker's `/invocations`, Vertex AI's `/vertex`."""

from __future__ import annotations

import asyncio
from typing import Any

from deepseek_tgi.errors import DeepseekTgiError, OverloadedError, RequestError
from deepseek_tgi.router.chat_api import ChatApi
from deepseek_tgi.router.completions_api import CompletionsApi
from deepseek_tgi.router.errors import ShapeError
from deepseek_tgi.router.fields import Fields, anything, list_of
from deepseek_tgi.router.http import Exchange
from deepseek_tgi.router.openai_requests import ChatRequest, chat_request, completion_request
from deepseek_tgi.router.requests import GenerateRequest, Parameters, generate_request
from deepseek_tgi.router.state import RouterState
from deepseek_tgi.router.tgi_api import NativeApi


class NoInstancesError(RequestError):
    """A Vertex request without instances."""

    error_type = "Input validation error"

    def __init__(self) -> None:
        super().__init__("Input validation error")


class InstanceError(DeepseekTgiError):
    """A Vertex instance that failed."""

    error_type = "Incomplete generation"

    def __init__(self) -> None:
        super().__init__("Incomplete generation")


class MoreApi:
    """Handlers that read a body and pass it on."""

    def __init__(self, state: RouterState, native: NativeApi, chat: ChatApi, completions: CompletionsApi) -> None:
        self._state = state
        self._native = native
        self._chat = chat
        self._completions = completions

    async def models(self, exchange: Exchange) -> None:
        """GET /v1/models."""
        name = self._state.config.model_id
        model = {"id": name, "object": "model", "created": 0, "owned_by": name}
        await exchange.respond_json(200, {"object": "list", "data": [model]})

    async def tokenize(self, exchange: Exchange) -> None:
        """POST /tokenize: the tokens of a text, special ones included, with their byte offsets."""
        request = generate_request(await self._state.body(exchange))
        await exchange.respond_json(200, await self._state.infer.validator.tokens(request.inputs, True))

    async def invocations(self, exchange: Exchange) -> None:
        """POST /invocations: a body of `/`, chat or completions, told apart by its main field."""
        body = await self._state.body(exchange)
        if not isinstance(body, dict) or not {"inputs", "messages", "prompt"} & body.keys():
            raise ShapeError("", "data did not match any variant of untagged enum SagemakerRequest")
        if "inputs" in body:
            await self._native.compat(exchange, generate_request(body))
        elif "messages" in body:
            await self._chat.respond(exchange, chat_request(body))
        else:
            await self._completions.respond(exchange, completion_request(body))

    async def vertex(self, exchange: Exchange) -> None:
        """POST /vertex: several texts or chats at once, answered in order."""
        fields = Fields(await self._state.body(exchange), "", "VertexRequest")
        self._state.metrics.count("tgi_request_count")
        instances = fields.required("instances", list_of(anything))
        if not instances:
            raise NoInstancesError
        if len(instances) > self._state.config.max_concurrent_requests:  # one of them could get no permit
            self._state.infer.note_failed(OverloadedError("Model is overloaded"))
            raise InstanceError
        wishes = [_instance(value, f"instances[{i}]") for i, value in enumerate(instances)]
        tasks = [asyncio.create_task(self._predict(wish)) for wish in wishes]
        try:
            predictions = await asyncio.gather(*tasks)
        except DeepseekTgiError as error:
            self._state.infer.note_failed(error)
            raise InstanceError from error
        finally:
            for task in tasks:
                task.cancel()
        await exchange.respond_json(200, {"predictions": predictions})

    async def _predict(self, instance: ChatRequest | GenerateRequest) -> str:
        request = await self._chat.prompt(instance) if isinstance(instance, ChatRequest) else instance
        return (await self._state.infer.generate(request)).ending.text


def _instance(value: Any, path: str) -> ChatRequest | GenerateRequest:
    """A text, of whose parameters two count, or a chat."""
    known = value.keys() if isinstance(value, dict) else set()
    try:
        if "messages" in known and "inputs" not in known:
            return chat_request(value)
        asked = generate_request(value)
    except ShapeError as error:
        raise ShapeError(path, "data did not match any variant of untagged enum VertexInstance") from error
    few = Parameters(
        do_sample=True, max_new_tokens=asked.parameters.max_new_tokens, seed=asked.parameters.seed, details=True
    )
    return GenerateRequest(asked.inputs, few)
