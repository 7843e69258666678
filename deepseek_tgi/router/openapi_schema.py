"""The few kinds of JSON schema that the OpenAPI document is made of."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
FLAG: Schema = {"type": "boolean"}
COUNT: Schema = {"type": "integer", "minimum": 0}
NUMBER: Schema = {"type": "number", "format": "float"}


def nullable(schema: Schema) -> Schema:
    """That, or null."""
    return {"anyOf": [schema, {"type": "null"}]}


def list_of(item: Schema) -> Schema:
    """A list of those."""
    return {"type": "array", "items": item}


def ref(name: str) -> Schema:
    """A schema of the document, by name."""
    return {"$ref": f"#/components/schemas/{name}"}


def object_of(required: str, **properties: Schema) -> Schema:
    """An object; `required` lists names separated by spaces."""
    return {"type": "object", "properties": properties, "required": required.split()}


def optional(**properties: Schema) -> dict[str, Schema]:
    """Properties that may be null."""
    return {name: nullable(schema) for name, schema in properties.items()}
