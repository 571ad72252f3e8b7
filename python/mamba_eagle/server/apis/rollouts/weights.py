"""Other weights for a server that runs, the version that replies name, and whether an update has
reached all ranks: checksums of what they hold."""

from typing import Annotated, Any

from fastapi import APIRouter, Request, Response

from mamba_eagle.message import AskRanks, SumWeights, Weights
from mamba_eagle.server.apis.rollouts import group
from mamba_eagle.server.bodies import kinds
from mamba_eagle.server.bodies.kinds import Body, Flag, Object, Text, needs, read, says, takes
from mamba_eagle.server.errors import RequestError, json_response
from mamba_eagle.server.state import ServerState, State, Trusted, answered

NO_PICKLE = (
    "tensors in this form are pickled, and a pickle can run any code: write them with safetensors "
    "and send the folder to /update_weights_from_disk; below /dev/shm they never leave memory"
)
NO_FORMAT = "the folder's config.json says it: leave it out"
router = APIRouter()


class DiskBody(Body):
    """Folders with safetensors and the model's config.json; the other one's weights stay."""

    model_path: Text = says("of the target", "")
    draft_model_path: Text = says("of the drafter", "")
    weight_version: group.Version = says("what replies are to call the weights", "")
    abort_all_requests: Flag = says("end them; otherwise they go on with the new weights", False)
    load_format: Annotated[str, kinds.choice_of("auto", "safetensors")] = says(NO_FORMAT, "auto")

    # the cache is always emptied, graphs are captured anew where they must be, and a pause goes on
    HARMLESS = frozenset(
        "flush_cache is_async keep_pause recapture_cuda_graph token_step torch_empty_cache".split()
    )


class DirectoryBody(Body):
    """prime-rl's and vLLM's."""

    weight_dir: Text = says("folder with safetensors and the model's config.json", "")
    weight_version: group.Version = says("what replies are to call the weights", "")
    update_info: Object = says("instead: tensors that a group sends, in this order", {})


@router.post("/update_weights_from_disk", openapi_extra=takes(DiskBody))
async def update_weights_from_disk(request: Request, state: Trusted) -> Response:
    """Names, shapes and dtypes of all tensors are checked first; if one is wrong, nothing changes.
    Running requests step back, and go on with the new weights; the prefix cache is emptied."""
    body = await state.read_control(request, DiskBody)
    if not body.model_path and not body.draft_model_path:
        raise RequestError.about("model_path", "", "must be a folder on the server")
    if body.abort_all_requests:
        await state.manager.abort(None, "aborted: the weights are updated")
    target, drafter = body.model_path, body.draft_model_path
    weights = Weights(target=target, drafter=drafter, version=body.weight_version)
    await group.change_weights(state, weights)
    message = f"weights are version {state.manager.weight_version}"
    return json_response({"success": True, "message": message, "num_paused_requests": 0})


@router.post("/update_weights", openapi_extra=takes(DirectoryBody))
async def update_weights(request: Request, state: Trusted) -> Response:
    """From ``weight_dir`` as /update_weights_from_disk; from a group as
    /update_weights_from_distributed, or as a part of what /start_weight_update began."""
    body = await state.bodies.read(request, lambda values: read(DirectoryBody, values))
    if body.update_info:
        info = read(group.UpdateInfo, body.update_info, "update_info")
        tensors = group.listed(info.names, info.dtype_names, info.shapes, "dtype_names")
        chunk = info.packed_buffer_size_bytes if info.packed else 0
        await group.take(state, tensors, group.GROUP, chunk, body.weight_version)
    elif body.weight_dir:
        await group.change_weights(
            state, Weights(target=body.weight_dir, version=body.weight_version)
        )
    else:
        raise RequestError.about("weight_dir", "", "must be a folder on the server")
    return json_response({"status": "ok", **group.version(state)})


@router.post("/update_weights_from_tensor")
async def update_weights_from_tensor(state: Trusted) -> Response:
    """Refused."""
    raise RequestError(f"/update_weights_from_tensor: {NO_PICKLE}")


@router.api_route("/get_weight_version", methods=["GET", "POST"])
@router.api_route("/weight_version", methods=["GET", "POST"])
@router.get("/weight_info")
async def get_weight_version(state: State) -> Response:
    """Of the weights that requests run with now."""
    return json_response(group.version(state))


NO_RESET = (
    "this server never runs with weights that no one has sent: update them instead. An update "
    "replaces all of them, so none can stay by mistake"
)
ACTIONS = ("checksum", "snapshot", "compare", "reset_tensors", "reset")


class CheckBody(Body):
    """What to do with the checksums."""

    action: Annotated[str, kinds.choice_of(*ACTIONS)] = needs(
        "checksum: return them; snapshot: keep them; compare: with those kept or sent"
    )
    baseline: Object = says("of vLLM's compare: checksums of before", {})

    REFUSED = {"skip_tensor_list": "all are compared: leave it out"}
    HARMLESS = frozenset(("allow_quant_error",))  # nothing is rounded twice


@router.post("/weights_checker", openapi_extra=takes(CheckBody))
async def weights_checker(request: Request, state: Trusted) -> Response:
    """SGLang's: a comparison with the snapshot that fails is 400, with the names that differ."""
    action = (await state.read_control(request, CheckBody)).action
    ranks = await _checksums(state, action)
    if action == "snapshot":
        state.snapshot = ranks
    elif action == "compare":
        if state.snapshot is None:
            raise RequestError("compare: there is no snapshot yet: take one first")
        if differ := _differing(_flat(state.snapshot), _flat(ranks)):
            shown = ", ".join(differ[:20])
            raise RequestError(f"{len(differ)} tensors differ from the snapshot: {shown}")
    sums = [{"rank": rank, "checksums": found} for rank, found in enumerate(ranks)]
    return json_response({"success": True, "message": action, "ranks": sums})


@router.post("/weight_checker", openapi_extra=takes(CheckBody))
async def weight_checker(request: Request, state: Trusted) -> Response:
    """vLLM's: the caller keeps the checksums, and sends them to be compared."""
    body = await state.bodies.read(request, lambda values: read(CheckBody, values))
    found = _flat(await _checksums(state, body.action))
    if body.action != "compare":
        return json_response({"checksums": found})
    differ = _differing(body.baseline, found)
    return json_response({"match": not differ, "mismatches": differ})


async def _checksums(state: ServerState, action: str) -> list[dict[str, str]]:
    """The checksums of each rank, by tensor."""
    if action.startswith("reset"):
        raise RequestError.about("action", action, NO_RESET)
    asked = state.manager.ask(AskRanks(task=SumWeights()), group.RANK_SECONDS)
    return [reply.checksums for reply in await answered(asked)]


def _flat(ranks: list[dict[str, str]]) -> dict[str, str]:
    return {
        f"rank{i}:{name}": each for i, found in enumerate(ranks) for name, each in found.items()
    }


def _differing(before: dict[str, Any], now: dict[str, str]) -> list[str]:
    return sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
