"""Errors as clients see them, in OpenAI's shape: ``{"error": {message, type, param, code}}``."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.responses import Response

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    503: "service_unavailable_error",
}


class RequestError(Exception):
    """Ends a request with an HTTP status and a message for whoever sent it."""

    def __init__(
        self, message: str, status: int = 400, param: str | None = None, retry_after: int = 0
    ) -> None:
        super().__init__(message)
        # A value that it shows may hold half of a surrogate pair, which cannot be sent.
        self.message = message.encode("utf-8", "backslashreplace").decode()
        self.status = status
        self.param = param
        self.retry_after = retry_after

    def body(self) -> dict[str, Any]:
        return {
            "error": {
                "message": self.message,
                "type": TYPES.get(self.status, "internal_server_error"),
                "param": self.param,
                "code": self.status,
            }
        }

    def response(self) -> Response:
        headers = {"Retry-After": str(self.retry_after)} if self.retry_after else None
        return json_response(self.body(), self.status, headers)


def json_response(
    content: Any, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    return Response(
        msgspec.json.encode(content), status, headers=headers, media_type="application/json"
    )
