"""What the routes for trainers share: who may call them, and what the engine's answer becomes."""

from collections.abc import Awaitable
from typing import TypeVar

from fastapi import Request

from mamba_eagle.message import Done, PrefixMoved, ProfileReply, RankReply
from mamba_eagle.server.errors import RequestError
from mamba_eagle.server.http.auth import need_admin
from mamba_eagle.server.http.origins import is_loopback
from mamba_eagle.server.state import SILENCE, ServerState, heard, server_state

CHANGE_SECONDS = 1800.0  # that loading weights may take
RANK_SECONDS = 3600.0  # that receiving or summing them may
T = TypeVar("T", Done, PrefixMoved, ProfileReply, list[RankReply])


def operated(request: Request) -> ServerState:
    """Raises: RequestError 401 where an admin key was set and the request does not carry it."""
    state = server_state(request)
    need_admin(request, state.config, request.url.path, by_default=True)
    return state


def trusted(request: Request) -> ServerState:
    """For what reads folders of the server or takes its model away. Raises: RequestError 401, and
    403 where there is no admin key and other machines can reach the server."""
    state = server_state(request)
    local = is_loopback(state.config.host)
    need_admin(request, state.config, request.url.path, by_default=local)
    return state


async def answered(question: Awaitable[T], silence: str = SILENCE) -> T:
    """Raises: RequestError 503 if no answer comes (silence: what it says then); 400 with the reason
    why nothing was done."""
    reply = await heard(question, silence)
    for each in reply if isinstance(reply, list) else [reply]:
        if each.problem:
            raise RequestError(each.problem)
    return reply
