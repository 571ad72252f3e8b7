"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's replies from the same engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from mamba_eagle.chat.family import CALLS, REASONING
from mamba_eagle.server.apis.anthropic.body import MessagesBody, count_tokens, parse_message
from mamba_eagle.server.apis.openai import parts
from mamba_eagle.server.bodies.kinds import takes
from mamba_eagle.server.errors import RequestError, json_response
from mamba_eagle.server.state import State

ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
    504: "timeout_error",
}


class AnthropicError(RequestError):
    """``{"type": "error", "error": {type, message}}``"""

    @classmethod
    def like(cls, error: RequestError) -> AnthropicError:
        return cls(error.message, error.status, error.param, error.retry_after)

    def body(self) -> dict[str, Any]:
        other = "invalid_request_error" if self.status < 500 else "api_error"
        kind = ERROR_TYPES.get(self.status, other)
        return {"type": "error", "error": {"type": kind, "message": self.message}}


class AnthropicReply(parts.PartReply):
    """id, model: those of the reply."""

    def __init__(self, id: str, model: str) -> None:
        self.id = id
        self.model = model

    def whole(self, written: parts.Written) -> dict[str, Any]:
        blocks = [_block(part, part.text) for part in written.parts]
        return {**self._message(blocks), **_stop(written), "usage": _usage(written)}

    def begin(self, written: parts.Written) -> Iterator[parts.Event]:
        usage = {**_usage(written), "output_tokens": 0}
        stop = {"stop_reason": None, "stop_sequence": None}
        yield {"type": "message_start", "message": {**self._message([]), **stop, "usage": usage}}

    def tell(self, news: parts.News) -> Iterator[parts.Event]:
        part = news.part
        if news.what == parts.OPENED:
            block = _block(part, "")
            yield {"type": "content_block_start", "index": part.index, "content_block": block}
        elif news.what == parts.CLOSED:
            yield {"type": "content_block_stop", "index": part.index}
        else:
            delta = _delta(part, news.text)
            yield {"type": "content_block_delta", "index": part.index, "delta": delta}

    def end(self, written: parts.Written) -> Iterator[parts.Event]:
        yield {"type": "message_delta", "delta": _stop(written), "usage": _usage(written)}
        yield {"type": "message_stop"}

    def refusal(self, error: RequestError) -> RequestError:
        return AnthropicError.like(error)

    def failed(self, error: RequestError) -> parts.Event:
        return AnthropicError.like(error).body()

    def _message(self, blocks: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": blocks,
        }


def _block(part: parts.Part, text: str) -> dict[str, Any]:
    """text: what it begins with."""
    if part.field == CALLS:
        arguments = msgspec.Raw(text.encode() or b"{}")
        return {"type": "tool_use", "id": f"toolu_{part.id}", "name": part.name, "input": arguments}
    if part.field == REASONING:
        # It has no signature, and is taken back without one.
        return {"type": "thinking", "thinking": text, "signature": ""}
    return {"type": "text", "text": text}


def _delta(part: parts.Part, text: str) -> dict[str, Any]:
    if part.field == CALLS:
        return {"type": "input_json_delta", "partial_json": text}
    if part.field == REASONING:
        return {"type": "thinking_delta", "thinking": text}
    return {"type": "text_delta", "text": text}


def _stop(written: parts.Written) -> dict[str, Any]:
    finish = written.sample.finish
    assert finish is not None
    matched = finish.matched if isinstance(finish.matched, str) else None
    if finish.kind == "length":
        reason = "max_tokens"
    elif matched is not None:
        reason = "stop_sequence"
    else:
        called = any(part.field == CALLS and not part.cut for part in written.parts)
        reason = "tool_use" if called else "end_turn"
    return {"stop_reason": reason, "stop_sequence": matched}


def _usage(written: parts.Written) -> dict[str, Any]:
    """Anthropic counts what came from the cache apart from the rest of the input."""
    sample, cached = written.sample, written.sample.last.cached_tokens
    return {
        "input_tokens": len(sample.prompt.token_ids) - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": len(sample.output_ids),
    }


router = APIRouter()


@router.post("/v1/messages", openapi_extra=takes(MessagesBody))
async def messages(request: Request, state: State) -> Response:
    with _anthropic_errors():
        job = await state.read(request, parse_message, is_chat=True)
        return await parts.serve_parts(request, state, job, AnthropicReply(job.rid, job.model))


@router.post("/v1/messages/count_tokens", openapi_extra=takes(MessagesBody))
async def count(request: Request, state: State) -> Response:
    with _anthropic_errors():
        tokens = await state.read(request, count_tokens, is_chat=True)
    return json_response({"input_tokens": tokens})


@contextmanager
def _anthropic_errors() -> Iterator[None]:
    try:
        yield
    except RequestError as error:
        raise AnthropicError.like(error) from None
