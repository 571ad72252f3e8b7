"""Names that client, proxies and traces share for one request: x-request-id, traceparent."""

from __future__ import annotations

import uuid
from contextvars import ContextVar

from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = b"x-request-id"
# The traceparent header (W3C Trace Context) of the request that is being read.
trace_parent: ContextVar[str] = ContextVar("trace_parent", default="")
MAX_LENGTH = 128  # characters; a longer one is replaced


class RequestIds:
    """Sends the client's request id back, or one made here. Plain ASGI: streams pass untouched."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        name = _sendable(headers.get(HEADER, b"")) or uuid.uuid4().hex.encode()
        trace_parent.set(headers.get(b"traceparent", b"").decode("latin-1"))

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                sent = [*message.get("headers", ()), (HEADER, name)]
                message = {**message, "headers": sent}
            await send(message)

        await self.app(scope, receive, send_named)


def _sendable(value: bytes) -> bytes:
    """What the client sent, if it can be sent back: visible ASCII of a sensible length."""
    visible = all(0x20 < byte < 0x7F for byte in value)
    return value if visible and len(value) <= MAX_LENGTH else b""
