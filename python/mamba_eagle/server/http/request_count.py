"""Counts requests by route and status."""

from __future__ import annotations

from collections.abc import Callable, Collection

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class RequestCount:
    """Plain ASGI: streams pass untouched. A path that is no route counts as "other", since
    clients may send any."""

    def __init__(
        self, app: ASGIApp, routes: Collection[str], count: Callable[[str, int], None]
    ) -> None:
        self.app = app
        self.routes = frozenset(routes)
        self.count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        route = scope["path"] if scope["path"] in self.routes else "other"

        async def send_counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.count(route, message["status"])
            await send(message)

        await self.app(scope, receive, send_counted)
