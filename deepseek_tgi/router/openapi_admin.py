"""The `/admin` routes in the OpenAPI document; they are there only where they exist."""

from __future__ import annotations

from typing import Any

from deepseek_tgi.router.change import PLANS
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

SERVING = object_of(
    "model_id generation revision state max_input_tokens max_total_tokens requests",
    model_id=TEXT,
    generation=COUNT,
    revision=nullable(TEXT),
    state=TEXT,
    max_input_tokens=COUNT,
    max_total_tokens=COUNT,
    requests=COUNT,
)
ADMIN_SCHEMAS: dict[str, Schema] = {
    "LoadModelRequest": object_of(
        "model_id",
        model_id=TEXT,
        **optional(
            revision=TEXT,
            quantize=TEXT,
            manifest_sha256=TEXT,
            plan={"type": "string", "enum": list(PLANS)},
            stream=FLAG,
        ),
    ),
    "UnloadModelRequest": object_of("", **optional(model_id=TEXT, stream=FLAG)),
    "SleepModelRequest": object_of("", **optional(drop_weights=FLAG, keep_pages=FLAG, stream=FLAG)),
    "WakeModelRequest": object_of("", **optional(stream=FLAG)),
    "ModelChange": object_of(
        "kind model state plan stage percent error generation started_at seconds pause_s steps",
        kind={"type": "string", "enum": ["load", "unload", "sleep", "wake"]},
        model=TEXT,
        state={"type": "string", "enum": ["running", "done", "failed"]},
        plan=TEXT,
        stage=TEXT,
        percent=NUMBER,
        error=TEXT,
        generation=COUNT,
        started_at=NUMBER,
        seconds=NUMBER,
        pause_s=NUMBER,
        steps=COUNT,
    ),
    "ServedModels": object_of(
        "serving held_requests available change history",
        serving=nullable(SERVING),
        held_requests=COUNT,
        available=list_of(TEXT),
        change=nullable(ref("ModelChange")),
        history=list_of(ref("ModelChange")),
    ),
}
CHANGES = (
    ("load", "Serve another model", "LoadModelRequest", True),
    ("unload", "Serve nothing", "UnloadModelRequest", False),
    ("sleep", "Give memory back until the model is woken", "SleepModelRequest", False),
    ("wake", "Serve again", "WakeModelRequest", False),
)
SECURITY = [{"admin": list[str]()}]
PROBLEM = {"application/json": {"schema": ref("ErrorResponse")}}
REFUSALS = {
    "400": "The body is not JSON",
    "409": "The change was refused, or failed; what served before does still, or the reason says that none does",
    "413": "The body is too long",
    "415": "The content type is not JSON",
    "422": "A field is unknown or has the wrong shape",
}
CLOSED = {"401": {"description": "The admin token is missing or wrong"}}


def admin_paths() -> dict[str, dict[str, Any]]:
    """The routes, as `paths` of a document has them."""
    shown = _answers("ServedModels") | CLOSED
    paths = {"/admin/models": {"get": {"summary": "What is served", "responses": shown, "security": SECURITY}}}
    for verb, summary, body, required in CHANGES:
        answers = _answers("ModelChange")
        answers["200"]["content"]["text/event-stream"] = {"schema": TEXT}
        refusals = {status: {"description": text, "content": PROBLEM} for status, text in REFUSALS.items()}
        operation: dict[str, Any] = {
            "summary": f"{summary}; with `stream`, events tell how far it is",
            "requestBody": {"required": required, "content": {"application/json": {"schema": ref(body)}}},
            "responses": answers | refusals | CLOSED,
            "security": SECURITY,
        }
        paths[f"/admin/models/{verb}"] = {"post": operation}
    return paths


def _answers(schema: str) -> dict[str, Any]:
    return {"200": {"description": "Success", "content": {"application/json": {"schema": ref(schema)}}}}
