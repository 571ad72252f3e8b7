"""Other weights from a trainer in a group of processes (NCCL or gloo), in SGLang's and in vLLM's
words.

Several calls make one update. It takes the place of the weights when vLLM's /finish_weight_update
or the end of a pause says that it is whole; without either, each call is whole by itself.
"""

from typing import Annotated, Any

from fastapi import APIRouter, Request, Response

from mamba_eagle.limits import MAX_RID_LENGTH
from mamba_eagle.message import (
    AskRanks,
    ChangeModel,
    JoinGroup,
    LeaveGroup,
    TakeTensors,
    TensorInfo,
    Weights,
)
from mamba_eagle.server.bodies import kinds
from mamba_eagle.server.bodies.kinds import Body, Flag, Object, Text, needs, read, says, takes
from mamba_eagle.server.errors import RequestError, json_response
from mamba_eagle.server.state import Incoming, ServerState, Trusted, answered, heard

JOIN_SECONDS, MAX_JOIN_SECONDS = 300.0, 86_400.0
ANSWER_SECONDS = 60.0  # later
CHANGE_SECONDS = 1800.0  # that loading weights may take
RANK_SECONDS = 3600.0  # that receiving or summing them may
MAX_TENSORS, MAX_RANKS, MAX_CHUNK = 1_000_000, 65_536, 2**40
DEFAULT_CHUNK = 2**30  # vLLM's
GROUP = "weight_update_group"
FLAT = "flattened_bucket"  # SGLang's name of tensors that travel as one
Name = Annotated[str, kinds.short(MAX_RID_LENGTH)]
Version = Name
Names = Annotated[list[str], kinds.texts("tensors", MAX_TENSORS)]
SHAPE = kinds.integers("sizes", 64)
SHAPES = kinds.Kind(
    lambda value: kinds.all_of(value, SHAPE.convert),
    "must be a list of lists of integers",
    kinds.list_of(SHAPE.schema),
)
router = APIRouter()


class Meeting(Body):
    """Where a group meets; its rank 0 is the trainer, whose store listens there."""

    master_address: Text = needs("host of the trainer's store")
    master_port: Annotated[int, kinds.integer(1, 65_535)] = needs("its port")
    rank_offset: Annotated[int, kinds.integer(1, MAX_RANKS)] = says("of this server's ranks", 1)
    world_size: Annotated[int, kinds.integer(2, MAX_RANKS)] = needs("ranks, with the trainer")
    timeout: Annotated[float, kinds.number(0.001, MAX_JOIN_SECONDS)] = says(
        "seconds that meeting, and each tensor later, may take", JOIN_SECONDS
    )

    HARMLESS = frozenset(("packed",))


class GroupBody(Meeting):
    """SGLang's."""

    group_name: Name = says("of the group", GROUP)
    backend: Annotated[str, kinds.choice_of("", "nccl", "gloo")] = says(
        "nccl or gloo; left out: what suits the device", ""
    )


class LeaveBody(Body):
    """Which one."""

    group_name: Name = says("of the group", GROUP)


class InitBody(Body):
    """vLLM's."""

    init_info: Object = needs("`master_address`, `master_port`, `rank_offset`, `world_size`")


class TensorsBody(Body):
    """SGLang's: what the trainer is about to send, in this order."""

    names: Names = needs("as the checkpoint has them")
    dtypes: Names = needs("`bfloat16`, …")
    shapes: Annotated[Any, SHAPES] = needs("lists of sizes")
    group_name: Name = says("of the group", GROUP)
    weight_version: Version = says("what replies are to call the weights", "")
    abort_all_requests: Flag = says("end them; otherwise they go on with the new weights", False)
    load_format: Annotated[str, kinds.choice_of("", "auto", FLAT)] = says(
        "flattened_bucket: all of them as one tensor of bytes", ""
    )

    HARMLESS = frozenset("flush_cache is_async torch_empty_cache recapture_cuda_graph".split())


