"""`/v1/chat/completions`: messages through the template, an answer or a stream, tool calls."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from deepseek_tgi.router import sse
from deepseek_tgi.router.http import Exchange
from deepseek_tgi.router.infer import Generated
from deepseek_tgi.router.openai_format import ChatChunks, Reasons, Usage, chat_completion, chat_logprobs, visible
from deepseek_tgi.router.openai_requests import SERVED_MODEL, ChatRequest, chat_request
from deepseek_tgi.router.requests import GenerateRequest
from deepseek_tgi.router.state import RouterState
from deepseek_tgi.router.tokens import TokenEvent
from deepseek_tgi.router.tools import NO_TOOL, CallReader, Toolbox, next_call_id, parse_call, toolbox
from deepseek_tgi.router.validation import check_streamable
from deepseek_tgi.text.chat_template import TemplateError

Headers = list[tuple[str, str]]


class ChatApi:
    """Handlers of the chat routes."""

    def __init__(self, state: RouterState) -> None:
        self._state = state
        self._reasons = Reasons(strict=state.config.openai_reasons == "openai")

    async def completions(self, exchange: Exchange) -> None:
        """POST /v1/chat/completions."""
        await self.respond(exchange, chat_request(await self._state.body(exchange)))

    async def respond(self, exchange: Exchange, chat: ChatRequest) -> None:
        """The same with a body that is read already."""
        self._state.metrics.count("tgi_request_count")
        tools = toolbox(chat)
        request = await self.prompt(chat, tools)
        if chat.stream:
            chunks = self._plain_stream(chat, request) if tools is None else self._tool_stream(chat, request)
            headers = self._state.stream_headers(len(request.inputs))
            await sse.stream(exchange, sse.openai_stream(chunks, self._state.infer.note_failed), headers)
        else:
            body, headers = await self.answer(chat, request, tools)
            await exchange.respond_json(200, body, headers)

    async def prompt(self, chat: ChatRequest, tools: Toolbox | None = None) -> GenerateRequest:
        """The text that the model continues. Raises `TemplateError`."""
        template = self._state.template
        if template is None:
            raise TemplateError("template not found")
        messages = [{"role": message.role, "content": message.content} for message in chat.messages]
        shown = None
        parameters = chat.parameters
        if tools is not None:
            shown = [tool.source for tool in tools.tools]
            if messages:
                messages[-1]["content"] += tools.appendix(template.uses_tools)
            parameters = dataclasses.replace(parameters, grammar=tools.grammar())
        text = await self._state.infer.validator.off_loop(template.render, messages, shown)
        return GenerateRequest(text, parameters, chat.stream, add_special_tokens=False)

    async def answer(
        self, chat: ChatRequest, request: GenerateRequest, tools: Toolbox | None
    ) -> tuple[dict[str, Any], Headers]:
        """Body and headers of a whole answer."""
        generated = await self._state.infer.generate(request)
        message: dict[str, Any] = {"role": "assistant"}
        reason = self._reasons.final(generated.ending.finish_reason)
        if tools is None:
            message["content"] = generated.ending.text
        else:
            call = parse_call(generated.ending.text)
            if call.name == NO_TOOL:
                plain = dataclasses.replace(chat, tools=())
                return await self.answer(plain, await self.prompt(plain), None)
            function = {"description": None, "name": call.name, "arguments": call.arguments}
            message["tool_calls"] = [{"id": "0", "type": "function", "function": function}]
            reason = "tool_calls" if self._reasons.strict else reason
        choice = {
            "message": message,
            "logprobs": chat_logprobs(_events(generated)) if chat.logprobs else None,
            "finish_reason": reason,
        }
        usage = Usage(generated.input_length, generated.ending.generated_tokens)
        body = chat_completion(self._model(chat), self._state.system_fingerprint, choice, usage)
        return body, self._state.answer_headers(generated, len(request.inputs))

    async def _plain_stream(self, chat: ChatRequest, request: GenerateRequest) -> AsyncGenerator[bytes, None]:
        check_streamable(request.parameters)
        chunks = self._chunks(chat)
        stream = await self._state.infer.open(request)
        try:
            usage = Usage(stream.input_length, 0)
            while not stream.finished:
                written = []
                for event in await stream.read():
                    logprobs = chat_logprobs([event]) if chat.logprobs else None
                    reason = None
                    if event.ending is not None:
                        reason = self._reasons.final(event.ending.finish_reason)
                        usage = Usage(stream.input_length, event.ending.generated_tokens)
                    written.append(chunks.content(visible(event.token), logprobs, reason))
                yield b"".join(written)
        finally:
            stream.close()
        if chat.include_usage:
            yield chunks.usage(usage)

    async def _tool_stream(self, chat: ChatRequest, request: GenerateRequest) -> AsyncGenerator[bytes, None]:
        check_streamable(request.parameters)
        reader = CallReader()
        chunks, call_id = self._chunks(chat), next_call_id(chat.messages)
        reason = ""
        generated = 0
        stream = await self._state.infer.open(request)
        try:
            while not stream.finished and reader.name != NO_TOOL:
                for event in await stream.read():
                    generated += 1
                    reason = event.ending.finish_reason if event.ending is not None else ""
                    fresh = reader.name is None
                    for i, piece in enumerate(reader.feed(visible(event.token))):
                        if reader.name != NO_TOOL:
                            yield chunks.tool_call(call_id, reader.name if fresh and i == 0 else None, piece)
        finally:
            stream.close()
        if reader.name == NO_TOOL:
            plain = dataclasses.replace(chat, tools=())
            async with aclosing(self._plain_stream(plain, await self.prompt(plain))) as answer:
                async for chunk in answer:
                    yield chunk
            return
        for chunk in self._tool_end(chat, chunks, reader, reason, Usage(stream.input_length, generated)):
            yield chunk

    def _tool_end(
        self, chat: ChatRequest, chunks: ChatChunks, reader: CallReader, reason: str, usage: Usage
    ) -> list[bytes]:
        """The last chunks of a tool call. TGI sends no final reason after a complete call; strict clients need one."""
        if reader.name is None:
            parse_call("")
        ends = []
        if not reader.complete:
            ends.append(chunks.chunk(b'{"role":"assistant"}', None, self._reasons.final(reason)))
        elif self._reasons.strict:
            ends.append(chunks.chunk(b'{"role":"assistant"}', None, "tool_calls"))
        return [*ends, chunks.usage(usage)] if chat.include_usage else ends

    async def tokenize(self, exchange: Exchange) -> None:
        """POST /chat_tokenize: the rendered prompt and its tokens."""
        chat = chat_request(await self._state.body(exchange))
        request = await self.prompt(chat, toolbox(chat))
        tokens = await self._state.infer.validator.tokens(request.inputs, False)
        await exchange.respond_json(200, {"tokenize_response": tokens, "templated_text": request.inputs})

    def _model(self, chat: ChatRequest) -> str:
        return self._state.config.model_id if chat.model in {None, SERVED_MODEL} else str(chat.model)

    def _chunks(self, chat: ChatRequest) -> ChatChunks:
        return ChatChunks(self._model(chat), self._state.system_fingerprint)


def _events(generated: Generated) -> list[TokenEvent]:
    tops = iter(generated.top_tokens)
    return [TokenEvent(token, next(tops, []), None) for token in generated.tokens]
