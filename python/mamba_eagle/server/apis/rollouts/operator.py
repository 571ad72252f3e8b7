"""What the routes for trainers share: who may call them, and what the engine's answer becomes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from fastapi import Request

from mamba_eagle.message import Done, PrefixMoved, RankReply
from mamba_eagle.server.errors import RequestError
from mamba_eagle.server.http.auth import need_admin
from mamba_eagle.server.http.origins import is_loopback
from mamba_eagle.server.state import ServerState, server_state
from mamba_eagle.tokenizer.errors import EngineDead

T = TypeVar("T")


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


async def answered(question: Awaitable[T]) -> T:
    """Raises: RequestError 503 if no answer comes; 400 with the reason why nothing was done."""
    try:
        reply = await question
    except (EngineDead, asyncio.TimeoutError) as error:
        raise RequestError(str(error) or "the engine did not answer in time", 503) from None
    for each in reply if isinstance(reply, list) else [reply]:
        if isinstance(each, (Done, PrefixMoved, RankReply)) and each.problem:
            raise RequestError(each.problem)
    return reply
