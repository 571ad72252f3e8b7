"""Receives bodies: how long they may be, how many are held at a time, and where they are read.

Small bodies are read on the event loop: a thread would cost more than the work. Others go to a
thread, and long ones do not stand before shorter ones. Threads share one interpreter, so what they
do is done in pieces (json_body.py), by numpy, or by the Rust tokenizer, which do not keep its lock.
"""

import asyncio
import os
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from mamba_eagle.constrain.trials import Verdict
from mamba_eagle.core import shown
from mamba_eagle.limits import MAX_BODIES_IN_MEMORY, MAX_DRAINED_BODY, MAX_TIMEOUT
from mamba_eagle.server.bodies.grammars import Untried, own_verdicts
from mamba_eagle.server.bodies.kinds import accepts_unknown
from mamba_eagle.server.errors import RequestError
from mamba_eagle.server.http.json_body import decode_object

# What clients send JSON as; curl -d says it sends a form, and some say nothing.
RARE_TYPES = "application/x-www-form-urlencoded application/octet-stream text/json text/plain"
READABLE_TYPES = ("", "application/json", *RARE_TYPES.split())
READABLE_CHARSETS = ("utf-8", "utf8", "us-ascii", "ascii")
SMALL_BODY = 4096  # bytes; encoding them takes about 2 ms
QUICK_BODY = 2**18  # about 150 ms
CHAT_THREADS = 8  # a template that loops holds one of them until it is stopped

T = TypeVar("T")


class Bodies:
    """Receives, decodes and reads bodies; ``max_size`` is in bytes.

    timeout: seconds that trying the grammar of a body may take if it does not say; 0: no limit.
    """

    def __init__(
        self, max_size: int, timeout: float = 0.0, allow_unknown_fields: bool = False
    ) -> None:
        self.max_size, self.timeout = max_size, timeout
        self.allow_unknown_fields = allow_unknown_fields
        self.capacity = max(MAX_BODIES_IN_MEMORY, 2 * max_size)
        self.held = 0  # bytes of the bodies that are being received or read
        threads = max(1, (os.cpu_count() or 1) // 4)
        self._quick = ThreadPoolExecutor(threads, "quick-body")
        self._slow = ThreadPoolExecutor(threads, "slow-body")
        self._chats = ThreadPoolExecutor(CHAT_THREADS, "chat-body")  # templates are programs

    async def read(
        self,
        request: Request,
        understand: Callable[[dict[str, Any]], T],
        max_size: int = 0,
        is_chat: bool = False,
    ) -> T:
        """What ``understand`` makes of the body, off the event loop if the body is long.

        max_size: of this route, if it is less than the server's. is_chat: off the event loop in
        any case, among those that may take long.
        Raises: RequestError; whatever ``understand`` raises.
        """
        reception = _Reception(self, request, max_size or self.max_size)
        try:
            body = await reception.body()
            timeouts: list[Any] = [self.timeout]  # what the body says comes last
            verdicts: dict[str, Verdict] = {}

            def read() -> T:
                values = decode_object(body)
                timeouts[1:] = [values.get("timeout")]
                accepts_unknown.set(self.allow_unknown_fields)
                own_verdicts.set(verdicts)
                return understand(values)

            while True:
                try:
                    if len(body) <= SMALL_BODY and not is_chat:
                        return read()
                    pool = self._slow if len(body) > QUICK_BODY else self._quick
                    pool = self._chats if is_chat and pool is self._quick else pool
                    return await asyncio.get_running_loop().run_in_executor(pool, read)
                except Untried as untried:
                    verdicts |= await _settle(untried, request, timeouts)
        finally:
            self.held -= reception.held


async def wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T | None:
    """The work's result; None if the client left before, and then the work is cancelled."""
    done = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(wait_for_disconnect(request.receive))
    try:
        await asyncio.wait({done, gone}, return_when=asyncio.FIRST_COMPLETED)
        return done.result() if done.done() else None
    finally:
        done.cancel()
        gone.cancel()


def client_left() -> RequestError:
    return RequestError("the client went away before its request was complete")


async def _settle(
    untried: Untried, request: Request, timeouts: Sequence[Any]
) -> dict[str, Verdict]:
    """timeouts: in seconds; the least counts, and what cannot be one does not.

    Raises: RequestError
    """
    numbers = [value for value in timeouts if isinstance(value, (int, float))]
    timeout = min((value for value in numbers if 0 < value <= MAX_TIMEOUT), default=None)
    try:
        settled = await asyncio.wait_for(unless_gone(request, untried.settle()), timeout)
    except asyncio.TimeoutError:
        raise RequestError(
            f"the grammar could not be tried within the request's {timeout:g} s", 504
        ) from None
    if settled is None:
        raise client_left()
    return settled


class _Reception:
    """One body as it comes in. What is refused is read to its end and thrown away, since a
    client that is still sending would not see the answer."""

    def __init__(self, bodies: Bodies, request: Request, max_size: int) -> None:
        self.bodies = bodies
        self.request = request
        self.max_size = max_size
        self.held = 0  # bytes that count as the bodies' in memory
        self._parts: list[bytes] = []
        self._refusal = unreadable(request)

    async def body(self) -> bytes:
        length = 0
        try:
            async for part in self.request.stream():
                length += len(part)
                if length > MAX_DRAINED_BODY:
                    break
                self._take(part)
        except ClientDisconnect:
            raise client_left() from None
        if self._refusal is not None and length:
            raise self._refusal
        body = b"".join(self._parts)
        self._parts.clear()
        return body

    def _take(self, part: bytes) -> None:
        if self._refusal is None:
            self._refusal = self._too_much(len(part))
        if self._refusal is not None:
            self._parts.clear()
            self.bodies.held -= self.held
            self.held = 0
            return
        self._parts.append(part)
        self.held += len(part)
        self.bodies.held += len(part)

    def _too_much(self, more: int) -> RequestError | None:
        if self.held + more > self.max_size:
            most = _size(self.max_size)
            own = self.max_size < self.bodies.max_size
            limit = "the limit of this route" if own else "--max-body-size"
            return RequestError(f"the body is longer than {most}, {limit}: send less", 413)
        if self.bodies.held + more > self.bodies.capacity:
            return RequestError(
                f"the server holds {_size(self.bodies.capacity)} of request bodies, as much as it "
                "may: try again later",
                503,
                retry_after=1,
            )
        return None


def _size(count: int) -> str:
    return f"{count // 2**20} MiB" if count >= 2**20 else f"{count // 1024} KiB"


def unreadable(request: Request) -> RequestError | None:
    """Why a body of this kind cannot be read, if it cannot."""
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        return RequestError(
            f"Content-Encoding = {shown(encoding)}: compressed bodies are not read; send it as it "
            "is",
            415,
        )
    header = request.headers.get("content-type", "")
    kind, _, parameters = header.lower().partition(";")
    kind = kind.strip()
    charset = parameters.partition("charset=")[2].partition(";")[0].strip(' "') or "utf-8"
    known = kind in READABLE_TYPES or kind.endswith("+json")
    if known and charset in READABLE_CHARSETS:
        return None
    return RequestError(
        f"Content-Type = {shown(header)}: send JSON in UTF-8, as application/json", 415
    )
