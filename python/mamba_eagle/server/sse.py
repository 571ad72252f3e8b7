"""Waiting for a request's outputs, streamed as server-sent events or all at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mamba_eagle.server.errors import RequestError
from mamba_eagle.tokenizer.manager import TokenizerManager
from mamba_eagle.tokenizer.sample import LiveRequest, Sample

DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode


def event(content: Any) -> bytes:
    return b"data: " + _encode(content) + b"\n\n"


def sample_error(sample: Sample) -> RequestError | None:
    """The error that a sample's end is for its client, if it is one."""
    error = sample.error
    return RequestError(error.message, error.status_code) if error is not None else None


async def updates(live: LiveRequest, interval: int) -> AsyncIterator[Sample]:
    """Samples with news: ``interval`` tokens or their end; each sample's end comes exactly once.

    News that pile up while a client reads slowly become one.
    """
    running = list(live.samples)
    while running:
        await live.changed.wait()
        live.changed.clear()
        ended = set()
        for sample in running:
            # Whoever consumes this reads the sample before anything else can happen to it.
            new = len(sample.output_ids) - sample.told
            if sample.finish is not None:
                ended.add(sample.index)
            elif new < (interval if sample.told else 1):
                continue
            sample.told += new
            yield sample
        running = [sample for sample in running if sample.index not in ended]


async def wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def wait_until_done(request: Request, manager: TokenizerManager, live: LiveRequest) -> bool:
    """Whether the request ran to its end; False: the client left and the request was aborted."""
    done = asyncio.ensure_future(live.done.wait())
    gone = asyncio.ensure_future(wait_for_disconnect(request.receive))
    try:
        await asyncio.wait({done, gone}, return_when=asyncio.FIRST_COMPLETED)
        return done.done()
    finally:
        manager.release(live)
        done.cancel()
        gone.cancel()


class EventStream(Response):
    """Streams ``events``, each a chunk of bytes, until they end or the client leaves.

    ``close`` is called in any case, and releases the request. The status line waits for the
    first event: what is refused at once gets a plain error reply.
    """

    def __init__(self, events: AsyncGenerator[bytes, None], close: Callable[[], None]) -> None:
        super().__init__(media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        # The length of a stream is not known.
        self.raw_headers = [pair for pair in self.raw_headers if pair[0] != b"content-length"]
        self.events = events
        self.close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer = asyncio.ensure_future(self._write(scope, receive, send))
        gone = asyncio.ensure_future(wait_for_disconnect(receive))
        try:
            await asyncio.wait({writer, gone}, return_when=asyncio.FIRST_COMPLETED)
            if writer.done():
                writer.result()
        finally:
            self.close()
            for task in (writer, gone):
                task.cancel()
            await asyncio.gather(writer, gone, return_exceptions=True)
            await self.events.aclose()

    async def _write(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False
        try:
            async for chunk in self.events:
                if not started:
                    started = True
                    await send(
                        {
                            "type": "http.response.start",
                            "status": self.status_code,
                            "headers": self.raw_headers,
                        }
                    )
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        except RequestError as error:
            if not started:
                await error.response()(scope, receive, send)
                return
            await send(
                {"type": "http.response.body", "body": event(error.body()), "more_body": True}
            )
        await send({"type": "http.response.body", "body": b"", "more_body": False})
