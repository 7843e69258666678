"""The OpenAPI document of this door, written by hand."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from deepseek_tgi import __version__
from deepseek_tgi.router.openapi_admin import ADMIN_SCHEMAS, admin_paths
from deepseek_tgi.router.openapi_schema import (
    COUNT,
    FLAG,
    NUMBER,
    TEXT,
    Schema,
    list_of,
    nullable,
    object_of,
    optional,
    ref,
)

TOKEN = object_of("id text logprob special", id=COUNT, text=TEXT, logprob=nullable(NUMBER), special=FLAG)
PREFILL_TOKEN = object_of("id text logprob", id=COUNT, text=TEXT, logprob=nullable(NUMBER))
REASON: Schema = {"type": "string", "enum": ["length", "eos_token", "stop_sequence"]}
ENDED = {"finish_reason": REASON, "generated_tokens": COUNT, "seed": nullable(COUNT)}
LISTS = {"prefill": list_of(PREFILL_TOKEN), "tokens": list_of(TOKEN), "top_tokens": list_of(list_of(TOKEN))}
USAGE = object_of(
    "prompt_tokens completion_tokens total_tokens", prompt_tokens=COUNT, completion_tokens=COUNT, total_tokens=COUNT
)
TOOL_CALL = object_of(
    "id type function",
    id=TEXT,
    type=TEXT,
    function=object_of("name arguments", description=nullable(TEXT), name=TEXT, arguments=TEXT),
)
FUNCTION = object_of("name", name=TEXT, description=nullable(TEXT), parameters={"type": "object"})
GRAMMAR: Schema = {
    "oneOf": [
        object_of("type value", type={"enum": ["json", "json_object"]}, value={}),
        object_of("type value", type={"const": "regex"}, value=TEXT),
        object_of("type value", type={"const": "json_schema"}, value=object_of("schema", name=TEXT, schema={})),
    ]
}
RESPONSE_FORMAT: Schema = {
    "anyOf": [
        ref("GrammarType"),
        object_of("type", type={"const": "text"}),
        object_of(
            "type json_schema", type={"const": "json_schema"}, json_schema=object_of("schema", name=TEXT, schema={})
        ),
    ]
}
CONTENT: Schema = {
    "oneOf": [
        TEXT,
        list_of(object_of("type", type=TEXT, text=TEXT, image_url=object_of("url", url=TEXT))),
        {"type": "null"},
    ]
}
OPENAI_COMMON = optional(
    model=TEXT, max_tokens=COUNT, temperature=NUMBER, top_p=NUMBER, frequency_penalty=NUMBER, seed=COUNT
) | {"stream": FLAG, "stop": nullable({"oneOf": [TEXT, list_of(TEXT)]})}

SCHEMAS: dict[str, Schema] = {
    "ErrorResponse": object_of("error error_type", error=TEXT, error_type=TEXT),
    "GrammarType": GRAMMAR,
    "GenerateParameters": object_of(
        "",
        **optional(
            best_of=COUNT,
            temperature=NUMBER,
            repetition_penalty=NUMBER,
            frequency_penalty=NUMBER,
            top_k={"type": "integer"},
            top_p=NUMBER,
            typical_p=NUMBER,
            max_new_tokens=COUNT,
            return_full_text=FLAG,
            truncate=COUNT,
            seed=COUNT,
            top_n_tokens=COUNT,
            grammar=ref("GrammarType"),
            adapter_id=TEXT,
        ),
        do_sample=FLAG,
        stop=list_of(TEXT),
        watermark=FLAG,
        details=FLAG,
        decoder_input_details=FLAG,
    ),
    "GenerateRequest": object_of("inputs", inputs=TEXT, parameters=ref("GenerateParameters")),
    "CompatGenerateRequest": object_of("inputs", inputs=TEXT, parameters=ref("GenerateParameters"), stream=FLAG),
    "Token": TOKEN,
    "GenerateResponse": object_of(
        "generated_text",
        generated_text=TEXT,
        details=object_of(
            "finish_reason generated_tokens seed prefill tokens",
            **ENDED,
            **LISTS,
            best_of_sequences=list_of(
                object_of(
                    "generated_text finish_reason generated_tokens seed prefill tokens",
                    generated_text=TEXT,
                    **ENDED,
                    **LISTS,
                )
            ),
        ),
    ),
    "StreamResponse": object_of(
        "index token generated_text details",
        index=COUNT,
        token=TOKEN,
        top_tokens=list_of(TOKEN),
        generated_text=nullable(TEXT),
        details=nullable(object_of("finish_reason generated_tokens seed input_length", **ENDED, input_length=COUNT)),
    ),
    "ChatRequest": object_of(
        "messages",
        messages=list_of(
            object_of(
                "role",
                role=TEXT,
                content=CONTENT,
                name=nullable(TEXT),
                tool_call_id=nullable(TEXT),
                tool_calls=nullable(list_of(TOOL_CALL)),
            )
        ),
        **OPENAI_COMMON,
        **optional(
            max_completion_tokens=COUNT,
            presence_penalty=NUMBER,
            logprobs=FLAG,
            top_logprobs=COUNT,
            stream_options=object_of("include_usage", include_usage=FLAG),
            tools=list_of(object_of("type function", type=TEXT, function=FUNCTION)),
            tool_choice={"oneOf": [TEXT, object_of("type function", type=TEXT, function=object_of("name", name=TEXT))]},
            tool_prompt=TEXT,
            response_format=RESPONSE_FORMAT,
        ),
    ),
    "ChatCompletion": object_of(
        "object id created model system_fingerprint choices usage",
        **dict.fromkeys(("object", "id", "model", "system_fingerprint"), TEXT),
        created=COUNT,
        choices=list_of(
            object_of(
                "index message logprobs finish_reason",
                index=COUNT,
                message=object_of("role", role=TEXT, content=TEXT, tool_calls=list_of(TOOL_CALL)),
                logprobs=nullable({"type": "object"}),
                finish_reason=TEXT,
            )
        ),
        usage=USAGE,
    ),
    "CompletionRequest": object_of(
        "prompt",
        prompt={"oneOf": [TEXT, list_of(TEXT)]},
        **OPENAI_COMMON,
        **optional(repetition_penalty=NUMBER, suffix=TEXT),
    ),
    "Completion": object_of(
        "object id created model system_fingerprint choices usage",
        **dict.fromkeys(("object", "id", "model", "system_fingerprint"), TEXT),
        created=COUNT,
        choices=list_of(
            object_of(
                "index text logprobs finish_reason",
                index=COUNT,
                text=TEXT,
                logprobs={"type": "null"},
                finish_reason=TEXT,
            )
        ),
        usage=USAGE,
    ),
    "Tokens": list_of(object_of("id text start stop", id=COUNT, text=TEXT, start=COUNT, stop=COUNT)),
    "ChatTokens": object_of("tokenize_response templated_text", tokenize_response=ref("Tokens"), templated_text=TEXT),
    "Info": object_of(
        "model_id router version",
        **dict.fromkeys(("model_id", "router", "version"), TEXT),
        **optional(model_sha=TEXT, model_pipeline_tag=TEXT, sha=TEXT, docker_label=TEXT),
        **dict.fromkeys(
            (
                *("max_concurrent_requests", "max_best_of", "max_stop_sequences", "max_input_tokens"),
                *("max_total_tokens", "validation_workers", "max_client_batch_size"),
            ),
            COUNT,
        ),
    ),
    "Models": object_of(
        "object data",
        object=TEXT,
        data=list_of(object_of("id object created owned_by", id=TEXT, object=TEXT, created=COUNT, owned_by=TEXT)),
    ),
    "VertexRequest": object_of("instances", instances=list_of({"type": "object"})),
    "VertexResponse": object_of("predictions", predictions=list_of(TEXT)),
}

# path, method, summary, request schema, answer schema (None: empty or plain text), whether it can stream
ROUTES: tuple[tuple[str, str, str, str | None, str | None, bool], ...] = (
    ("/", "post", "Generate, streamed if `stream` is true", "CompatGenerateRequest", "GenerateResponse", True),
    ("/generate", "post", "Generate a whole text", "GenerateRequest", "GenerateResponse", False),
    ("/generate_stream", "post", "Generate, one event a token", "GenerateRequest", "StreamResponse", True),
    ("/v1/chat/completions", "post", "Chat, OpenAI style", "ChatRequest", "ChatCompletion", True),
    ("/v1/completions", "post", "Complete, OpenAI style", "CompletionRequest", "Completion", True),
    ("/v1/models", "get", "The served model, OpenAI style", None, "Models", False),
    ("/tokenize", "post", "Tokens of a text", "GenerateRequest", "Tokens", False),
    ("/chat_tokenize", "post", "Rendered prompt of a chat and its tokens", "ChatRequest", "ChatTokens", False),
    ("/invocations", "post", "SageMaker: body of `/`, chat or completions", "CompatGenerateRequest", None, True),
    ("/vertex", "post", "Vertex AI", "VertexRequest", "VertexResponse", False),
    ("/info", "get", "What is served, and its limits", None, "Info", False),
    ("/", "get", "Same as /health", None, None, False),
    ("/health", "get", "Is the shard alive", None, None, False),
    ("/ping", "get", "Same as /health", None, None, False),
    ("/ready", "get", "Should traffic come here", None, None, False),
    ("/livez", "get", "Should the process go on living; `?verbose` shows each check", None, None, False),
    ("/readyz", "get", "Should traffic come here; `?verbose` shows each check", None, None, False),
    ("/startupz", "get", "Has the first model been loaded; `?verbose` shows each check", None, None, False),
    ("/metrics", "get", "Prometheus metrics", None, None, False),
)
PROBES = frozenset({"/health", "/ping", "/ready"})
KUBERNETES_PROBES = frozenset({"/livez", "/readyz", "/startupz"})
PROBLEM = {"application/json": {"schema": ref("ErrorResponse")}}
PLAIN = {"text/plain": {"schema": TEXT}}
REFUSALS: dict[str, tuple[str, dict[str, Any]]] = {
    "400": ("The body is not JSON", PLAIN),
    "413": ("The body is too long", PLAIN),
    "415": ("The content type is not JSON", PLAIN),
    "422": ("A rule of the API is broken, or the body has the wrong shape (plain text)", PROBLEM | PLAIN),
    "424": ("The shard failed", PROBLEM),
    "429": ("All permits are taken", PROBLEM),
    "500": ("The generation was left incomplete", PROBLEM),
    "503": ("The server is shutting down", PROBLEM),
}


def openapi_document(open_paths: Collection[str] | None = None, admin: bool = False) -> dict[str, Any]:
    """The document; `open_paths` are those that need no key where others do, None if there is no key.

    With `admin` the routes that change models are there, and nothing of them otherwise.
    """
    paths: dict[str, dict[str, Any]] = {}
    for path, method, summary, body, answer, streams in ROUTES:
        operation = _operation(summary, body, answer, streams)
        if path in PROBES or (path, method) == ("/", "get"):
            operation["responses"]["503"] = {"description": "Not now", "content": PROBLEM}
        if path in KUBERNETES_PROBES:
            operation["responses"]["200"]["content"] = PLAIN
            operation["responses"]["503"] = {"description": "No, with each check", "content": PLAIN}
        if open_paths is not None and (method == "get" or path in open_paths):
            operation["security"] = []
        elif open_paths is not None:
            operation["responses"]["401"] = {"description": "The key is missing or wrong"}
        paths.setdefault(path, {})[method] = operation
    components: dict[str, Any] = {"schemas": SCHEMAS}
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "Text Generation Inference", "version": __version__, "license": {"name": "Apache 2.0"}},
        "paths": paths,
        "components": components,
    }
    if open_paths is not None:
        components["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"bearer": []}]
    if admin:
        components["schemas"] = SCHEMAS | ADMIN_SCHEMAS
        components.setdefault("securitySchemes", {})["admin"] = {"type": "http", "scheme": "bearer"}
        paths.update(admin_paths())
    return document


def _operation(summary: str, body: str | None, answer: str | None, streams: bool) -> dict[str, Any]:
    content: dict[str, Any] = {} if answer is None else {"application/json": {"schema": ref(answer)}}
    if streams:
        content["text/event-stream"] = {"schema": TEXT}
    responses: dict[str, Any] = {"200": {"description": "Success", "content": content}}
    operation: dict[str, Any] = {"summary": summary, "responses": responses}
    if body is None:
        return operation
    operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": ref(body)}}}
    for status, (text, kinds) in REFUSALS.items():
        responses[status] = {"description": text, "content": kinds}
    return operation
