"""POST /open_session and /close_session, as SGLang's: but requests that name the session come with
whole prompts, and what the last one has run stays in the cache."""

from __future__ import annotations

import uuid
from typing import Annotated

from fastapi import APIRouter, Request, Response

from mamba_eagle.limits import MAX_PIN_SECONDS, MAX_RID_LENGTH
from mamba_eagle.message import CloseSession, OpenSession
from mamba_eagle.server.apis.rollouts.operator import answered
from mamba_eagle.server.bodies import kinds
from mamba_eagle.server.bodies.model import Body, needs, says, takes
from mamba_eagle.server.errors import json_response
from mamba_eagle.server.state import server_state

SECONDS = kinds.number(
    0, MAX_PIN_SECONDS, above=0, must=f"must be above 0 and at most {MAX_PIN_SECONDS}"
)
NAME = kinds.short(MAX_RID_LENGTH)
router = APIRouter()


class OpenBody(Body):
    """A session, which ends by itself when no request names it for a while."""

    session_id: Annotated[str, NAME] = says("its name; left out: one that no one guesses", "")
    timeout: Annotated[float, SECONDS] = says(
        "seconds without a request after which it ends", 300.0
    )

    HARMLESS = frozenset(("capacity_of_str_len", "streaming"))  # the cache has no such limits


class CloseBody(Body):
    """Which session ends."""

    session_id: Annotated[str, NAME] = needs("its name")


@router.post("/open_session", openapi_extra=takes(OpenBody))
async def open_session(request: Request) -> Response:
    """Answers with the session's name."""
    state = server_state(request)
    body = await state.read_control(request, OpenBody)
    name = body.session_id or uuid.uuid4().hex
    await answered(state.manager.ask(OpenSession(name=name, seconds=body.timeout), 30.0))
    return json_response(name)


@router.post("/close_session", openapi_extra=takes(CloseBody))
async def close_session(request: Request) -> Response:
    """What it has in the cache is evicted like everything else from now on."""
    state = server_state(request)
    body = await state.read_control(request, CloseBody)
    await answered(state.manager.ask(CloseSession(name=body.session_id), 30.0))
    return json_response({"success": True})
