"""How long a request's head, and the trailers of its body, may be, and in how many pieces a body
may come.

uvicorn's protocol over h11 bounds heads itself; that over httptools keeps whatever comes.
"""

from typing import Any

from starlette.types import Scope
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from mamba_eagle.limits import MAX_BODY_PIECES, MIN_BODY_PIECE

MAX_HEAD = 64 * 1024  # bytes
REFUSAL = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\nContent-Length: 0\r\n"
    b"Connection: close\r\n\r\n"
)


def head_size(scope: Scope) -> int:
    """Bytes of a request's head, but for its first line's constant parts."""
    fields = sum(len(name) + len(value) + 4 for name, value in scope["headers"])
    return fields + len(scope["raw_path"]) + len(scope["query_string"])


class BoundedHeads(AutoHTTPProtocol):  # type: ignore[misc,valid-type]
    """Counts what is received without getting the request any further, and lets every request
    know that its client has left: of pipelined ones uvicorn lets the last one know."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._got_further = False
        self._without_progress = 0  # bytes
        self._open: list[Any] = []  # uvicorn's cycles: one per request
        self._pieces_left = 0.0  # of the body that is coming in
        self.shredded: Any = None  # the latest cycle whose body came in too many pieces

    def data_received(self, data: bytes) -> None:
        self._got_further = False
        super().data_received(data)
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

    # ── what the parser tells ────────────────────────────────────────────────────────────────

    def on_message_begin(self) -> None:
        self._got_further = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._got_further = True
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
        super().on_message_complete()


def protocol() -> type[Any]:
    """What connections are made of."""
    is_httptools = hasattr(AutoHTTPProtocol, "on_headers_complete")
    return BoundedHeads if is_httptools else AutoHTTPProtocol
