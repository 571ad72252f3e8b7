"""What is done as a request comes, and as its reply begins: it is checked, counted, and marked."""

import uuid
from collections.abc import Callable
from contextvars import ContextVar

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mamba_eagle.server.errors import RequestError

HEADER = b"x-request-id"
SIMULATION_HEADER = b"x-mamba-eagle-simulated-acc-len"
# The traceparent header (W3C Trace Context) of the request that is being read.
trace_parent: ContextVar[str] = ContextVar("trace_parent", default="")
MAX_LENGTH = 128  # characters; a longer one is replaced


# Called when a request has come, in whose scope it may leave what it has found; a RequestError that
# it raises is the answer. Returns what is called with the reply's first message, if anything is.
Begin = Callable[[Scope], Callable[[Message], None] | None]


class AtRequest:
    """Middleware that acts when a request comes. Plain ASGI: streams pass untouched."""

    def __init__(self, app: ASGIApp, begin: Begin) -> None:
        self.app, self.begin = app, begin

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer, act = self.app, None
        try:
            if scope["type"] == "http":
                act = self.begin(scope)
        except RequestError as error:
            answer = error.response()

        async def send_acted(message: Message) -> None:
            if act is not None and message["type"] == "http.response.start":
                act(message)
            await send(message)

        await answer(scope, receive, send if act is None else send_acted)


def add_header(message: Message, name: bytes, value: bytes) -> None:
    message["headers"] = [*message.get("headers", ()), (name, value)]


def counted(count: Callable[[str, int], None]) -> Begin:
    """By route and status. A path that is no route counts as "other": clients may send any."""

    def begin(scope: Scope) -> Callable[[Message], None]:
        # FastAPI has found the route by the time the reply begins
        return lambda message: count(
            getattr(scope.get("route"), "path", "other"), message["status"]
        )

    return begin


def simulated(length: float) -> Begin:
    """Names --simulate-acc-len in a header of every reply, so that none passes for a real one."""
    value = f"{length:g}".encode()
    return lambda scope: lambda message: add_header(message, SIMULATION_HEADER, value)


def named(scope: Scope) -> Callable[[Message], None]:
    """Sends the client's request id back, or one made here."""
    headers = dict(scope["headers"])
    name = _sendable(headers.get(HEADER, b"")) or uuid.uuid4().hex.encode()
    trace_parent.set(headers.get(b"traceparent", b"").decode("latin-1"))
    return lambda message: add_header(message, HEADER, name)


def _sendable(value: bytes) -> bytes:
    """What the client sent, if it can be sent back: visible ASCII of a sensible length."""
    visible = all(0x20 < byte < 0x7F for byte in value)
    return value if visible and len(value) <= MAX_LENGTH else b""
