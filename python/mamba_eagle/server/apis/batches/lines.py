"""Lines of OpenAI's batches: requests as they stand in a file, and the replies to them.

{"custom_id": "7", "method": "POST", "url": "/v1/completions", "body": {"prompt": "1 + 1 ="}}
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from mamba_eagle.core import shown
from mamba_eagle.limits import MAX_BATCH_LINE
from mamba_eagle.server.errors import RequestError
from mamba_eagle.server.http.asgi_client import encoded
from mamba_eagle.server.http.json_body import (
    UNSCANNED,
    decode_fields,
    decode_whole,
    problem_of,
)

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/generate")
NAMES = ("custom_id", "method", "url")


class Line(NamedTuple):
    """A request of a file; ``body`` in JSON. ``problem`` says why it cannot be one."""

    custom_id: str
    url: str
    body: bytes
    problem: str = ""

    def answered(self, status: int, body: Any) -> dict[str, Any]:
        """The reply's line. ``error`` is null if the request was answered."""
        message = "" if status == 200 else body.get("error", {}).get("message", "it failed")
        return self._reply({"status_code": status, "body": body}, str(status), message)

    def refused(self) -> dict[str, Any]:
        """The reply's line of one that cannot be a request."""
        return self._reply(None, "invalid_request", self.problem)

    def _reply(self, response: Any, code: str, message: str) -> dict[str, Any]:
        id = f"batch_req_{self.custom_id}"
        return {
            "id": id,
            "custom_id": self.custom_id,
            "response": response and {**response, "request_id": id},
            "error": {"code": code, "message": message} if message else None,
        }


def read_lines(path: str | Path, urls: tuple[str, ...] = URLS) -> Iterator[Line]:
    """One after the other, as they are asked for. urls: where requests may go.

    Raises: OSError
    """
    seen: set[str] = set()
    with open(path, "rb") as file:
        for number, text in enumerate(_bounded(file), 1):
            if text.strip():
                line = _parse(text, number, urls)
                if line.custom_id in seen:
                    problem = f"line {number}: custom_id {shown(line.custom_id)} was used before"
                    line = Line(f"line-{number}", "", b"", problem)
                seen.add(line.custom_id)
                yield line


def _bounded(file: Any) -> Iterator[bytes]:
    """Lines, of one that is too long its beginning."""
    while text := file.readline(MAX_BATCH_LINE + 1):
        yield text
        while not text.endswith(b"\n") and (text := file.readline(MAX_BATCH_LINE)):
            pass


def _parse(text: bytes, number: int, urls: tuple[str, ...]) -> Line:
    name = f"line-{number}"
    if len(text) > MAX_BATCH_LINE:
        problem = f"line {number} has more than {MAX_BATCH_LINE} bytes: shorten it"
        return Line(name, "", b"", problem)
    if problem := problem_of(text):
        return Line(name, "", b"", f"line {number} {problem}")
    try:
        value, in_json = _read(text)
    except RequestError as error:
        why = error.message.partition(": ")[2]
        return Line(name, "", b"", f"line {number} is not JSON: {why}")
    if not isinstance(value, dict):
        return Line(name, "", b"", f"line {number}: must be an object")
    given = value.get("custom_id", name)
    if not isinstance(given, str) or not given:
        return Line(name, "", b"", f"line {number}: custom_id = {shown(given)}: must be a string")
    url, body, method = value.get("url"), value.get("body"), value.get("method", "POST")
    if method != "POST":
        return Line(given, "", b"", f"method = {shown(method)}: must be POST")
    if url not in urls:
        known = f"one of {', '.join(urls)}" if len(urls) > 1 else urls[0]
        return Line(given, "", b"", f"url = {shown(url)}: must be {known}")
    if not isinstance(body, dict):
        return Line(given, "", b"", f"body = {shown(body)}: must be an object")
    if body.get("stream"):
        return Line(given, "", b"", "body.stream = true: replies of a batch come whole")
    return Line(given, url, in_json)


def _read(text: bytes) -> tuple[Any, bytes]:
    """A line, and its body in JSON. Of a long one, which may be millions of token ids, nothing is
    decoded but ``stream``. Raises: RequestError"""
    if len(text) <= UNSCANNED:
        value = decode_whole(text)
        body = value.get("body") if isinstance(value, dict) else None
        return value, encoded(body) if isinstance(body, dict) else b""
    line = decode_fields(text)
    in_json = bytes(line.pop("body", b"null"))
    value = {name: decode_whole(bytes(raw)) for name, raw in line.items() if name in NAMES}
    if in_json.startswith(b"{"):
        streams = decode_fields(in_json).get("stream", b"null")
        value["body"] = {"stream": decode_whole(bytes(streams))}
    return value, in_json