class UpdateInfo(Body):
    """vLLM's."""

    names: Names = needs("as the checkpoint has them")
    dtype_names: Names = needs("`bfloat16`, …")
    shapes: Annotated[Any, SHAPES] = needs("lists of sizes")
    packed: Flag = says("several tensors travel as one, of bytes", False)
    packed_buffer_size_bytes: Annotated[int, kinds.integer(1, MAX_CHUNK)] = says(
        "of those, until they are more", DEFAULT_CHUNK
    )

    HARMLESS = frozenset(("packed_num_buffers",))


class FinishBody(Body):
    """vLLM's."""

    weight_version: Version = says("what replies are to call the weights", "")


@router.post("/init_weights_update_group", openapi_extra=takes(GroupBody))
async def init_weights_update_group(request: Request, state: Trusted) -> Response:
    """Returns once all members have met. Send it while the trainer makes its side of the group."""
    body = await state.read_control(request, GroupBody)
    await _join(state, body, body.group_name, body.backend)
    return json_response({"success": True, "message": f"group {body.group_name} has met"})


@router.post("/init_weight_transfer_engine", openapi_extra=takes(InitBody))
async def init_weight_transfer_engine(request: Request, state: Trusted) -> Response:
    """As /init_weights_update_group, with vLLM's fields."""
    body = await state.read_control(request, InitBody)
    await _join(state, read(Meeting, body.init_info, "init_info"), GROUP, "")
    return json_response({"message": "Weight transfer initialized"})


@router.post("/destroy_weights_update_group", openapi_extra=takes(LeaveBody))
async def destroy_weights_update_group(request: Request, state: Trusted) -> Response:
    """Leaves a group."""
    name = (await state.read_control(request, LeaveBody)).group_name
    await answered(state.manager.ask(AskRanks(task=LeaveGroup(name)), RANK_SECONDS))
    return json_response({"success": True, "message": f"group {name} was left"})


@router.post("/update_weights_from_distributed", openapi_extra=takes(TensorsBody))
async def update_weights_from_distributed(request: Request, state: Trusted) -> Response:
    """Send it while the trainer broadcasts. Names, shapes and dtypes are checked first. During a
    pause the weights change when it ends, with all that has come until then."""
    body = await state.bodies.read(request, lambda values: read(TensorsBody, values))
    tensors = listed(body.names, body.dtypes, body.shapes, "dtypes")
    if body.abort_all_requests:
        await state.manager.abort(None, "aborted: the weights are updated")
    chunk = MAX_CHUNK if body.load_format == FLAT else 0
    done = await take(state, tensors, body.group_name, chunk, body.weight_version)
    return json_response({"success": True, "message": done})


@router.post("/start_weight_update")
@router.post("/start_draft_weight_update")
async def start_weight_update(request: Request, state: Trusted) -> Response:
    """vLLM's: what /update_weights brings from a group until /finish_weight_update is one update,
    of the model or of its drafter. What was begun and not finished before is dropped."""
    is_drafter = request.url.path == "/start_draft_weight_update"
    if state.incoming.problem or is_drafter in state.incoming.folders:
        state.incoming.fail("it was started again")
        state.incoming = Incoming()
    state.incoming.begun, state.incoming.is_drafter = True, is_drafter
    return json_response({"message": "Weight update started"})


@router.post("/finish_weight_update", openapi_extra=takes(FinishBody))
async def finish_weight_update(request: Request, state: Trusted) -> Response:
    """The weights change, if a group has sent any."""
    body = await state.read_control(request, FinishBody)
    incoming = state.incoming
    incoming.version = body.weight_version or incoming.version
    await finish(state)
    incoming.check()
    return json_response({"message": "Weight update finished", **version(state)})


def version(state: ServerState) -> dict[str, str]:
    return {"weight_version": state.manager.weight_version}


