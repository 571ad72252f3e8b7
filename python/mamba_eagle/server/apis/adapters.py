"""POST /load_lora_adapter and /unload_lora_adapter; vLLM has the same under /v1."""

from typing import Annotated

from fastapi import APIRouter, Request, Response

from mamba_eagle.limits import MAX_MODEL_LENGTH
from mamba_eagle.message import LoadAdapter, UnloadAdapter
from mamba_eagle.server.apis.rollouts.operator import answered, trusted
from mamba_eagle.server.bodies import kinds
from mamba_eagle.server.bodies.kinds import Body, needs, takes
from mamba_eagle.server.errors import RequestError, json_response
from mamba_eagle.server.state import ServerState

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


@router.post("/load_lora_adapter", openapi_extra=takes(LoadBody))
@router.post("/v1/load_lora_adapter", openapi_extra=takes(LoadBody))
async def load(request: Request) -> Response:
    """Serves a PEFT adapter under a name, from the next request on; another of that name is
    replaced, and requests that have begun keep it. Takes the admin key, unless the server has none
    and listens to its own machine alone."""
    state = trusted(request)
    body = await state.read_control(request, LoadBody)
    if not body.lora_name or body.lora_name == state.model_name:
        remedy = "must be a name of its own, not the model's"
        raise RequestError.about("lora_name", body.lora_name, remedy)
    await _change(state, LoadAdapter(name=body.lora_name, path=body.lora_path))
    state.adapters[body.lora_name] = body.lora_path
    return _loaded(state)


@router.post("/unload_lora_adapter", openapi_extra=takes(UnloadBody))
@router.post("/v1/unload_lora_adapter", openapi_extra=takes(UnloadBody))
async def unload(request: Request) -> Response:
    """Requests that have begun end with it. Takes the admin key like /load_lora_adapter."""
    state = trusted(request)
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
