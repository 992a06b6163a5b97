"""The service's OpenAPI description and documentation, generated from the table of routes."""

import re
from collections.abc import Sequence
from typing import Any

from pydantic.json_schema import models_json_schema

import numflow
from numflow.server.http.errors import shape_of

REF = "#/components/schemas/{model}"
_FACTS = {"type": "object", "required": ["message", "type", "param", "code"], "properties": {
    "message": {"type": "string"}, "type": {"type": "string"},
    "param": {"type": ["string", "null"]}, "code": {"type": ["string", "null"]}}}
ERRORS = {  # protocol of a route -> (name, description, schema) of its errors
    "openai": ("Error", "An error, in OpenAI's shape.", {
        "type": "object", "required": ["error"], "properties": {"error": _FACTS}}),
    "messages": ("MessagesError", "An error, in Anthropic's shape.", {
        "type": "object", "required": ["type", "error"], "properties": {"type": {"const": "error"}, "error": _FACTS}}),
    "ollama": ("OllamaError", "An error, in Ollama's shape.", {
        "type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}})}


def openapi(endpoints: Sequence) -> dict[str, Any]:
    """OpenAPI 3.1 description of the endpoints."""
    kinds = list({endpoint.body for endpoint in endpoints if endpoint.body is not None})
    _, schemas = models_json_schema([(kind, "validation") for kind in kinds], ref_template=REF)
    paths: dict[str, Any] = {}
    for endpoint in endpoints:
        for path in endpoint.paths:
            shown = _shown(path)
            paths.setdefault(shown, {})[endpoint.method.lower()] = _operation(endpoint, shown)
    return {"openapi": "3.1.0", "info": {"title": "numflow", "version": numflow.__version__}, "paths": paths,
            "components": {"schemas": {**schemas.get("$defs", {}),
                                       **{name: shape for name, _, shape in ERRORS.values()}}}}


def routes_table(endpoints: Sequence) -> str:
    """The table of routes in docs/server.md."""
    def row(endpoint) -> str:
        paths = "`, `".join(map(_shown, endpoint.paths))
        return f"| `{endpoint.method} {paths}` | {endpoint.about} |"

    return "\n".join(["| Route | Purpose |", "|---|---|", *map(row, endpoints)])


def _shown(path: str) -> str:
    """A path without the converters of its parameters."""
    return re.sub(r"\{(\w+):\w+\}", r"{\1}", path)


def _operation(endpoint, path: str) -> dict[str, Any]:
    model, about, _ = ERRORS.get(shape_of(endpoint.method, path), ERRORS["openai"])
    failure = {"description": about, "content": {"application/json": {"schema": {"$ref": REF.format(model=model)}}}}
    name = re.sub(r"\W+", "_", f"{endpoint.method.lower()}{path}").strip("_")
    operation: dict[str, Any] = {"operationId": name, "summary": endpoint.about,
                                 "responses": {"200": {"description": "The answer."}, "default": failure}}
    parameters = [{"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
                  for name in re.findall(r"\{(\w+)\}", path)]
    if parameters:
        operation["parameters"] = parameters
    if endpoint.body is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {
            "schema": {"$ref": REF.format(model=endpoint.body.__name__)}}}}
    return operation
