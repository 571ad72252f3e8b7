"""Pausing and going on, and memory given back meanwhile, in SGLang's and in vLLM's words."""

from collections.abc import Sequence
from typing import Annotated

from fastapi import APIRouter, Request, Response

from mamba_eagle.core import MEMORY_TAGS, shown
from mamba_eagle.message import ChangeModel, Continue, Pause, PauseMode
from mamba_eagle.server.apis.rollouts.group import CHANGE_SECONDS, finish
from mamba_eagle.server.apis.sse import Turn
from mamba_eagle.server.bodies import kinds
from mamba_eagle.server.bodies.kinds import Body, read, says, takes
from mamba_eagle.server.errors import RequestError, json_response
from mamba_eagle.server.state import Operated, ServerState, State, Trusted, answered, heard

MAX_NAMES = 1_000_000
PAUSE_SECONDS = 1800.0  # that requests may take to end
SGLANG_MODES: dict[str, PauseMode] = {"abort": "retract", "in_place": "keep", "retract": "retract"}
VLLM_MODES: dict[str, PauseMode] = {"abort": "retract", "keep": "keep", "wait": "wait"}
MODE, CLEARS = "abort, wait or keep", "false: what is cached stays"
router = APIRouter()


class PauseBody(Body):
    """What becomes of running requests."""

    mode: Annotated[str, kinds.choice_of(*SGLANG_MODES)] = says(
        "abort: they end; retract: they run again later, with their output so far; in_place: they "
        "stay, with their states",
        "abort",
    )


@router.post("/pause_generation", openapi_extra=takes(PauseBody))
async def pause_generation(request: Request, state: Operated) -> Response:
    """Returns when no step is under way; requests that come wait for `/continue_generation`."""
    mode = (await state.read_control(request, PauseBody)).mode
    await _pause(state, SGLANG_MODES[mode], aborts=mode == "abort")
    return json_response({"status": "ok", "message": f"generation is paused ({mode})"})


@router.post("/pause", openapi_extra=takes(mode=MODE, clear_cache=CLEARS))
async def pause(request: Request, state: Operated) -> Response:
    """``?mode=`` abort, wait (they run to their end) or keep (they stay, with their states);
    ``?clear_cache=false`` leaves the prefix cache."""
    mode = request.query_params.get("mode", "abort")
    clears = request.query_params.get("clear_cache", "true").lower()
    if mode not in VLLM_MODES:
        raise RequestError.about("mode", mode, f"must be one of {', '.join(VLLM_MODES)}")
    if clears not in ("true", "false"):
        raise RequestError(f"clear_cache = {shown(clears)}: must be true or false")
    await _pause(state, VLLM_MODES[mode], aborts=mode == "abort")
    if clears == "true" and mode != "keep":  # requests in place go on from what is cached
        await heard(state.manager.ask.flush_cache(PAUSE_SECONDS))
    return json_response({"status": "paused"})


@router.post("/continue_generation")
async def continue_generation(state: Operated) -> Response:
    """Ends a pause; without one nothing happens."""
    await _go_on(state)
    return json_response({"status": "ok", "message": "generation continues"})


@router.post("/resume")
async def resume(state: Operated) -> Response:
    """Ends a pause; without one nothing happens."""
    await _go_on(state)
    return json_response({"status": "resumed"})


@router.get("/is_paused")
async def is_paused(state: State) -> Response:
    """Whether requests that come wait."""
    return json_response({"is_paused": state.paused})


class AbortsBody(Body):
    """vLLM's."""

    request_ids: Annotated[list[str] | None, kinds.texts("request_ids", MAX_NAMES)] = says(
        "names of requests; left out: all"
    )


