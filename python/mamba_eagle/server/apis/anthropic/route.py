"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's replies from the same engine."""

from collections.abc import Iterator
from contextlib import contextmanager

from fastapi import APIRouter, Request, Response

from mamba_eagle.server.apis.anthropic.body import MessagesBody, count_tokens, parse_message
from mamba_eagle.server.apis.anthropic.reply import AnthropicError, AnthropicReply
from mamba_eagle.server.apis.openai.parts import serve_parts
from mamba_eagle.server.bodies.model import takes
from mamba_eagle.server.errors import RequestError, json_response
from mamba_eagle.server.state import server_state

router = APIRouter()


@router.post("/v1/messages", openapi_extra=takes(MessagesBody))
async def messages(request: Request) -> Response:
    state = server_state(request)
    with _anthropic_errors():
        chat = await state.read(request, parse_message, is_chat=True)
        reply = AnthropicReply(chat.job.rid, chat.job.model)
        return await serve_parts(request, state, chat, reply)


@router.post("/v1/messages/count_tokens", openapi_extra=takes(MessagesBody))
async def count(request: Request) -> Response:
    with _anthropic_errors():
        tokens = await server_state(request).read(request, count_tokens, is_chat=True)
    return json_response({"input_tokens": tokens})


@contextmanager
def _anthropic_errors() -> Iterator[None]:
    try:
        yield
    except RequestError as error:
        raise AnthropicError.like(error) from None
