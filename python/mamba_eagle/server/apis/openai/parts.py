"""A chat's one sample as a row of parts: reasoning, text, calls, in the order they were written.

Anthropic's and the Responses replies are such rows. A whole reply is made of the same news as a
stream, so it says what the stream said.
"""

import asyncio
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import msgspec
from fastapi import Request, Response

from mamba_eagle.chat.family import CALLS, REASONING
from mamba_eagle.chat.live_calls import ArgumentsPiece
from mamba_eagle.chat.parse import TextPiece
from mamba_eagle.server.apis.openai.body import OpenAIJob
from mamba_eagle.server.apis.sse import EventStream, choice_error, updates, wait_for_success
from mamba_eagle.server.errors import RequestError, json_response
from mamba_eagle.server.state import ServerState

OPENED, MORE, CLOSED = "opened", "more", "closed"
Event = dict[str, Any]


@dataclass
class Part:
    """``field``: content, reasoning_content or tool_calls. ``text``: of a call its arguments, an
    object as JSON; ``name``: the called function. ``cut``: the end of the output cut it off."""

    index: int
    field: str
    id: str
    text: str = ""
    name: str = ""
    cut: bool = False


class News(NamedTuple):
    what: str  # OPENED, MORE or CLOSED
    part: Part
    text: str = ""  # MORE


class Written:
    """What there is of a reply: of a job's one sample, up to where ``news`` has read it."""

    def __init__(self, job: OpenAIJob) -> None:
        self.sample = job.samples[0]
        self.parts: list[Part] = []
        self.reasoning_tokens = 0  # for replies that count them
        self._parser = job.make_parser()
        self._open: Part | None = None

    def news(self) -> Iterator[News]:
        """What is new since the last call."""
        finish = self.sample.finish
        for piece in self._parser.read(self.sample.new_text(), finish is not None):
            if isinstance(piece, TextPiece):
                if self._open is None or self._open.field != piece.field:
                    yield from self._close()
                    yield self._begin(piece.field)
                yield self._add(piece.text)
            elif isinstance(piece, ArgumentsPiece):
                yield from self._add_arguments(piece.text, piece.is_last)
            else:
                yield from self._close()
                yield self._begin(CALLS, piece.name)
                yield from self._add_arguments(piece.arguments, piece.is_whole)
        if finish is not None:
            if self._open is not None:
                self._open.cut |= finish.kind == "length"
            yield from self._close()

    def _begin(self, field: str, name: str = "") -> News:
        is_call = field == CALLS  # which is cut until its end has come
        self._open = Part(len(self.parts), field, uuid.uuid4().hex[:24], name=name, cut=is_call)
        self.parts.append(self._open)
        return News(OPENED, self._open)

    def _add_arguments(self, text: str, is_last: bool) -> Iterator[News]:
        if text:
            yield self._add(text)
        if is_last:
            assert self._open is not None
            self._open.cut = False
            yield from self._close()

    def _add(self, text: str) -> News:
        assert self._open is not None
        self._open.text += text
        return News(MORE, self._open, text)

    def _close(self) -> Iterator[News]:
        if self._open is not None:
            part, self._open = self._open, None
            yield News(CLOSED, part)


class PartReply(ABC):
    """The replies of one API. Events have their name as ``type``."""

    counts_reasoning: ClassVar[bool] = False

    @abstractmethod
    def whole(self, written: Written) -> dict[str, Any]:
        """The reply that is not streamed."""

    @abstractmethod
    def begin(self, written: Written) -> Iterator[Event]:
        """Before the first part."""

    @abstractmethod
    def tell(self, news: News) -> Iterator[Event]:
        """What is new of a part."""

    @abstractmethod
    def end(self, written: Written) -> Iterator[Event]:
        """After the last part."""

    def refusal(self, error: RequestError) -> RequestError:
        """An error before anything was sent, in the API's form."""
        return error

    @abstractmethod
    def failed(self, error: RequestError) -> Event:
        """An error that comes when the stream has begun, and ends it."""


def named_event(content: Event) -> bytes:
    """As these APIs send events: with the type also as the event's name."""
    return f"event: {content['type']}\ndata: ".encode() + msgspec.json.encode(content) + b"\n\n"


async def serve_parts(
    request: Request, state: ServerState, job: OpenAIJob, reply: PartReply
) -> Response:
    """Raises: RequestError"""
    state.submit(job)
    written = Written(job)
    if job.body.stream:
        events = _stream(state, written, reply)
        return EventStream(state, job, events, lambda error: named_event(reply.failed(error)))
    await wait_for_success(request, state, job)
    for _ in written.news():
        pass
    await _count(state, written, reply)
    return json_response(reply.whole(written))


async def _stream(
    state: ServerState, written: Written, reply: PartReply
) -> AsyncGenerator[bytes, None]:
    begun = False
    interval = state.config.stream_interval
    async for sample in updates(written.sample.request, lambda sample: interval):
        if (error := choice_error(sample)) is not None:
            raise reply.refusal(error)
        if not begun:
            begun = True
            for event in reply.begin(written):
                yield named_event(event)
        for news in written.news():
            for event in reply.tell(news):
                yield named_event(event)
    await _count(state, written, reply)
    for event in reply.end(written):
        yield named_event(event)


async def _count(state: ServerState, written: Written, reply: PartReply) -> None:
    """Counts tokens of reasoning, without tags. In a thread, since it may be long."""
    text = "".join(part.text for part in written.parts if part.field == REASONING)
    if text and reply.counts_reasoning and (tokenizer := state.prompts.tokenizer) is not None:
        tokens = await asyncio.to_thread(tokenizer.encode, text, False)
        written.reasoning_tokens = min(len(tokens), len(written.sample.output_ids))
