"""Waiting for a request's outputs, and their JSON: as server-sent events, or all at once."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mamba_eagle.server.bodies.reception import unless_gone, wait_for_disconnect
from mamba_eagle.server.errors import RequestError, failure_status
from mamba_eagle.server.state import ServerState
from mamba_eagle.tokenizer.sample import LiveRequest, Sample

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"  # a comment, which every client skips
BATCHED_TOKENS = 16  # after which a plain reply takes logprobs over
TURN_SECONDS = 0.005  # of the event loop, for the outputs of one request
_encode = msgspec.json.Encoder().encode
T = TypeVar("T")


def event(content: Any) -> bytes:
    return b"data: " + _encode(content) + b"\n\n"


def sample_error(sample: Sample) -> RequestError | None:
    """The error that a sample's end is for its client, if it is one."""
    error = sample.error
    return RequestError(error.message, failure_status(error)) if error is not None else None


def choice_error(sample: Sample) -> RequestError | None:
    """A sample that was aborted is an error, too: OpenAI's finish reasons have none for it, and
    strict clients refuse others. To say "stop" would pass a cut text off as a whole one."""
    error = sample_error(sample)
    if error is None and sample.finish is not None and sample.finish.kind == "abort":
        error = RequestError(f"the request was ended: {sample.finish.message}")
    return error


async def updates(live: LiveRequest, spacing: Callable[[Sample], int]) -> AsyncIterator[Sample]:
    """Samples with news: ``spacing`` tokens or their end; each sample's end comes exactly once.

    News that pile up while a client reads slowly become one.
    """
    running = len(live.samples)
    while running:
        await live.changed.wait()
        live.changed.clear()
        turn = Turn()
        while live.news:
            await turn.give_up_if_long()
            # The consumer reads the sample before anything else can happen to it.
            sample = live.news.pop(next(iter(live.news)))
            new = len(sample.output_ids) - sample.told
            if sample.finish is not None:
                running -= 1
            elif new < (spacing(sample) if sample.told else 1):
                continue
            sample.told += new
            yield sample


class Turn:
    """A turn of the event loop, which ends after some milliseconds for the sake of others."""

    def __init__(self) -> None:
        self._until = time.monotonic() + TURN_SECONDS

    async def give_up_if_long(self) -> None:
        if time.monotonic() > self._until:
            await asyncio.sleep(0)
            self._until = time.monotonic() + TURN_SECONDS


async def wait_for_success(
    request: Request,
    state: ServerState,
    live: LiveRequest,
    take: Callable[[Sample], None] | None = None,
    error_of: Callable[[Sample], RequestError | None] = choice_error,
) -> None:
    """Returns at the end of the request.

    take: called now and then for a sample that has new logprobs or hidden states, and at
        its end.
    Raises: RequestError, that of the first sample that has one; 499 if the client left, and then
        the request is aborted.
    """
    prompts = (sample.prompt for sample in live.samples)
    much = any(prompt.return_logprob or prompt.return_hidden_states for prompt in prompts)
    try:
        work = _take_all(live, take) if take and much else live.done.wait()
        if await unless_gone(request, work) is None:
            raise RequestError("the client has left", 499)
    finally:
        state.manager.release(live)
    for error in filter(None, map(error_of, live.samples)):
        raise error


async def _take_all(live: LiveRequest, take: Callable[[Sample], None]) -> bool:
    async for sample in updates(live, lambda sample: BATCHED_TOKENS):
        take(sample)
    return True


class JsonList:
    """A JSON array that grows: each item is encoded once, however often the array is sent. It keeps
    its text alone, which takes a tenth of the memory of the items."""

    def __init__(self) -> None:
        self._text = bytearray()
        self.num_items = 0

    def extend(self, items: Sequence[Any]) -> None:
        if not items:
            return
        if self._text:
            self._text += b","
        self._text += _encode(items)[1:-1]
        self.num_items += len(items)

    def raw(self) -> msgspec.Raw:
        """The array, to be put into what is encoded."""
        return msgspec.Raw(b"".join((b"[", self._text, b"]")))


async def json_parts(parts: list[Callable[[], Any]]) -> list[msgspec.Raw]:
    """What each function gives, as JSON; the event loop serves others between some of them."""
    made, turn = [], Turn()
    for part in parts:
        await turn.give_up_if_long()
        made.append(msgspec.Raw(_encode(part())))
    return made


class EventStream(Response):
    """Streams ``events`` of a request, each a chunk of bytes, until they end or the client leaves,
    and releases the request in any case.

    The status line waits for the first event, so that what is refused at once gets a plain error
    reply, but no longer than ``--sse-keep-alive`` seconds: from then on silence is broken by a
    comment that often, because proxies and clients give up on a connection that says nothing. 0:
    never. ``error_event``: an error that comes after the status line.
    """

    def __init__(
        self,
        state: ServerState,
        live: LiveRequest,
        events: AsyncGenerator[bytes, None],
        error_event: Callable[[RequestError], bytes] = lambda error: event(error.body()),
    ) -> None:
        super().__init__(media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        # The length of a stream is not known.
        self.raw_headers = [pair for pair in self.raw_headers if pair[0] != b"content-length"]
        self.events = events
        self.close = partial(state.manager.release, live)
        self.keep_alive = state.config.sse_keep_alive
        self.error_event = error_event
        self._started = False
        self._sending = False
        self._last_sent = 0.0  # by the clock of the event loop

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._last_sent = asyncio.get_running_loop().time()
        writer = asyncio.ensure_future(self._write(scope, receive, send))
        gone = asyncio.ensure_future(wait_for_disconnect(receive))
        tasks = [writer, gone]
        if self.keep_alive > 0:
            tasks.append(asyncio.ensure_future(self._break_silence(send)))
        try:
            await asyncio.wait({writer, gone}, return_when=asyncio.FIRST_COMPLETED)
            if writer.done():
                writer.result()
        finally:
            self.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.events.aclose()

    async def _write(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async for chunk in self.events:
                await self._send(send, chunk)
        except RequestError as error:
            if not self._started:
                self._started = self._sending = True
                await error.response()(scope, receive, send)
                return
            await self._send(send, self.error_event(error))
        self._sending = True  # nothing may follow the end
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, chunk: bytes) -> None:
        self._sending = True
        if not self._started:
            self._started = True
            await send(
                {
                    "type": "http.response.start",
                    "status": self.status_code,
                    "headers": self.raw_headers,
                }
            )
        await send({"type": "http.response.body", "body": chunk, "more_body": True})
        self._sending = False
        self._last_sent = asyncio.get_running_loop().time()

    async def _break_silence(self, send: Send) -> None:
        loop = asyncio.get_running_loop()
        while True:
            silent = loop.time() - self._last_sent
            if silent < self.keep_alive:
                await asyncio.sleep(self.keep_alive - silent)
            elif self._sending:  # the client does not read, which --write-timeout is for
                await asyncio.sleep(self.keep_alive)
            else:
                await self._send(send, KEEP_ALIVE)
