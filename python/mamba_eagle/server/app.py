"""The FastAPI application: every route but those that take prompts, which have own files."""

import asyncio
import dataclasses
import logging
import time
import uuid
from collections.abc import Callable
from datetime import datetime, timezone
from functools import partial
from typing import Any, TypeVar

from fastapi import APIRouter, FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.types import Scope

from mamba_eagle import __version__
from mamba_eagle.config import ServerConfig
from mamba_eagle.core import SamplingParams, shown
from mamba_eagle.events_config import BLOCK, read_events_config
from mamba_eagle.message import Generate, GetState
from mamba_eagle.server.apis import cache, control, embeddings, exchange, openapi, score, tokens
from mamba_eagle.server.apis.anthropic import route as anthropic
from mamba_eagle.server.apis.batches import route as batches
from mamba_eagle.server.apis.batches.batch import BatchStore
from mamba_eagle.server.apis.generate import route as generate
from mamba_eagle.server.apis.openai import route as openai
from mamba_eagle.server.apis.responses import route as responses
from mamba_eagle.server.apis.responses.kept import ResponseStore
from mamba_eagle.server.apis.rollouts import group, pauses, weights
from mamba_eagle.server.apis.rollouts import tokens as rollouts
from mamba_eagle.server.apis.sse import wait_for_success
from mamba_eagle.server.errors import RequestError, json_response
from mamba_eagle.server.http.at_reply import AtRequest, counted, named, simulated
from mamba_eagle.server.http.auth import need_key
from mamba_eagle.server.http.origins import guard_origins
from mamba_eagle.server.lifetime import RETRY_AFTER
from mamba_eagle.server.page import files as page
from mamba_eagle.server.state import ServerState, State
from mamba_eagle.tokenizer.sample import EngineDead, LiveRequest, Sample

HEALTH_TIMEOUT = 20.0
# Open without a key: the page asks for the key, and none of this is secret.
OPEN_PATHS = {*page.FILES, "/docs", "/openapi.json", "/health", "/ready", "/ping"}
ROOMS = (
    *(generate, openai, responses, anthropic, score, embeddings),
    *(tokens, cache, control, pauses, group, weights),
    *(exchange, rollouts, batches, openapi, page),
)
Handler = TypeVar("Handler", bound=Callable[..., Any])
log = logging.getLogger("mamba_eagle.server")
router = APIRouter()


def get(path: str) -> Callable[[Handler], Handler]:
    """A route that answers HEAD as well; the HTTP server leaves the body out."""
    return router.api_route(path, methods=["GET", "HEAD"])


def plain(scope: Scope, root_path: str) -> None:
    """A trailing slash, or --root-path in front, makes no difference. Cookies are left out: FastAPI
    would read them for each route, and Python before 3.11.10 takes 0.6 s for a quoted one of 16 KiB
    and 16 times that for 64 (CVE-2024-7592)."""
    scope["headers"] = [one for one in scope["headers"] if one[0] != b"cookie"]
    path = scope["path"]
    if root_path and f"{path}/".startswith(f"{root_path}/"):
        path = path[len(root_path) :]
    scope["path"] = path.rstrip("/") or "/"


def make_app(state: ServerState) -> FastAPI:
    app = FastAPI(title="mamba-eagle", version=__version__, openapi_url=None)  # openapi.py has it
    app.state.server = state
    app.state.responses = ResponseStore()
    app.state.description = None  # what /openapi.json says, once it was asked for
    app.state.batches = BatchStore(app, state.lifetime, state.folder)
    parts = (router, *(room.router for room in ROOMS))
    for part in parts:
        app.include_router(part)
    app.state.routes = [route for part in parts for route in part.routes]
    app.add_middleware(AtRequest, begin=counted(state.recorder.replied))
    for kind in (RequestError, HTTPException, Exception):
        app.add_exception_handler(kind, _refuse)
    if state.api_keys:
        admin = [state.config.admin_api_key] if state.config.admin_api_key else []
        keys = [*state.api_keys, *admin]
        app.add_middleware(AtRequest, begin=partial(need_key, keys=keys, open_paths=OPEN_PATHS))
    guard_origins(app, state.config)
    app.add_middleware(AtRequest, begin=partial(plain, root_path=state.config.root_path))
    app.add_middleware(AtRequest, begin=named)
    if state.config.simulate_acc_len:
        app.add_middleware(AtRequest, begin=simulated(state.config.simulate_acc_len))
    return app


async def _refuse(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):  # no such route, or not with this method
        route = f"{shown(request.method)[1:-1]} {shown(request.url.path)[1:-1]}"
        error = RequestError(f"{route}: {error.detail}", error.status_code)
    elif not isinstance(error, RequestError):
        error = RequestError("internal server error; see the server log", 500)
    return error.response()


# ── health and facts ─────────────────────────────────────────────────────────────────────────


@get("/health")
async def health(state: State) -> Response:
    """Liveness: 503 once the engine is dead or has stopped working, so that a restart is due."""
    problem = state.lifetime.failure or state.manager.dead
    if problem is not None:
        raise RequestError(problem, 503)
    return Response()


@get("/ready")
@get("/ping")
async def ready(state: State) -> Response:
    """Readiness: 503 whenever a request would be refused, as while the server shuts down, or would
    wait for a process that does not answer. Amazon SageMaker asks for it as /ping."""
    problem = state.lifetime.refusal or state.lifetime.silent or state.manager.dead
    if problem is not None:
        raise RequestError(problem, 503, retry_after=RETRY_AFTER)
    return Response()


@get("/version")
async def version() -> Response:
    return json_response({"version": __version__})


