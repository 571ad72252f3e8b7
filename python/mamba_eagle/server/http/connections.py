"""Connections: how many there may be, and how long a client may keep one waiting.

uvicorn's own protocol over httptools is extended by what asyncio and the parser tell it, and by the
application that it calls.

    accepted ─▶ headers ─▶ application called ─▶ body ─▶ response ─▶ next headers …
       │  header_timeout   │                │  body_timeout │ write_timeout
       └ over the limit: 503               └ 64 KiB each
"""

import asyncio
import contextlib
import logging
import os
import resource
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import httptools
import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from mamba_eagle.limits import MAX_BODY_PIECES, MIN_BODY_PIECE, MIN_READ
from mamba_eagle.logs import Rarely
from mamba_eagle.server.errors import RequestError

MAX_HEAD = 64 * 1024  # bytes
REFUSAL = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\nContent-Length: 0\r\n"
    b"Connection: close\r\n\r\n"
)


def head_size(scope: Scope) -> int:
    """Bytes of a request's head, but for its first line's constant parts."""
    fields = sum(len(name) + len(value) + 4 for name, value in scope["headers"])
    return fields + len(scope["raw_path"]) + len(scope["query_string"])


class BoundedHeads(HttpToolsProtocol):
    """Bounds a head, trailers, and the pieces of a body, of which httptools keeps whatever comes.
    Lets every request know that its client has left: of pipelined ones uvicorn lets the last one
    know. And goes on in HTTP/1.1 where a client offers another protocol, as Java's does with its
    first request: httptools takes the body for that protocol's, and uvicorn drops it."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._got_further = False
        self._without_progress = 0  # bytes
        self._open: list[Any] = []  # uvicorn's cycles: one per request
        self._pieces_left = 0.0  # of the body that is coming in
        self.shredded: Any = None  # the latest cycle whose body came in too many pieces

    def data_received(self, data: bytes) -> None:
        self._got_further = False
        self._unset_keepalive_if_required()
        try:
            self._parse(data)
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")
            return
        self._without_progress = 0 if self._got_further else self._without_progress + len(data)
        if self._without_progress > MAX_HEAD and not self.transport.is_closing():
            if self.cycle is None or self.cycle.response_complete:
                self.transport.write(REFUSAL)
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for cycle in self._open:
            cycle.disconnected = True
            cycle.message_event.set()

    def _parse(self, data: bytes) -> None:
        """Raises: httptools.HttpParserError"""
        rest = memoryview(data)
        while rest:
            try:
                self.parser.feed_data(rest)
                return
            except httptools.HttpParserUpgrade as upgrade:
                rest = rest[upgrade.args[0] :]
            if self.parser.get_method() == b"CONNECT":
                raise httptools.HttpParserError("a server is not a proxy")
            kept = [b"%s: %s\r\n" % one for one in self.headers if one[0] != b"upgrade"]
            version = self.parser.get_http_version().encode()
            line = b"%s %s HTTP/%s\r\n" % (self.parser.get_method(), self.url, version)
            self.parser = httptools.HttpRequestParser(self)
            self.parser.feed_data(b"".join((line, *kept, b"\r\n")))

    # ── what the parser tells ────────────────────────────────────────────────────────────────

    def on_message_begin(self) -> None:
        self._got_further = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._got_further = True
        if self.parser.should_upgrade():
            return  # the head is parsed once more without the offer
        super().on_headers_complete()
        self._open = [*(one for one in self._open if not one.response_complete), self.cycle]
        self._pieces_left = MAX_BODY_PIECES

    def on_body(self, body: bytes) -> None:
        """Of a piece: a chunk of the client's, or what was received at a time."""
        self._got_further = True
        self._pieces_left += len(body) / MIN_BODY_PIECE - 1
        if self._pieces_left >= 0:
            super().on_body(body)
        else:
            self.shredded = self.cycle
            self.cycle.message_event.set()

    def on_message_complete(self) -> None:
        self._got_further = True
        if not self.parser.should_upgrade():
            super().on_message_complete()


LOG_SECONDS = 60.0  # between two lines of a kind that clients can cause

log = logging.getLogger("mamba_eagle.server")
log.addFilter(Rarely("%d connections are open", LOG_SECONDS))

# Seconds in which a connection above the limit must send its headers. Others wait for its place.
SPARE_HEADER_TIMEOUT = 2.0
PROBES = ("/health", "/ready")
# Longer than idle connections live in any common client's pool (Go: 90 s) and in load balancers
# (up to 600 s), so that those close first: a request that is sent while the server closes is lost.
KEEP_ALIVE_SECONDS = 620
BODY_PIECE = 64 * 1024  # bytes of a body that must arrive within the time-out
MIN_PATIENCE = 0.01  # seconds; waiting for 0 would not even take what has arrived
MAX_DISCARDED = 8 * 2**20  # bytes of a refused request's body that are read before the answer


