"""Calls an ASGI application in this process: the replies of a server without its port."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from starlette.types import ASGIApp, Message, Scope


def _plain(value: Any) -> Any:
    """Arrays, tensors and their numbers as values of JSON."""
    if not hasattr(value, "tolist"):
        raise TypeError(f"a body holds JSON values, arrays and tensors, not {type(value)}")
    return value.tolist()


def encoded(body: dict[str, Any]) -> bytes:
    try:
        # Numbers that are not finite stay what they are, for the body's reader to refuse.
        return json.dumps(body, ensure_ascii=False, default=_plain).encode()
    except UnicodeEncodeError:  # the reader of the body says what is wrong
        return json.dumps(body, default=_plain).encode()


class Call:
    """One POST of a JSON object. Ask for its ``whole`` reply, or iterate over ``pieces`` to the
    end, or call ``close``."""

    def __init__(self, app: ASGIApp, path: str, body: bytes, key: str = "") -> None:
        """Must be made on the event loop of the application. body: an object, ``encoded``. key: one
        of its API keys; "": none."""
        self._app = app
        self._path = path
        self._key = key
        self._body = body
        self._messages: asyncio.Queue[Message | None] = asyncio.Queue()
        self._gone = asyncio.Event()
        self._sent = False
        self.status = 0  # known with the first piece
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def pieces(self) -> AsyncIterator[bytes]:
        """The reply's body as it comes. Raises: whatever the application raised."""
        while (message := await self._messages.get()) is not None:
            if message["type"] == "http.response.start":
                self.status = message["status"]
            elif message.get("body"):
                yield message["body"]
        await self._task

    async def whole(self) -> bytes:
        """All pieces. Raises: as ``pieces``."""
        try:
            return b"".join([piece async for piece in self.pieces()])
        finally:
            await self.close()

    async def close(self) -> None:
        """The caller does not want the rest, which ends the request."""
        self._gone.set()
        await asyncio.wait([self._task])

    async def _run(self) -> None:
        try:
            await self._app(self._scope(), self._receive, self._messages.put)
        finally:
            self._messages.put_nowait(None)

    async def _receive(self) -> Message:
        if not self._sent:
            self._sent = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    def _scope(self) -> Scope:
        return {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": self._path,
            "raw_path": self._path.encode(),
            "query_string": b"",
            "headers": [
                (b"content-type", b"application/json"),
                *([(b"x-api-key", self._key.encode())] if self._key else []),
            ],
            "client": None,
            "server": None,
        }