@get("/health_generate")
async def health_generate(request: Request, state: State) -> Response:
    """One token through the whole engine."""
    token = min([*state.manager.engine.eos_token_ids, state.vocab_size - 1])
    rid = f"health-{uuid.uuid4().hex}"
    prompt = Generate(
        rid=rid,
        token_ids=[token],
        sampling=SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True),
        seed=0,
    )
    live = LiveRequest(rid, [prompt])
    state.submit(live)
    try:
        waiting = wait_for_success(request, state, live, error_of=_no_token)
        await asyncio.wait_for(waiting, HEALTH_TIMEOUT)
    except asyncio.TimeoutError:
        raise RequestError(f"no token came within {HEALTH_TIMEOUT:.0f} s", 503) from None
    return Response()


def _no_token(sample: Sample) -> RequestError | None:
    failed = sample.error is not None
    return RequestError("the engine could not make a token", 503) if failed else None


@get("/get_model_info")
@get("/model_info")
async def model_info(state: State) -> Response:
    model = state.model_config()
    return json_response(
        {
            "model_path": state.config.model_path,
            "tokenizer_path": state.config.tokenizer_path,
            "served_model_name": state.model_name,
            "is_generation": True,
            "model_type": model.get("model_type"),
            "architectures": model.get("architectures"),
            "weight_version": state.manager.weight_version,
            "load_format": state.config.load_format,
            "max_model_len": state.context_length,
        }
    )


@get("/get_server_info")
@get("/server_info")
async def server_info(state: State) -> Response:
    engine = state.manager.engine
    arguments = dataclasses.asdict(state.config)
    arguments["api_key"] = "***" if state.api_keys else ""
    arguments["admin_api_key"] = "***" if state.config.admin_api_key else ""
    scheduler = await state.ask()
    averages = {
        "avg_spec_accept_length": state.recorder.accept_length,
        "last_gen_throughput": scheduler.state.get("gen_throughput", 0.0),
    }
    return json_response(
        {
            **arguments,
            **engine.details,  # what the engine made of "auto"
            "served_model_name": state.model_name,
            "version": __version__,
            "uptime": time.time() - state.started,
            "internal_states": [{**scheduler.state, **averages}],
            "speculation": scheduler.speculation,
            "max_total_num_tokens": engine.max_kv_slots,
            "max_checkpoints": engine.max_state_slots,
            "max_running_requests": engine.max_running_requests,
            "context_length": state.context_length,
            "vocab_size": engine.vocab_size,
            "max_req_input_len": state.prompts.max_prompt,
            "dp_size": 1,
            "kv_events": _kv_events(state.config),
        }
    )


def _kv_events(config: ServerConfig) -> dict[str, Any] | None:
    """What a router needs to subscribe; None if nothing is published."""
    events = read_events_config(config.kv_events_config)
    if events is None:
        return None
    names = ("publisher", "endpoint", "replay_endpoint", "topic")
    return {name: getattr(events, name) for name in names} | {"block_size": BLOCK}


def _card(state: ServerState, name: str) -> dict[str, Any]:
    """A model or an adapter, for OpenAI's clients and Anthropic's; ``parent`` is vLLM's."""
    begin = datetime.fromtimestamp(state.started, timezone.utc)
    adapter = state.adapters.get(name)
    return {
        "id": name,
        "display_name": name,
        "object": "model",
        "type": "model",
        "created": int(state.started),
        "created_at": begin.isoformat(timespec="seconds"),
        "owned_by": "mamba-eagle",
        "root": adapter or state.config.model_path,
        **({"parent": state.model_name} if adapter else {}),
        "max_model_len": state.context_length,
    }


@get("/v1/models")
async def models(state: State) -> Response:
    """The model and its loaded adapters."""
    cards = [_card(state, name) for name in (state.model_name, *state.adapters)]
    return json_response({"object": "list", "data": cards})


@get("/v1/models/{name:path}")
async def model(state: State, name: str) -> Response:
    state.check_model(name)
    return json_response(_card(state, name if name in state.adapters else state.model_name))


async def _load(state: ServerState) -> dict[str, Any]:
    """As SGLang's routes have it, which its gateways read."""
    values = (await state.ask()).state
    running = int(values.get("num_running_reqs", 0))
    waiting = int(values.get("num_queue_reqs", 0))
    most = state.manager.engine.max_running_requests
    return {
        "dp_rank": 0,
        "num_running_reqs": running,
        "num_waiting_reqs": waiting,
        "num_reqs": running + waiting,
        "num_total_reqs": running + waiting,
        "num_tokens": int(values.get("num_used_tokens", 0)),
        "num_used_tokens": int(values.get("num_used_tokens", 0)),
        "max_total_num_tokens": int(values.get("max_total_num_tokens", 0)),
        "num_waiting_uncached_tokens": int(values.get("num_queue_tokens", 0)),
        "token_usage": values.get("token_usage", 0.0),
        "gen_throughput": values.get("gen_throughput", 0.0),
        "cache_hit_rate": values.get("cache_hit_rate", 0.0),
        "utilization": min(1.0, running / most),
        "max_running_requests": most,
    }


@get("/get_load")
async def get_load(state: State) -> Response:
    return json_response([await _load(state)])


@get("/v1/loads")
async def loads(state: State) -> Response:
    load = await _load(state)
    now = datetime.now(timezone.utc).isoformat()
    return json_response(
        {"timestamp": now, "version": __version__, "dp_rank_count": 1, "loads": [load]}
    )


@get("/metrics")
async def metrics(state: State) -> Response:
    try:
        reply = await state.manager.ask(GetState(), 1.0)
    except (EngineDead, asyncio.TimeoutError):
        reply = None  # what this process counts is still worth reading
    content = state.recorder.exposition(reply)
    return Response(content, media_type="text/plain; version=0.0.4; charset=utf-8")
