"""GET /openapi.json, and GET /docs: a page that shows it and asks no other server for anything."""

import asyncio
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response
from fastapi.routing import APIRoute
from starlette.responses import FileResponse
from starlette.routing import BaseRoute

from mamba_eagle import __version__
from mamba_eagle.server.bodies.kinds import Schema, described, takes
from mamba_eagle.server.errors import json_response
from mamba_eagle.server.state import State

JSON, EVENTS, PLAIN, HTML = "application/json", "text/event-stream", "text/plain", "text/html"
# The page's script and style are its own text; nothing else is loaded or asked.
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'"
)
KINDS = {  # others: JSON
    "/": HTML,
    "/docs": HTML,
    "/metrics": PLAIN,
    "/flush_cache": PLAIN,
    "/export_prefix": "application/octet-stream",
}
router = APIRouter()


@router.get("/openapi.json")
async def openapi(request: Request, state: State) -> Response:
    """This description."""
    # Made once, in a thread: it takes as long as some steps, and anybody may ask for it.
    app, root_path = request.app.state, state.config.root_path
    if app.description is None:
        made = asyncio.to_thread(lambda: msgspec.json.encode(describe(app.routes, root_path)))
        app.description = asyncio.ensure_future(made)
    return json_response(await asyncio.shield(app.description))


@router.get("/docs")
async def docs() -> Response:
    """A page that shows /openapi.json."""
    headers = {"Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff"}
    return FileResponse(Path(__file__).with_name("docs.html"), headers=headers, media_type=HTML)


def describe(routes: Iterable[BaseRoute], root_path: str = "") -> dict[str, Any]:
    """The description in OpenAPI 3.1."""
    paths: dict[str, dict[str, Any]] = {}
    models: Schema = {}
    for route in routes:
        if isinstance(route, APIRoute):
            path = route.path.replace(":path}", "}")
            for method in sorted((route.methods or set()) - {"HEAD"}):
                made = _operation(route, path, method, models)
                paths.setdefault(path, {})[method.lower()] = made
    return {
        "openapi": "3.1.0",
        "info": {"title": "mamba-eagle", "version": __version__},
        "servers": [{"url": root_path or "/"}],
        "paths": dict(sorted(paths.items())),
        "components": {"schemas": {**models, "Error": ERROR}, "securitySchemes": KEYS},
        "security": [{}, *({name: []} for name in KEYS)],
    }


def _operation(route: APIRoute, path: str, method: str, models: Schema) -> dict[str, Any]:
    """models: what its schema refers to is added there."""
    extra = route.openapi_extra or takes()
    about = " ".join((route.endpoint.__doc__ or "").split()).replace("``", "")
    names = re.findall(r"{(\w+)}", path)
    parameters = [_parameter(name, "path", "", required=True) for name in names]
    parameters += [_parameter(name, "query", what) for name, what in extra["queries"].items()]
    kind = KINDS.get(path, JSON)
    schema = described(extra["body"]) if extra["body"] is not None else None
    streams = schema is not None and "stream" in schema["properties"]
    content: dict[str, Any] = {kind: {}, **({EVENTS: {}} if streams else {})}
    refused = {JSON: {"schema": {"$ref": "#/components/schemas/Error"}}}
    error = {"description": "an error", "content": refused}
    made: dict[str, Any] = {
        "operationId": re.sub(r"\W+", "_", f"{method.lower()}{path}").rstrip("_"),
        "responses": {"200": {"description": "the reply", "content": content}, "default": error},
    }
    if about:
        made["description"] = about
    if parameters:
        made["parameters"] = parameters
    if schema is not None:
        models |= schema.pop("$defs", {})
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


KEYS = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
PROBLEM = {
    "message": ("string", "the field, its value, and what to send instead"),
    "type": ("string", "the kind of error"),
    "param": (["string", "null"], "the field's path"),
    "code": ("integer", "the status"),
}
FIELDS = {name: {"type": kind, "description": what} for name, (kind, what) in PROBLEM.items()}
ERROR = {
    "type": "object",
    "description": "on /v1/messages in Anthropic's form",
    "properties": {"error": {"type": "object", "properties": FIELDS}},
}
