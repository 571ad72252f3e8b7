"""Whether an update has reached the weights: checksums of all that ranks hold, and comparisons."""

from typing import Annotated, Any

from fastapi import APIRouter, Request, Response

from mamba_eagle.message import AskRanks, SumWeights
from mamba_eagle.server.apis.rollouts.operator import RANK_SECONDS, answered, trusted
from mamba_eagle.server.bodies import kinds
from mamba_eagle.server.bodies.model import Body, Object, needs, read, says, takes
from mamba_eagle.server.errors import RequestError, json_response
from mamba_eagle.server.state import ServerState

NO_RESET = (
    "this server never runs with weights that no one has sent: update them instead. An update "
    "replaces all of them, so none can stay by mistake"
)
ACTIONS = ("checksum", "snapshot", "compare", "reset_tensors", "reset")
router = APIRouter()


class CheckBody(Body):
    """What to do with the checksums."""

    action: Annotated[str, kinds.choice_of(*ACTIONS)] = needs(
        "checksum: return them; snapshot: keep them; compare: with those kept or sent"
    )
    baseline: Object = says("of vLLM's compare: checksums of before", {})

    REFUSED = {"skip_tensor_list": "all are compared: leave it out"}
    HARMLESS = frozenset(("allow_quant_error",))  # nothing is rounded twice


@router.post("/weights_checker", openapi_extra=takes(CheckBody))
async def weights_checker(request: Request) -> Response:
    """SGLang's: a comparison with the snapshot that fails is 400, with the names that differ."""
    state = trusted(request)
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
async def weight_checker(request: Request) -> Response:
    """vLLM's: the caller keeps the checksums, and sends them to be compared."""
    state = trusted(request)
    body = await state.bodies.read(request, lambda values: read(CheckBody, values))
    found = _flat(await _checksums(state, body.action))
    if body.action != "compare":
        return json_response({"checksums": found})
    differ = _differing(body.baseline, found)
    return json_response({"match": not differ, "mismatches": differ})


async def _checksums(state: ServerState, action: str) -> list[dict[str, str]]:
    """By tensor, of each rank."""
    if action.startswith("reset"):
        raise RequestError.about("action", action, NO_RESET)
    asked = state.manager.ask(AskRanks(task=SumWeights()), RANK_SECONDS)
    return [reply.checksums for reply in await answered(asked)]


def _flat(ranks: list[dict[str, str]]) -> dict[str, str]:
    return {
        f"rank{i}:{name}": each for i, found in enumerate(ranks) for name, each in found.items()
    }


def _differing(before: dict[str, Any], now: dict[str, str]) -> list[str]:
    return sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