@router.post("/abort_requests", openapi_extra=takes(AbortsBody))
async def abort_requests(request: Request, state: Operated) -> Response:
    """They end with finish reason abort and the tokens so far; nothing is paused."""
    body = await state.bodies.read(request, lambda values: read(AbortsBody, values))
    names = [None] if body.request_ids is None else body.request_ids
    count, turn = 0, Turn()
    for name in names:
        await turn.give_up_if_long()
        count += await state.manager.abort(name)
    return json_response({"status": "aborted", "aborted": count})


@router.post("/reset_prefix_cache")
async def reset_prefix_cache(state: Operated) -> Response:
    """Empties the prefix cache, if nothing runs."""
    reply = await heard(state.manager.ask.flush_cache())
    if reply.problem:
        raise RequestError(f"the cache was not reset: {reply.problem}")
    return json_response({"success": True})


@router.get("/get_world_size")
async def get_world_size(state: State) -> Response:
    """How many ranks the model is split over."""
    return json_response({"world_size": state.config.num_ranks})


@router.get("/liveness")
async def liveness(state: State) -> Response:
    """As /health."""
    if (problem := state.lifetime.failure or state.manager.dead) is not None:
        raise RequestError(problem, 503)
    return json_response({"status": "ok"})


async def _pause(state: ServerState, mode: PauseMode, aborts: bool) -> None:
    state.paused = True
    if aborts:
        await state.manager.abort(None, "aborted: generation is paused")
    await answered(state.manager.ask(Pause(mode=mode), PAUSE_SECONDS))


async def _go_on(state: ServerState) -> None:
    while state.incoming.folders and not state.incoming.begun:  # a part may come meanwhile
        await finish(state)
    state.paused = False
    await answered(state.manager.ask(Continue(), 30.0))


# SGLang's third, for which there is nothing to do: steps are captured again once all is resumed.
GRAPHS = "cuda_graph"
MUST = f"must be a list of {', '.join(MEMORY_TAGS)} and {GRAPHS}"


class TagsBody(Body):
    """Memory of what."""

    tags: Annotated[list[str], kinds.texts("tags", len(MEMORY_TAGS) + 1)] = says(
        "`weights`, `kv_cache`; left out: both. `cuda_graph` changes nothing", []
    )


def _checked(tags: Sequence[str]) -> list[str]:
    if set(tags) - {*MEMORY_TAGS, GRAPHS}:
        raise RequestError.about("tags", list(tags), MUST)
    return sorted(set(tags) - {GRAPHS}) if tags else list(MEMORY_TAGS)


@router.post("/release_memory_occupation", openapi_extra=takes(TagsBody))
async def release_memory_occupation(request: Request, state: Trusted) -> Response:
    """The weights and pools are freed; requests wait until all of it is resumed."""
    tags = _checked((await state.read_control(request, TagsBody)).tags)
    await _change(state, ChangeModel(release=tags))
    return json_response({"success": True, "released": tags})


@router.post("/resume_memory_occupation", openapi_extra=takes(TagsBody))
async def resume_memory_occupation(request: Request, state: Trusted) -> Response:
    """Once nothing is released any more, the weights are read again and requests go on."""
    tags = _checked((await state.read_control(request, TagsBody)).tags)
    await _change(state, ChangeModel(resume=tags))
    return json_response({"success": True, "resumed": tags})


@router.post("/sleep")
async def sleep(state: Trusted) -> Response:
    """vLLM's: releases all; ``?level=`` makes no difference."""
    await _change(state, ChangeModel(release=list(MEMORY_TAGS)))
    return json_response({"status": "sleeping"})


@router.post("/wake_up", openapi_extra=takes(tags="weights, kv_cache; left out: both"))
async def wake_up(request: Request, state: Trusted) -> Response:
    """vLLM's: ``?tags=`` once or several times; left out: all."""
    await _change(state, ChangeModel(resume=_checked(request.query_params.getlist("tags"))))
    return json_response({"status": "awake"})


async def _change(state: ServerState, asked: ChangeModel) -> None:
    if asked.release or asked.resume:
        await answered(state.manager.ask(asked, CHANGE_SECONDS))