def listed(names: list[str], dtypes: list[str], shapes: Any, called: str) -> list[TensorInfo]:
    """Raises: RequestError 400"""
    if not len(names) == len(dtypes) == len(shapes):
        counts = f"{len(names)}, {len(dtypes)} and {len(shapes)} entries"
        raise RequestError(f"names, {called} and shapes have {counts}: send one of each")
    if not names or any(size < 0 for shape in shapes for size in shape):
        raise RequestError("names and shapes: send at least one tensor, of sizes from 0 on")
    kinds = (dtype.removeprefix("torch.") for dtype in dtypes)
    return [TensorInfo(*each) for each in zip(names, kinds, shapes)]


async def take(
    state: ServerState, tensors: list[TensorInfo], group: str, chunk: int, version: str
) -> str:
    """Receive a part of an update, or a whole one; what has become of it.

    Raises: RequestError; then nothing of the whole update is used.
    """
    waits = state.incoming.begun or state.paused
    incoming = state.incoming if waits else Incoming()
    incoming.check()
    incoming.version = version or incoming.version
    task = TakeTensors(
        group=group,
        folder=incoming.folder(),
        tensors=tensors,
        is_drafter=incoming.is_drafter,
        chunk_bytes=chunk,
    )
    incoming.receiving += 1
    try:
        await _together(state, task, RANK_SECONDS)
        incoming.check()  # meanwhile another part may have been refused
    except RequestError as error:
        incoming.fail(str(error))
        raise
    finally:
        incoming.receiving -= 1
    if waits:
        return f"{len(tensors)} tensors are here; the weights change when all are"
    await _use(state, incoming)
    return f"weights are version {state.manager.weight_version}"


async def finish(state: ServerState) -> None:
    """The weights change to what was received, if anything was.

    Raises: RequestError; the weights are the old ones, and what was received is gone.
    """
    if state.incoming.receiving:
        raise RequestError("tensors are still being received: wait for the answers to those calls")
    incoming, state.incoming = state.incoming, Incoming()
    if incoming.folders and not incoming.problem:
        await _use(state, incoming)


async def _use(state: ServerState, incoming: Incoming) -> None:
    """Raises: RequestError"""
    try:
        await change_weights(state, incoming.weights())
    except RequestError as error:
        if error.status == 400:  # the runner may not have seen it
            incoming.fail(str(error))
        raise


async def change_weights(state: ServerState, weights: Weights) -> None:
    """Raises: RequestError"""
    await answered(state.manager.ask(ChangeModel(weights=weights), CHANGE_SECONDS))
    state.manager.weight_version = weights.version or state.manager.weight_version


async def _join(state: ServerState, meeting: Meeting, name: str, backend: str) -> None:
    on_gpu = str(state.manager.engine.details.get("device", "")).startswith("cuda")
    if not meeting.master_address:
        raise RequestError.about("master_address", "", "must be the host of the trainer's store")
    if meeting.rank_offset + state.config.num_ranks > meeting.world_size:
        after = f"must be {state.config.num_ranks} below world_size ({meeting.world_size}) at most"
        raise RequestError.about("rank_offset", meeting.rank_offset, after)
    if backend == "nccl" and not on_gpu:
        raise RequestError.about("backend", backend, "this server has no GPU: send gloo")
    task = JoinGroup(
        group=name,
        host=meeting.master_address,
        port=meeting.master_port,
        size=meeting.world_size,
        first_rank=meeting.rank_offset,
        backend=backend or ("nccl" if on_gpu else "gloo"),
        seconds=meeting.timeout,
    )
    await _together(state, task, meeting.timeout + ANSWER_SECONDS)


async def _together(state: ServerState, task: JoinGroup | TakeTensors, seconds: float) -> None:
    """Ranks that fail leave the group. If only some did, the others leave too, so that all can join
    again. Raises: RequestError"""
    replies = await heard(state.manager.ask(AskRanks(task=task), seconds))
    problems = [each.problem for each in replies if each.problem]
    if 0 < len(problems) < len(replies):
        await heard(state.manager.ask(AskRanks(task=LeaveGroup(task.group)), RANK_SECONDS))
    if problems:
        raise RequestError(problems[0])
