"""POST /generate: the samples run, and the replies."""

from collections.abc import AsyncGenerator

from fastapi import APIRouter, Request, Response

from mamba_eagle.server.apis.generate.body import GenerateBody, GenerateJob, parse_generate
from mamba_eagle.server.apis.generate.reply import PieceReply, Reply
from mamba_eagle.server.apis.sse import (
    DONE,
    EventStream,
    event,
    json_parts,
    sample_error,
    updates,
    wait_for_success,
)
from mamba_eagle.server.bodies.kinds import takes
from mamba_eagle.server.errors import json_response
from mamba_eagle.server.state import ServerState, server_state
from mamba_eagle.tokenizer.sample import LiveRequest, Sample

router = APIRouter()


@router.api_route("/generate", methods=["POST", "PUT"], openapi_extra=takes(GenerateBody))
async def generate(request: Request) -> Response:
    state = server_state(request)
    job = await state.read(request, parse_generate)
    live = state.submit(job.rid, job.prompts)
    tokenizer = state.manager.tokenizer
    pieces = job.body.incremental
    pieces = state.config.incremental_streaming_output if pieces is None else pieces
    kind = PieceReply if job.body.stream and pieces else Reply
    replies = [kind(sample, tokenizer, job.body.return_text_in_logprobs) for sample in live.samples]
    if job.body.stream:
        events = stream_replies(state, job, live, replies)
        keep_alive = state.config.sse_keep_alive
        return EventStream(events, lambda: state.manager.release(live), keep_alive)

    def take(sample: Sample) -> None:
        replies[sample.index].take()

    await wait_for_success(request, state.manager, live, take, sample_error)
    parts = await json_parts([reply.as_dict for reply in replies])
    return json_response(parts if job.as_list else parts[0])


async def stream_replies(
    state: ServerState, job: GenerateJob, live: LiveRequest, replies: list[Reply]
) -> AsyncGenerator[bytes, None]:
    """Replies as they stand, or pieces of them; of several samples each names its ``index``."""
    interval = state.config.stream_interval
    begun = False
    async for sample in updates(live, lambda sample: replies[sample.index].spacing(interval)):
        error = sample_error(sample)
        if error is not None and not begun:
            raise error
        begun = True
        body = error.body() if error is not None else replies[sample.index].as_dict()
        if job.as_list:
            body["index"] = sample.index
        yield event(body)
    yield DONE