class Limits(NamedTuple):
    connections: int
    spare_connections: int  # beyond those; they are answered 503, except for probes
    header_timeout: float  # seconds, as all of these
    body_timeout: float
    write_timeout: float


# ── how many files and sockets this process may open: each connection is one of them ─────────

# The server process has about 25 open when it is ready; loading takes some more for a while.
MIN_DESCRIPTORS = 64
USED_WHEN_READY = 32  # assumed where they cannot be counted
RESERVE = 8  # for files that are opened while connections are at their limit
MAX_SPARE = 256


def raise_limit(wanted: int) -> int:
    """Raises the limit to ``wanted``, or to this user's maximum; returns the new one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    if soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        with contextlib.suppress(OSError, ValueError):  # a sandbox may forbid it
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def descriptor_problems() -> list[str]:
    """Why the server cannot even start."""
    limit = raise_limit(MIN_DESCRIPTORS)
    if limit >= MIN_DESCRIPTORS:
        return []
    return [
        f"ulimit -n {limit}: the server needs {MIN_DESCRIPTORS} open files or more, and one more "
        "for each connection; raise the limit"
    ]


def room_for_connections(wanted: int) -> tuple[int, int]:
    """How many of ``wanted`` connections fit beside what is open now; and how many more, for
    telling clients that there is no room."""
    try:
        used = len(os.listdir("/proc/self/fd"))
    except OSError:
        used = USED_WHEN_READY
    spare = min(MAX_SPARE, wanted // 4 + 1)
    available = raise_limit(wanted + spare + used + RESERVE) - used - RESERVE
    if available < wanted + spare:
        spare = max(1, min(spare, available // 3))
        wanted = max(1, available - spare)
    return wanted, spare


class Connection(BoundedHeads):
    """One client's connection."""

    def __init__(self, limits: Limits, **keywords: Any) -> None:
        """keywords: uvicorn's."""
        super().__init__(**keywords)
        self.limits = limits
        config: uvicorn.Config = keywords["config"]
        self._application: ASGIApp = config.loaded_app
        self.app = self._serve
        self._is_spare = False
        self._requests = 0  # being served; more than one if the client pipelines
        self._header_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._write_patience = self.limits.write_timeout  # left to take the rest of a piece
        self._untaken = MIN_READ  # bytes of the piece
        self._unsent = 0  # bytes that waited for the client ...
        self._waits_since = 0.0  # ... at this time

    # ── what asyncio tells ───────────────────────────────────────────────────────────────────

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # Anything that the kernel does not take at once counts as waiting for the client. Not 0:
        # asyncio's TLS transport pauses at the limit, and would do so with an empty buffer.
        transport.set_write_buffer_limits(high=1, low=0)
        self._is_spare = len(self.connections) > self.limits.connections
        if self._is_spare:
            log.warning(
                "%d connections are open (--max-connections, or what ulimit -n leaves room for): "
                "further ones are answered 503",
                self.limits.connections,
            )
        self._expect_headers()

    def data_received(self, data: bytes) -> None:
        if not self._requests and self._header_timer is None:
            self._expect_headers()
        super().data_received(data)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
            self._count_what_was_read()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for timer in (self._header_timer, self._write_timer):
            if timer is not None:
                timer.cancel()

    # ── time-outs ────────────────────────────────────────────────────────────────────────────

    def _expect_headers(self) -> None:
        seconds = self.limits.header_timeout
        if self._is_spare:
            seconds = min(seconds, SPARE_HEADER_TIMEOUT)
        self._header_timer = self.loop.call_later(seconds, self._give_up_on_headers)

    def _give_up_on_headers(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            return  # they came while the process stood still: their task has not begun
        if self._is_spare:  # the client may be slow because it has opened thousands
            self.transport.write(_plain_refusal())
        self.transport.close()

    def _expect_reading(self) -> None:
        """A client may read slowly, but not arbitrarily slowly."""
        self._unsent = self.transport.get_write_buffer_size()
        self._waits_since = self.loop.time()
        patience = max(MIN_PATIENCE, self._write_patience)
        self._write_timer = self.loop.call_later(patience, self._check_reading)

    def _count_what_was_read(self) -> None:
        self._untaken -= self._unsent - self.transport.get_write_buffer_size()
        self._write_patience -= self.loop.time() - self._waits_since
        if self._untaken <= 0:
            self._untaken, self._write_patience = MIN_READ, self.limits.write_timeout

    def _check_reading(self) -> None:
        self._count_what_was_read()
        if self._write_patience <= 0:
            self.transport.abort()
        else:
            self._expect_reading()

    # ── around the application ───────────────────────────────────────────────────────────────

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Called when a request's headers are complete."""
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None
        body = _Body(receive, self.limits.body_timeout, self._is_shredded)
        refusal = self._refusal(scope)

        async def send_checked(message: Message) -> None:
            is_last = self._is_spare or refusal is not None or body.is_refused
            if message["type"] == "http.response.start" and is_last:
                message["headers"] = [*message.get("headers", ()), (b"connection", b"close")]
            if scope["http_version"] == "1.0":
                _end_by_closing(send, message)
            await send(message)
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                # The request is open until the kernel has all of the answer: a drain waits for it.
                await self.flow.drain()

        self._requests += 1
        try:
            if refusal is not None:
                await _refuse(refusal, scope, body.receive, send_checked)
            else:
                await self._application(scope, body.receive, send_checked)
        finally:
            self._requests -= 1

    def _is_shredded(self, receive: Receive) -> bool:
        """Whether the body that ``receive`` gives came in too many pieces."""
        return self.shredded is not None and getattr(receive, "__self__", None) is self.shredded

    def _refusal(self, scope: Scope) -> RequestError | None:
        """Why a request does not reach the application, if it does not."""
        if head_size(scope) > MAX_HEAD:
            limit = f"{MAX_HEAD // 1024} KiB"
            return RequestError(f"the headers are longer than {limit}: send shorter ones", 431)
        return _no_room() if self._is_spare and scope["path"] not in PROBES else None


class _Body:
    """A request's ``receive`` that gives up on a body that comes too slowly or too finely."""

    def __init__(
        self, receive: Receive, timeout: float, is_shredded: Callable[[Receive], bool]
    ) -> None:
        self._receive = receive
        self._is_shredded = is_shredded
        self._timeout = timeout
        self._complete = False
        self._patience = timeout  # seconds that may still be spent waiting for this piece
        self._missing = BODY_PIECE  # bytes of the piece
        self.is_refused = False

    async def receive(self) -> Message:
        """Raises: RequestError 400, 408."""
        if self._complete:
            return await self._receive()
        began = time.monotonic()
        try:
            message = await asyncio.wait_for(self._receive(), self._patience)
        except asyncio.TimeoutError:
            self.is_refused = True
            text = (
                f"the request's body did not arrive: less than {BODY_PIECE // 1024} KiB came in "
                f"{self._timeout:g} s (--body-timeout)"
            )
            raise RequestError(text, 408) from None
        if self._is_shredded(self._receive):
            self.is_refused = True
            text = (
                f"the request's body came in too many pieces: at most {MAX_BODY_PIECES}, and one "
                f"for each {MIN_BODY_PIECE} bytes; send it in one, or in larger chunks"
            )
            raise RequestError(text)
        self._complete = not message.get("more_body", False)
        self._missing -= len(message.get("body", b""))
        self._patience = max(MIN_PATIENCE, self._patience - (time.monotonic() - began))
        if self._missing <= 0:
            self._missing, self._patience = BODY_PIECE, self._timeout
        return message


def _end_by_closing(send: Send, message: Message) -> None:
    """HTTP/1.0 has no chunks: a reply without a length ends with its connection, which uvicorn
    closes. send: that of one of its cycles."""
    cycle: Any = getattr(send, "__self__", None)
    cycle.chunked_encoding = False
    if message["type"] == "http.response.body":
        cycle.expected_content_length = len(message.get("body", b""))


def _no_room() -> RequestError:
    return RequestError("the server has too many open connections: try again later", 503, None, 1)


def _plain_refusal() -> bytes:
    """The whole 503 answer, for a client that has not asked yet."""
    response = _no_room().response()
    response.headers["Connection"] = "close"
    lines = [b"%s: %s\r\n" % pair for pair in response.raw_headers]
    return b"".join([b"HTTP/1.1 503 Service Unavailable\r\n", *lines, b"\r\n", response.body])


async def _refuse(error: RequestError, scope: Scope, receive: Receive, send: Send) -> None:
    """Answers the error. The body is read first: closing a connection with unread data makes the
    kernel reset it, and the answer would be lost."""
    length, more = 0, True
    try:
        while more and length < MAX_DISCARDED:
            message = await receive()
            length += len(message.get("body", b""))
            more = message.get("more_body", False)
    except RequestError as late:
        error = late
    await error.response()(scope, receive, send)
