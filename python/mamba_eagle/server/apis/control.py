"""POST /flush_cache, /abort_request, /start_profile and /stop_profile."""

import tempfile
import time
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Request, Response
from starlette.responses import PlainTextResponse

from mamba_eagle.core import shown
from mamba_eagle.limits import MAX_PROFILED_STEPS
from mamba_eagle.message import Profile
from mamba_eagle.server.apis.rollouts.operator import answered
from mamba_eagle.server.bodies import kinds, known
from mamba_eagle.server.bodies.kinds import Body, Flag, Text, says, takes
from mamba_eagle.server.errors import RequestError, json_response
from mamba_eagle.server.http.auth import need_admin
from mamba_eagle.server.http.disconnect import unless_gone
from mamba_eagle.server.state import ServerState, heard, server_state

IDLE = "seconds to wait for the server to be idle"
router = APIRouter()


@router.api_route("/flush_cache", methods=["GET", "POST"], openapi_extra=takes(timeout=IDLE))
async def flush_cache(request: Request) -> Response:
    """Empties the prefix cache; ``?timeout=`` waits that many seconds for the server to be idle."""
    need_admin(request, server_state(request).config, "/flush_cache", by_default=True)
    given = request.query_params.get("timeout", "0")
    try:
        timeout = float(given)
        if not 0 <= timeout <= 3600:
            raise ValueError
    except ValueError:
        raise RequestError(f"timeout = {shown(given)}: must be 0 to 3600 seconds") from None
    manager = server_state(request).manager
    flushing = unless_gone(request, manager.ask.flush_cache(timeout))
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
async def abort_request(request: Request) -> Response:
    """Ends the request of exactly this ``rid`` with all its samples, or all requests."""
    body = await server_state(request).read_control(request, AbortBody)
    manager = server_state(request).manager
    if body.abort_all:
        need_admin(request, server_state(request).config, "abort_all", by_default=True)
        count = await manager.abort(None)
    else:
        if not body.rid:
            remedy = 'must be a request\'s name; or send {"abort_all": true}'
            raise RequestError.about("rid", body.rid, remedy)
        count = await manager.abort(body.rid)
    return json_response({"aborted": count})


STEPS = kinds.integer(1, MAX_PROFILED_STEPS)


class ProfileBody(Body):
    """How much is recorded."""

    num_steps: Annotated[int, STEPS] = says("steps of the runner", 20)

    REFUSED = known.PROFILE


@router.post("/start_profile", openapi_extra=takes(ProfileBody))
async def start_profile(request: Request) -> Response:
    """Records the next ``num_steps`` steps of the model runner. Takes the admin key."""
    state = server_state(request)
    need_admin(request, state.config, "/start_profile", by_default=False)
    steps = (await state.read_control(request, ProfileBody)).num_steps
    folder = Path(tempfile.gettempdir())
    path = str(folder / f"mamba-eagle-profile-{time.time_ns():x}.json")
    return await _ask(state, path, steps)


@router.post("/stop_profile")
async def stop_profile(request: Request) -> Response:
    """Where the trace was written; one that is still being recorded ends. Takes the admin key."""
    state = server_state(request)
    need_admin(request, state.config, "/stop_profile", by_default=False)
    return await _ask(state, "", 0)


async def _ask(state: ServerState, path: str, steps: int) -> Response:
    """Steps 0: stop."""
    asked = state.manager.ask(Profile(path=path, steps=steps), 60.0)
    reply = await answered(asked, "the model runner does not answer")
    return json_response({"path": reply.path, "steps": reply.steps})
