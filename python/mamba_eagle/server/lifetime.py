"""Which requests the server still takes, and which are open, from the first to the last."""

import asyncio
import contextlib

from starlette.types import ASGIApp, Receive, Scope, Send

from mamba_eagle.server.errors import RequestError

# Answered until the end, since the server's operator needs them then too.
ALWAYS_OPEN = ("/health", "/ready", "/metrics", "/abort_request")
RETRY_AFTER = 1  # seconds; another replica may be asked at once


class Lifetime:
    """Lives on the event loop."""

    def __init__(self) -> None:
        self.failure: str | None = None  # why the engine is given up; it is about to be ended
        self.silent: str | None = None  # which process does not answer; it may yet
        self.draining = False  # open requests may finish, new ones are refused
        self.open_requests = 0
        self._idle = asyncio.Event()  # drained

    @property
    def refusal(self) -> str | None:
        """Why new requests are refused; None while they are taken."""
        return self.failure or ("the server is shutting down" if self.draining else None)

    def opened(self) -> None:
        self.open_requests += 1

    def closed(self) -> None:
        self.open_requests -= 1
        if self.draining and not self.open_requests:
            self._idle.set()

    async def drain(self, seconds: float) -> int:
        """Refuses new requests and waits for the open ones, ``seconds`` at most. Returns how
        many are still open."""
        self.draining = True
        if self.open_requests:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._idle.wait(), seconds)
        return self.open_requests


class Gate:
    """Counts the open requests and refuses new ones while the server is ending."""

    def __init__(self, app: ASGIApp, lifetime: Lifetime) -> None:
        self.app = app
        self.lifetime = lifetime

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in ALWAYS_OPEN:
            await self.app(scope, receive, send)
            return
        if self.lifetime.refusal is not None:
            error = RequestError(self.lifetime.refusal, 503, retry_after=RETRY_AFTER)
            response = error.response()
            response.headers["Connection"] = "close"  # so that clients connect to another replica
            await response(scope, receive, send)
            return
        self.lifetime.opened()
        try:
            await self.app(scope, receive, send)
        finally:
            self.lifetime.closed()
