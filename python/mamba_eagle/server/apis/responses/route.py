"""OpenAI's Responses from the same engine: made, continued, fetched and deleted."""

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from mamba_eagle.chat.family import CALLS, CONTENT, REASONING
from mamba_eagle.server.apis.openai import parts
from mamba_eagle.server.apis.responses.body import ResponseBody, parse_response
from mamba_eagle.server.apis.responses.kept import KeptResponse, ResponseStore
from mamba_eagle.server.bodies.kinds import takes
from mamba_eagle.server.errors import RequestError, json_response
from mamba_eagle.server.http.auth import key_of
from mamba_eagle.server.state import State

PREFIXES = {CALLS: "fc", REASONING: "rs", CONTENT: "msg"}


class ResponsesReply(parts.PartReply):
    """id, model: those of the reply; echo: what it repeats of the request; keep: called with the
    whole reply as JSON, once, before its client can ask for it."""

    counts_reasoning = True

    def __init__(
        self, id: str, model: str, created: int, echo: dict[str, Any], keep: Callable[[bytes], None]
    ) -> None:
        self._keep = keep
        self._head = {
            "id": id,
            "object": "response",
            "created_at": created,
            "model": model,
            **echo,
            "background": False,
            "truncation": "disabled",
        }
        self._sent = 0  # events

    def whole(self, written: parts.Written) -> dict[str, Any]:
        finish = written.sample.finish
        is_cut = finish is not None and finish.kind == "length"
        whole = self._response(
            "incomplete" if is_cut else "completed",
            [_item(part) for part in written.parts],
            usage=_usage(written),
            incomplete_details={"reason": "max_output_tokens"} if is_cut else None,
        )
        self._keep(msgspec.json.encode(whole))
        return whole

    def begin(self, written: parts.Written) -> Iterator[parts.Event]:
        for name in ("created", "in_progress"):
            yield self._event(f"response.{name}", response=self._response("in_progress", []))

    def tell(self, news: parts.News) -> Iterator[parts.Event]:
        part = news.part
        if news.what == parts.OPENED:
            name, nothing = ("arguments", "") if part.field == CALLS else ("content", [])
            item = {**_item(part), "status": "in_progress", name: nothing}
            yield self._event("response.output_item.added", output_index=part.index, item=item)
            if part.field != CALLS:
                yield self._about(part, "response.content_part.added", part=_content(part, ""))
        elif news.what == parts.CLOSED:
            yield from self._close(part)
        else:
            more = _logprobs(part)
            yield self._about(part, f"response.{_stem(part)}.delta", delta=news.text, **more)

    def end(self, written: parts.Written) -> Iterator[parts.Event]:
        response = self.whole(written)
        yield self._event(f"response.{response['status']}", response=response)

    def failed(self, error: RequestError) -> parts.Event:
        failure = {"code": "server_error", "message": error.message}
        return self._event("response.failed", response=self._response("failed", [], error=failure))

    def _close(self, part: parts.Part) -> Iterator[parts.Event]:
        done = f"response.{_stem(part)}.done"
        if part.field == CALLS:
            yield self._about(part, done, name=part.name, arguments=part.text)
        else:
            more = _logprobs(part)
            yield self._about(part, done, text=part.text, **more)
            content = _content(part, part.text)
            yield self._about(part, "response.content_part.done", part=content)
        yield self._event("response.output_item.done", output_index=part.index, item=_item(part))

    def _response(self, status: str, output: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        rest = {"error": None, "incomplete_details": None, "usage": None, **more}
        return {**self._head, "status": status, "output": output, **rest}

    def _event(self, kind: str, /, **content: Any) -> parts.Event:
        number = self._sent
        self._sent += 1
        return {"type": kind, "sequence_number": number, **content}

    def _about(self, of: parts.Part, kind: str, /, **content: Any) -> parts.Event:
        place: dict[str, Any] = {"item_id": _id(of), "output_index": of.index}
        if of.field != CALLS:
            place["content_index"] = 0
        return self._event(kind, **place, **content)


def _stem(part: parts.Part) -> str:
    """What the events of its text are called."""
    if part.field == CALLS:
        return "function_call_arguments"
    return "reasoning_text" if part.field == REASONING else "output_text"


def _logprobs(part: parts.Part) -> dict[str, Any]:
    return {"logprobs": []} if part.field == CONTENT else {}


def _id(part: parts.Part) -> str:
    return f"{PREFIXES[part.field]}_{part.id}"


def _content(part: parts.Part, text: str) -> dict[str, Any]:
    if part.field == REASONING:
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _item(part: parts.Part) -> dict[str, Any]:
    item: dict[str, Any] = {"id": _id(part), "status": "incomplete" if part.cut else "completed"}
    if part.field == CALLS:
        called = {"call_id": f"call_{part.id}", "name": part.name, "arguments": part.text}
        return {**item, "type": "function_call", **called}
    content = [_content(part, part.text)]
    if part.field == REASONING:
        return {**item, "type": "reasoning", "summary": [], "content": content}
    return {**item, "type": "message", "role": "assistant", "content": content}


def _usage(written: parts.Written) -> dict[str, Any]:
    sample, cached = written.sample, written.sample.last.cached_tokens
    given, made = len(sample.prompt.token_ids), len(sample.output_ids)
    return {
        "input_tokens": given,
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": made,
        "output_tokens_details": {"reasoning_tokens": written.reasoning_tokens},
        "total_tokens": given + made,
    }


router = APIRouter()


def _store(request: Request) -> ResponseStore:
    return request.app.state.responses


@router.post("/v1/responses", openapi_extra=takes(ResponseBody))
async def responses(request: Request, state: State) -> Response:
    """A chat as items, which is kept unless ``store`` is false."""
    store, key = _store(request), key_of(request)
    parse = partial(parse_response, shelf=store.of(key))
    response = await state.read(request, parse, is_chat=True)
    job, conversation = response.chat, response.conversation

    def keep(reply: bytes) -> None:
        if conversation is not None:
            store.keep(key, job.rid, KeptResponse(reply, conversation))

    reply = ResponsesReply(job.rid, job.model, int(time.time()), response.echo, keep)
    return await parts.serve_parts(request, state, job, reply)


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
