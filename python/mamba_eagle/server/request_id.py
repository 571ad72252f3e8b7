"""x-request-id: a name that client, proxies and logs share for one request."""

from __future__ import annotations

import uuid

from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = b"x-request-id"
MAX_LENGTH = 128  # characters; a longer one is replaced


class RequestIds:
    """Sends the client's request id back, or one made here. Plain ASGI: streams pass untouched."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        name = _given(scope) or uuid.uuid4().hex.encode()

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [*message.get("headers", ()), (HEADER, name)]
                message = {**message, "headers": headers}
            await send(message)

        await self.app(scope, receive, send_named)


def _given(scope: Scope) -> bytes | None:
    """What the client sent, if it can be sent back: visible ASCII of a sensible length."""
    for name, value in scope["headers"]:
        if name == HEADER:
            visible = all(0x20 < byte < 0x7F for byte in value)
            return value if visible and 0 < len(value) <= MAX_LENGTH else None
    return None
