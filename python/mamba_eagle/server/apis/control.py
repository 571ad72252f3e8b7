"""POST /flush_cache, /abort_request, /start_profile and /stop_profile; and /load_lora_adapter and
/unload_lora_adapter, which vLLM has under /v1."""

import tempfile
import time
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Request, Response
from starlette.responses import PlainTextResponse

from mamba_eagle.core import shown
from mamba_eagle.limits import MAX_MODEL_LENGTH, MAX_PROFILED_STEPS
from mamba_eagle.message import LoadAdapter, Profile, UnloadAdapter
from mamba_eagle.server.bodies import kinds, known
from mamba_eagle.server.bodies.kinds import Body, Flag, Text, needs, says, takes
from mamba_eagle.server.bodies.reception import unless_gone
from mamba_eagle.server.errors import RequestError, json_response
from mamba_eagle.server.http.auth import need_admin
from mamba_eagle.server.state import Operated, ServerState, State, Trusted, answered, heard

IDLE = "seconds to wait for the server to be idle"
MAX_FOLDER = 4096  # characters of a path
NAME = kinds.short(MAX_MODEL_LENGTH)
router = APIRouter()


@router.api_route("/flush_cache", methods=["GET", "POST"], openapi_extra=takes(timeout=IDLE))
async def flush_cache(request: Request, state: Operated) -> Response:
    """Empties the prefix cache; ``?timeout=`` waits that many seconds for the server to be idle."""
    given = request.query_params.get("timeout", "0")
    try:
        timeout = float(given)
        if not 0 <= timeout <= 3600:
            raise ValueError
    except ValueError:
        raise RequestError(f"timeout = {shown(given)}: must be 0 to 3600 seconds") from None
    flushing = unless_gone(request, state.manager.ask.flush_cache(timeout))
    reply = await heard(flushing, "the scheduler does not answer")
    if reply is None:
        return Response(status_code=499)  # the client has left
    if reply.problem:
        raise RequestError(f"the cache was not flushed: {reply.problem}")
    return PlainTextResponse("Cache flushed.\n")


class AbortBody(Body):
    """rid or abort_all."""

    rid: Text | None = says("the request's name")
    abort_all: Flag = says("all requests", False)


@router.post("/abort_request", openapi_extra=takes(AbortBody))
async def abort_request(request: Request, state: State) -> Response:
    """Ends the request of exactly this ``rid`` with all its samples, or all requests."""
    body = await state.read_control(request, AbortBody)
    if body.abort_all:
        need_admin(request, state.config, "abort_all", by_default=True)
        count = await state.manager.abort(None)
    else:
        if not body.rid:
            remedy = 'must be a request\'s name; or send {"abort_all": true}'
            raise RequestError.about("rid", body.rid, remedy)
        count = await state.manager.abort(body.rid)
    return json_response({"aborted": count})


STEPS = kinds.integer(1, MAX_PROFILED_STEPS)


class ProfileBody(Body):
    """How much is recorded."""

    num_steps: Annotated[int, STEPS] = says("steps of the runner", 20)

    REFUSED = known.PROFILE


@router.post("/start_profile", openapi_extra=takes(ProfileBody))
async def start_profile(request: Request, state: State) -> Response:
    """Records the next ``num_steps`` steps of the model runner. Takes the admin key."""
    need_admin(request, state.config, "/start_profile", by_default=False)
    steps = (await state.read_control(request, ProfileBody)).num_steps
    folder = Path(tempfile.gettempdir())
    path = str(folder / f"mamba-eagle-profile-{time.time_ns():x}.json")
    return await _ask(state, path, steps)


@router.post("/stop_profile")
async def stop_profile(request: Request, state: State) -> Response:
    """Where the trace was written; one that is still being recorded ends. Takes the admin key."""
    need_admin(request, state.config, "/stop_profile", by_default=False)
    return await _ask(state, "", 0)


async def _ask(state: ServerState, path: str, steps: int) -> Response:
    """Steps 0: stop."""
    asked = state.manager.ask(Profile(path=path, steps=steps), 60.0)
    reply = await answered(asked, "the model runner does not answer")
    return json_response({"path": reply.path, "steps": reply.steps})


# ── adapters ─────────────────────────────────────────────────────────────────────────────────


class UnloadBody(Body):
    """Which adapter is no longer served."""

    lora_name: Annotated[str, NAME] = needs("its name")


class LoadBody(Body):
    """Which adapter is served from now on."""

    lora_name: Annotated[str, NAME] = needs("the name by which requests choose it")
    lora_path: Annotated[str, kinds.short(MAX_FOLDER)] = needs("its folder, on the server's disk")


@router.post("/load_lora_adapter", openapi_extra=takes(LoadBody))
@router.post("/v1/load_lora_adapter", openapi_extra=takes(LoadBody))
async def load(request: Request, state: Trusted) -> Response:
    """Serves a PEFT adapter under a name, from the next request on; another of that name is
    replaced, and requests that have begun keep it. Takes the admin key, unless the server has none
    and listens to its own machine alone."""
    body = await state.read_control(request, LoadBody)
    if body.lora_name in state.own_names:
        remedy = "must be a name of its own, not the model's"
        raise RequestError.about("lora_name", body.lora_name, remedy)
    await _change(state, LoadAdapter(name=body.lora_name, path=body.lora_path))
    state.adapters[body.lora_name] = body.lora_path
    return _loaded(state)


@router.post("/unload_lora_adapter", openapi_extra=takes(UnloadBody))
@router.post("/v1/unload_lora_adapter", openapi_extra=takes(UnloadBody))
async def unload(request: Request, state: Trusted) -> Response:
    """Requests that have begun end with it. Takes the admin key like /load_lora_adapter."""
    body = await state.read_control(request, UnloadBody)
    if body.lora_name not in state.adapters:
        raise RequestError.about("lora_name", body.lora_name, state.loaded_adapters)
    await _change(state, UnloadAdapter(name=body.lora_name))
    state.adapters.pop(body.lora_name, None)
    return _loaded(state)


async def _change(state: ServerState, asked: LoadAdapter | UnloadAdapter) -> None:
    """Raises: RequestError 400 with what is wrong with the adapter; 503"""
    await answered(state.manager.ask(asked, 600.0), "the model runner does not answer")


def _loaded(state: ServerState) -> Response:
    return json_response({"success": True, "loaded_adapters": state.adapters})
