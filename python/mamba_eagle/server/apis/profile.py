"""POST /start_profile and /stop_profile: the runner's steps, as torch's profiler records them."""

import tempfile
import time
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Request, Response

from mamba_eagle.limits import MAX_PROFILED_STEPS
from mamba_eagle.message import Profile
from mamba_eagle.server.apis.rollouts.operator import answered
from mamba_eagle.server.bodies import kinds, known
from mamba_eagle.server.bodies.model import Body, says, takes
from mamba_eagle.server.errors import json_response
from mamba_eagle.server.http.auth import need_admin
from mamba_eagle.server.state import ServerState, server_state

STEPS = kinds.integer(1, MAX_PROFILED_STEPS)


class ProfileBody(Body):
    """How much is recorded."""

    num_steps: Annotated[int, STEPS] = says("steps of the runner", 20)

    REFUSED = known.PROFILE


router = APIRouter()


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
