"""POST /load_lora_adapter and /unload_lora_adapter; vLLM has the same under /v1."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response

from mamba_eagle.limits import MAX_MODEL_LENGTH
from mamba_eagle.server.apis.rollouts.operator import trusted
from mamba_eagle.server.bodies import kinds
from mamba_eagle.server.bodies.model import Body, needs
from mamba_eagle.server.errors import RequestError, json_response
from mamba_eagle.server.state import ServerState
from mamba_eagle.tokenizer.errors import EngineDead

MAX_FOLDER = 4096  # characters of a path
NAME = kinds.short(MAX_MODEL_LENGTH)
router = APIRouter()


class UnloadBody(Body):
    """Which adapter is no longer served."""

    lora_name: Annotated[str, NAME] = needs("its name")


class LoadBody(Body):
    """Which adapter is served from now on."""

    lora_name: Annotated[str, NAME] = needs("the name by which requests choose it")
    lora_path: Annotated[str, kinds.short(MAX_FOLDER)] = needs("its folder, on the server's disk")


@router.post("/load_lora_adapter")
@router.post("/v1/load_lora_adapter")
async def load(request: Request) -> Response:
    """Serves a PEFT adapter under a name, from the next request on; another of that name is
    replaced, and requests that have begun keep it. Takes the admin key, unless the server has none
    and listens to its own machine alone."""
    state = trusted(request)
    body = await state.read_control(request, LoadBody)
    if not body.lora_name or body.lora_name == state.model_name:
        remedy = "must be a name of its own, not the model's"
        raise RequestError.about("lora_name", body.lora_name, remedy)
    await _answered(state.manager.ask.load_adapter(body.lora_name, body.lora_path))
    state.adapters[body.lora_name] = body.lora_path
    return _loaded(state)


@router.post("/unload_lora_adapter")
@router.post("/v1/unload_lora_adapter")
async def unload(request: Request) -> Response:
    """Requests that have begun end with it. Takes the admin key like /load_lora_adapter."""
    state = trusted(request)
    body = await state.read_control(request, UnloadBody)
    if body.lora_name not in state.adapters:
        raise RequestError.about("lora_name", body.lora_name, state.loaded_adapters)
    await _answered(state.manager.ask.unload_adapter(body.lora_name))
    state.adapters.pop(body.lora_name, None)
    return _loaded(state)


async def _answered(asked: Coroutine[Any, Any, str]) -> None:
    """Raises: RequestError 400 with what is wrong with the adapter; 503"""
    try:
        problem = await asked
    except (EngineDead, asyncio.TimeoutError) as error:
        raise RequestError(str(error) or "the model runner does not answer", 503) from None
    if problem:
        raise RequestError(problem)


def _loaded(state: ServerState) -> Response:
    return json_response({"success": True, "loaded_adapters": state.adapters})
