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
from mamba_eagle.server.apis.adapters import LoadBody, UnloadBody
from mamba_eagle.server.apis.anthropic.body import MessagesBody
from mamba_eagle.server.apis.batches.route import BatchBody
from mamba_eagle.server.apis.control import AbortBody
from mamba_eagle.server.apis.embeddings import EmbeddingsBody
from mamba_eagle.server.apis.generate.body import GenerateBody
from mamba_eagle.server.apis.openai.body import CompletionBody
from mamba_eagle.server.apis.openai.chat_body import ChatBody
from mamba_eagle.server.apis.profile import ProfileBody
from mamba_eagle.server.apis.responses.body import ResponseBody
from mamba_eagle.server.apis.rollouts.checks import CheckBody
from mamba_eagle.server.apis.rollouts.group import (
    FinishBody,
    GroupBody,
    InitBody,
    LeaveBody,
    TensorsBody,
)
from mamba_eagle.server.apis.rollouts.memory import TagsBody
from mamba_eagle.server.apis.rollouts.pauses import AbortsBody, PauseBody
from mamba_eagle.server.apis.rollouts.tokens import TokensBody
from mamba_eagle.server.apis.rollouts.weights import DirectoryBody, DiskBody
from mamba_eagle.server.apis.score import ScoreBody
from mamba_eagle.server.apis.sessions import CloseBody, OpenBody
from mamba_eagle.server.apis.tokens import DetokenizeBody, TokenizeBody
from mamba_eagle.server.bodies.model import Body, Schema, described
from mamba_eagle.server.errors import json_response
from mamba_eagle.server.state import server_state

BODIES: Mapping[str, type[Body]] = {
    "/generate": GenerateBody,
    "/export_prefix": GenerateBody,
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody,
    "/v1/responses": ResponseBody,
    "/v1/messages": MessagesBody,
    "/v1/messages/count_tokens": MessagesBody,
    "/v1/score": ScoreBody,
    "/v1/embeddings": EmbeddingsBody,
    "/v1/batches": BatchBody,
    "/tokenize": TokenizeBody,
    "/v1/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
    "/v1/detokenize": DetokenizeBody,
    "/abort_request": AbortBody,
    "/start_profile": ProfileBody,
    "/open_session": OpenBody,
    "/close_session": CloseBody,
    "/load_lora_adapter": LoadBody,
    "/v1/load_lora_adapter": LoadBody,
    "/unload_lora_adapter": UnloadBody,
    "/v1/unload_lora_adapter": UnloadBody,
    "/inference/v1/generate": TokensBody,
    "/pause_generation": PauseBody,
    "/update_weights_from_disk": DiskBody,
    "/update_weights": DirectoryBody,
    "/abort_requests": AbortsBody,
    "/weights_checker": CheckBody,
    "/weight_checker": CheckBody,
    "/init_weights_update_group": GroupBody,
    "/destroy_weights_update_group": LeaveBody,
    "/update_weights_from_distributed": TensorsBody,
    "/init_weight_transfer_engine": InitBody,
    "/finish_weight_update": FinishBody,
    "/release_memory_occupation": TagsBody,
    "/resume_memory_occupation": TagsBody,
}
QUERIES: Mapping[str, Mapping[str, str]] = {
    "/cache": {
        "nodes": "how many nodes of the tree are listed",
        "text": "1: with the beginning of each one's text; takes the admin key",
    },
    "/pause": {
        "mode": "abort, wait or keep",
        "clear_cache": "false: what is cached stays",
    },
    "/wake_up": {"tags": "weights, kv_cache; left out: both"},
    "/flush_cache": {"timeout": "seconds to wait for the server to be idle"},
}
BINARY = "application/octet-stream"
JSON, EVENTS, PLAIN, HTML = "application/json", "text/event-stream", "text/plain", "text/html"
# The page's script and style are its own text; nothing else is loaded or asked.
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'"
)
KINDS = {"/": HTML, "/docs": HTML, "/metrics": PLAIN, "/flush_cache": PLAIN}  # others: JSON
KINDS["/export_prefix"] = BINARY
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
    bodies, models = _bodies()
    for route in routes:
        if isinstance(route, Route):
            path = route.path.replace(":path}", "}")
            for method in sorted((route.methods or set()) - {"HEAD"}):
                paths.setdefault(path, {})[method.lower()] = _operation(route, path, method, bodies)
    return {
        "openapi": "3.1.0",
        "info": {"title": "mamba-eagle", "version": __version__},
        "servers": [{"url": root_path or "/"}],
        "paths": dict(sorted(paths.items())),
        "components": {"schemas": {**models, "Error": ERROR}, "securitySchemes": KEYS},
        "security": [{}, *({name: []} for name in KEYS)],
    }


def _operation(
    route: Route, path: str, method: str, bodies: Mapping[str, Schema]
) -> dict[str, Any]:
    about = " ".join((route.endpoint.__doc__ or "").split()).replace("``", "")
    names = re.findall(r"{(\w+)}", path)
    parameters = [_parameter(name, "path", "", required=True) for name in names]
    parameters += [_parameter(name, "query", what) for name, what in QUERIES.get(path, {}).items()]
    kind = KINDS.get(path, JSON)
    schema = bodies.get(path) if method != "GET" else None
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


def _bodies() -> tuple[dict[str, Schema], Schema]:
    """Each path's schema, and the models that these refer to."""
    schemas = {path: described(model) for path, model in BODIES.items()}
    models: Schema = {}
    for schema in schemas.values():
        models |= schema.pop("$defs", {})
    return schemas, models


def _reference(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


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
