"""Other weights for a server that runs, and the version that replies name."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Request, Response

from mamba_eagle.limits import MAX_RID_LENGTH
from mamba_eagle.message import Weights
from mamba_eagle.server.apis.rollouts.operator import answered, trusted
from mamba_eagle.server.bodies import kinds
from mamba_eagle.server.bodies.model import Body, Flag, Text, says
from mamba_eagle.server.errors import RequestError, json_response
from mamba_eagle.server.state import ServerState, server_state

NO_PICKLE = (
    "tensors in this form are pickled, and a pickle can run any code: write them with safetensors "
    "and send the folder to /update_weights_from_disk; below /dev/shm they never leave memory"
)
NO_GROUP = (
    "this server joins no group of processes: write the weights with safetensors and send the "
    "folder to /update_weights_from_disk; below /dev/shm they never leave memory"
)
NO_FORMAT = "the folder's config.json says it: leave it out"
Version = Annotated[str, kinds.short(MAX_RID_LENGTH)]
router = APIRouter()


class DiskBody(Body):
    """Folders with safetensors and the model's config.json; the other one's weights stay."""

    model_path: Text = says("of the target", "")
    draft_model_path: Text = says("of the drafter", "")
    weight_version: Version = says("what replies are to call the weights", "")
    abort_all_requests: Flag = says("end them; otherwise they go on with the new weights", False)
    load_format: Annotated[str, kinds.choice_of("auto", "safetensors")] = says(NO_FORMAT, "auto")

    # the cache is always emptied, graphs are always captured anew, and a pause goes on
    HARMLESS = frozenset(
        "flush_cache is_async keep_pause recapture_cuda_graph token_step torch_empty_cache".split()
    )


class DirectoryBody(Body):
    """prime-rl's and vLLM's."""

    weight_dir: Text = says("folder with safetensors and the model's config.json", "")
    weight_version: Version = says("what replies are to call the weights", "")

    REFUSED = {
        "update_info": "tensors from a group of processes are not taken: write them with "
        "safetensors and send weight_dir"
    }


@router.post("/update_weights_from_disk")
async def update_weights_from_disk(request: Request) -> Response:
    """Names, shapes and dtypes of all tensors are checked first; if one is wrong, nothing changes.
    Running requests step back, and go on with the new weights; the prefix cache is emptied."""
    state = trusted(request)
    body = await state.read_control(request, DiskBody)
    if not body.model_path and not body.draft_model_path:
        raise RequestError.about("model_path", "", "must be a folder on the server")
    if body.abort_all_requests:
        await state.manager.abort(None, "aborted: the weights are updated")
    await _update(state, body.model_path, body.draft_model_path, body.weight_version)
    message = f"weights are version {state.manager.weight_version}"
    return json_response({"success": True, "message": message, "num_paused_requests": 0})


@router.post("/update_weights")
async def update_weights(request: Request) -> Response:
    """As /update_weights_from_disk, from ``weight_dir``."""
    state = trusted(request)
    body = await state.read_control(request, DirectoryBody)
    if not body.weight_dir:
        raise RequestError.about("weight_dir", "", "must be a folder on the server")
    await _update(state, body.weight_dir, "", body.weight_version)
    return json_response({"status": "ok", "weight_version": state.manager.weight_version})


@router.post("/start_weight_update")
@router.post("/finish_weight_update")
async def update_in_parts(request: Request) -> Response:
    """vLLM's calls around /update_weights, which is whole by itself: nothing happens."""
    trusted(request)
    return json_response({"status": "ok"})


@router.post("/update_weights_from_tensor")
async def update_weights_from_tensor(request: Request) -> Response:
    """Refused."""
    trusted(request)
    raise RequestError(f"/update_weights_from_tensor: {NO_PICKLE}")


@router.post("/init_weights_update_group")
@router.post("/init_weight_transfer_engine")
@router.post("/update_weights_from_distributed")
async def join_group(request: Request) -> Response:
    """Refused."""
    trusted(request)
    raise RequestError(f"{request.url.path}: {NO_GROUP}")


@router.api_route("/get_weight_version", methods=["GET", "POST"])
@router.api_route("/weight_version", methods=["GET", "POST"])
async def get_weight_version(request: Request) -> Response:
    """Of the weights that requests run with now."""
    return json_response({"weight_version": server_state(request).manager.weight_version})


async def _update(state: ServerState, target: str, drafter: str, version: str) -> None:
    """Raises: RequestError"""
    given: dict[str, Any] = {"target": target, "drafter": drafter, "version": version}
    await answered(state.manager.ask.change(Weights(**given)))
    state.manager.weight_version = version or state.manager.weight_version
