"""How long a request's head, and the trailers of its body, may be.

uvicorn's protocol over h11 bounds them itself; that over httptools keeps whatever comes.
"""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

MAX_HEAD = 64 * 1024  # bytes; what is received at a time comes on top
REFUSAL = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\nContent-Length: 0\r\n"
    b"Connection: close\r\n\r\n"
)


class BoundedHeads(AutoHTTPProtocol):  # type: ignore[misc,valid-type]
    """Counts what is received without getting the request any further."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._got_further = False
        self._without_progress = 0  # bytes

    def data_received(self, data: bytes) -> None:
        self._got_further = False
        super().data_received(data)
        self._without_progress = 0 if self._got_further else self._without_progress + len(data)
        if self._without_progress > MAX_HEAD and not self.transport.is_closing():
            if self.cycle is None or self.cycle.response_complete:
                self.transport.write(REFUSAL)
            self.transport.close()

    # ── what the parser tells ────────────────────────────────────────────────────────────────

    def on_message_begin(self) -> None:
        self._got_further = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._got_further = True
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._got_further = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._got_further = True
        super().on_message_complete()


def protocol() -> type[Any]:
    """What connections are made of."""
    is_httptools = hasattr(AutoHTTPProtocol, "on_headers_complete")
    return BoundedHeads if is_httptools else AutoHTTPProtocol
