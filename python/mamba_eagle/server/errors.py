"""Errors as clients see them, in OpenAI's shape: ``{"error": {message, type, param, code}}``.

HTTP status codes live in this folder only: the engine says what kind of failure it was.
"""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.responses import Response

from mamba_eagle import limits
from mamba_eagle.core import Failure, FinishReason, shown

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
STATUS = {
    Failure.REFUSED: 400,
    Failure.INTERNAL: 500,
    Failure.UNAVAILABLE: 503,
    Failure.TIMEOUT: 504,
}


class RequestError(Exception):
    """Ends a request with an HTTP status and a message for the client."""

    def __init__(
        self, message: str, status: int = 400, param: str | None = None, retry_after: int = 0
    ) -> None:
        super().__init__(message)
        # A value or a name that it shows may hold half of a surrogate pair, which cannot be sent.
        self.message = _sendable(message)
        self.status = status
        self.param = _sendable(param) if param is not None else None
        self.retry_after = retry_after

    @classmethod
    def about(cls, path: str, value: Any, remedy: str) -> RequestError:
        """For a field's value. Names within a path may be as long as the body."""
        path = cut(path)
        return cls(f"{path} = {shown(value)}: {remedy}", param=path)

    def body(self) -> dict[str, Any]:
        other = "invalid_request_error" if self.status < 500 else "internal_server_error"
        return {
            "error": {
                "message": self.message,
                "type": TYPES.get(self.status, other),
                "param": self.param,
                "code": self.status,
            }
        }

    def response(self) -> Response:
        headers = {"Retry-After": str(self.retry_after)} if self.retry_after else None
        return json_response(self.body(), self.status, headers)


def cut(text: str, most: int = limits.MAX_SHOWN) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."


def _sendable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


def failure_status(reason: FinishReason) -> int:
    """The HTTP status of an abort; 0 if somebody asked for it."""
    return STATUS[reason.failure] if reason.failure is not None else 0


def json_response(
    content: Any, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    """content: bytes are JSON already."""
    text = content if isinstance(content, bytes) else msgspec.json.encode(content)
    return Response(text, status, headers=headers, media_type="application/json")
