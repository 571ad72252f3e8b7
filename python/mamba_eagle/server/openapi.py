"""GET /openapi.json, and GET /docs: a page that shows it and asks no other server for anything."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request, Response
from starlette.responses import FileResponse
from starlette.routing import BaseRoute, Route

from mamba_eagle import __version__
from mamba_eagle.server import body_schema as bodies
from mamba_eagle.server.body_schema import Schema, text
from mamba_eagle.server.errors import json_response
from mamba_eagle.server.state import server_state

BODIES: Mapping[str, Schema] = {
    "/generate": bodies.GENERATE,
    "/v1/completions": bodies.COMPLETION,
    "/v1/chat/completions": bodies.CHAT,
    "/v1/responses": bodies.RESPONSE,
    "/v1/messages": bodies.MESSAGES,
    "/v1/messages/count_tokens": bodies.COUNT_TOKENS,
    "/v1/score": bodies.SCORE,
    "/v1/embeddings": bodies.EMBEDDINGS,
    "/tokenize": bodies.TOKENIZE,
    "/v1/tokenize": bodies.TOKENIZE,
    "/detokenize": bodies.DETOKENIZE,
    "/v1/detokenize": bodies.DETOKENIZE,
    "/abort_request": bodies.ABORT,
    "/start_profile": bodies.START_PROFILE,
}
QUERIES: Mapping[str, Mapping[str, str]] = {
    "/cache": {
        "nodes": "how many nodes of the tree are listed",
        "text": "1: with the beginning of each one's text; takes the admin key",
    },
    "/flush_cache": {"timeout": "seconds to wait for the server to be idle"},
}
JSON, EVENTS, PLAIN, HTML = "application/json", "text/event-stream", "text/plain", "text/html"
# The page's script and style are its own text; nothing else is loaded or asked.
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'"
)
KINDS = {"/": HTML, "/docs": HTML, "/metrics": PLAIN, "/flush_cache": PLAIN}  # others: JSON
router = APIRouter()


@router.get("/openapi.json")
async def openapi(request: Request) -> Response:
    """This description."""
    return json_response(describe(request.app.state.routes, server_state(request).config.root_path))


@router.get("/docs")
async def docs() -> Response:
    """A page that shows /openapi.json."""
    headers = {"Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff"}
    return FileResponse(Path(__file__).with_name("docs.html"), headers=headers, media_type=HTML)


def describe(routes: Iterable[BaseRoute], root_path: str = "") -> dict[str, Any]:
    """In OpenAPI 3.1."""
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        if isinstance(route, Route):
            path = route.path.replace(":path}", "}")
            for method in sorted((route.methods or set()) - {"HEAD"}):
                paths.setdefault(path, {})[method.lower()] = _operation(route, path, method)
    return {
        "openapi": "3.1.0",
        "info": {"title": "mamba-eagle", "version": __version__},
        "servers": [{"url": root_path or "/"}],
        "paths": dict(sorted(paths.items())),
        "components": {"schemas": {**_models(), "Error": ERROR}, "securitySchemes": KEYS},
        "security": [{}, *({name: []} for name in KEYS)],
    }


def _operation(route: Route, path: str, method: str) -> dict[str, Any]:
    about = " ".join((route.endpoint.__doc__ or "").split()).replace("``", "")
    names = re.findall(r"{(\w+)}", path)
    parameters = [_parameter(name, "path", "", required=True) for name in names]
    parameters += [_parameter(name, "query", what) for name, what in QUERIES.get(path, {}).items()]
    kind = KINDS.get(path, JSON)
    schema = BODIES.get(path) if method != "GET" else None
    streams = schema is not None and "stream" in schema["properties"]
    content: dict[str, Any] = {kind: {}, **({EVENTS: {}} if streams else {})}
    error = {"description": "an error", "content": {JSON: {"schema": _reference("Error")}}}
    made: dict[str, Any] = {
        "operationId": re.sub(r"\W+", "_", f"{method.lower()}{path}").rstrip("_"),
        "responses": {"200": {"description": "the reply", "content": content}, "default": error},
    }
    if about:
        made["description"] = about
    if parameters:
        made["parameters"] = parameters
    if schema is not None:
        made["requestBody"] = {"required": True, "content": {JSON: {"schema": schema}}}
    return made


def _parameter(name: str, place: str, what: str, required: bool = False) -> dict[str, Any]:
    return {
        "name": name,
        "in": place,
        "description": what,
        "required": required,
        "schema": {"type": "string"},
    }


def _models() -> dict[str, Any]:
    made: dict[str, Any] = {}
    for model in bodies.MODELS:
        schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
        made |= schema.pop("$defs", {})
        made[model.__name__] = schema
    return made


def _reference(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


KEYS = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
ERROR = bodies.fields_of(
    "on /v1/messages in Anthropic's form",
    error=bodies.fields_of(
        "",
        message=text("the field, its value, and what to send instead"),
        type=text("the kind of error"),
        param=bodies.one_of("the field's path", {"type": "string"}, {"type": "null"}),
        code=bodies.integer("the status"),
    ),
)
