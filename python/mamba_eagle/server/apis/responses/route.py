"""POST /v1/responses: OpenAI's Responses from the same engine, without anything kept."""

from __future__ import annotations

import time

from fastapi import APIRouter, Request, Response

from mamba_eagle.server.apis.openai.parts import serve_parts
from mamba_eagle.server.apis.responses.body import parse_response
from mamba_eagle.server.apis.responses.reply import ResponsesReply
from mamba_eagle.server.state import server_state

router = APIRouter()


@router.post("/v1/responses")
async def responses(request: Request) -> Response:
    state = server_state(request)
    response = await state.read(request, parse_response, is_chat=True)
    job = response.chat.job
    reply = ResponsesReply(job.rid, job.model, int(time.time()), response.echo)
    return await serve_parts(request, state, response.chat, reply)
