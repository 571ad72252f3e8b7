"""OpenAI's Responses from the same engine: made, continued, fetched and deleted."""

import time
from functools import partial

from fastapi import APIRouter, Request, Response

from mamba_eagle.server.apis.openai.parts import serve_parts
from mamba_eagle.server.apis.responses.body import ResponseBody, parse_response
from mamba_eagle.server.apis.responses.kept import KeptResponse, ResponseStore
from mamba_eagle.server.apis.responses.reply import ResponsesReply
from mamba_eagle.server.bodies.model import takes
from mamba_eagle.server.errors import RequestError, json_response
from mamba_eagle.server.http.auth import key_of
from mamba_eagle.server.state import server_state

router = APIRouter()


def _store(request: Request) -> ResponseStore:
    store: ResponseStore = request.app.state.responses
    return store


@router.post("/v1/responses", openapi_extra=takes(ResponseBody))
async def responses(request: Request) -> Response:
    """A chat as items, which is kept unless ``store`` is false."""
    state, store, key = server_state(request), _store(request), key_of(request)
    parse = partial(parse_response, shelf=store.of(key))
    response = await state.read(request, parse, is_chat=True)
    job = response.chat.job
    conversation = response.conversation

    def keep(reply: bytes) -> None:
        if conversation is not None:
            store.keep(key, job.rid, KeptResponse(reply, conversation))

    reply = ResponsesReply(job.rid, job.model, int(time.time()), response.echo, keep)
    return await serve_parts(request, state, response.chat, reply)


@router.get("/v1/responses/{id:path}")
async def kept_response(request: Request, id: str) -> Response:
    """A response that was kept, as it was replied."""
    if request.query_params.get("stream", "false").lower() == "true":
        raise RequestError("stream = true: a kept response is sent whole; leave it out")
    return json_response(_store(request).of(key_of(request)).find(id).reply)


@router.delete("/v1/responses/{id:path}")
async def delete_response(request: Request, id: str) -> Response:
    """Those that continue it stay whole."""
    _store(request).of(key_of(request)).remove(id)
    return json_response({"id": id, "object": "response", "deleted": True})
