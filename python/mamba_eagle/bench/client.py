"""Clients of a running server. This is the only place that posts to /generate."""

import argparse
import asyncio
import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import httpx

TIMEOUT = 600.0  # seconds
SHOWN_CHARACTERS = 200  # of a reply that is an error

Body = Mapping[str, Any]
Reply = dict[str, Any]
OnReply = Callable[[int, Reply], None]  # called with a request's index, as its reply comes


def add_server_flags(parser: argparse._ActionsContainer, default: str = "") -> None:
    """Which server a command asks."""
    parser.add_argument(
        "--url",
        default=default,
        help=f"of the server (default: {default})"
        if default
        else "ask this server; no model is loaded then",
    )
    parser.add_argument("--api-key", default="", help="the server's, if it has one")


def full_url(url: str) -> str:
    return (url if "://" in url else f"http://{url}").rstrip("/")


def no_one(index: int, reply: Reply) -> None:
    """Ignores replies."""


class ServerError(RuntimeError):
    """The server cannot be reached, or its reply is not an answer.

    status: the HTTP status, 0 without a reply. message: the server's own, or why there is none; ""
    where the reply says nothing that can be read.
    """

    def __init__(self, text: str, status: int = 0, message: str = "") -> None:
        super().__init__(text)
        self.status, self.message = status, message


C = TypeVar("C", bound="Client")


class Client:
    """Asynchronous; to be entered before use. Every method raises ServerError, and only that."""

    def __init__(
        self,
        base_url: str,
        api_key: str = "",
        timeout: float = TIMEOUT,
        connections: int | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """timeout: seconds without a byte. connections: at most, None for no limit."""
        self.base_url = base_url
        self._settings: dict[str, Any] = {
            "headers": {"Authorization": f"Bearer {api_key}"} if api_key else {},
            "timeout": timeout,
            "limits": httpx.Limits(max_connections=connections),
            "transport": transport,
            "trust_env": False,  # a proxy of the environment is not meant for a model server
        }

    async def __aenter__(self: C) -> C:
        with self._translated():
            self._http = httpx.AsyncClient(base_url=self.base_url, **self._settings)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._http.aclose()

    async def generate(self, body: Body) -> Reply:
        """The whole reply to one request."""
        with self._translated():
            response = await self._http.post("/generate", json=body)
        return self._content(response)

    async def generate_all(
        self, bodies: Sequence[Body], parallel: int, on_reply: OnReply = no_one
    ) -> list[Reply]:
        """Replies in the order of ``bodies``, at most ``parallel`` requests at a time. The first
        that fails ends them all."""
        gate = asyncio.Semaphore(parallel)

        async def one(index: int, body: Body) -> Reply:
            async with gate:
                reply = await self.generate(body)
            on_reply(index, reply)
            return reply

        return await asyncio.gather(*(one(i, body) for i, body in enumerate(bodies)))

    async def tokenize(self, text: str) -> list[int]:
        with self._translated():
            response = await self._http.post("/tokenize", json={"prompt": text})
        return self._content(response)["tokens"]

    async def cache(self) -> Reply:
        """What the prefix cache holds."""
        with self._translated():
            response = await self._http.get("/cache")
        return self._content(response)

    def _content(self, response: httpx.Response) -> Reply:
        if response.status_code != 200:
            raise self._refusal(response)
        try:
            content: Reply = response.json()
        except ValueError:
            raise ServerError(
                f"{self.base_url} answered with text that is not JSON: "
                f"{response.text[:SHOWN_CHARACTERS]}",
                response.status_code,
            ) from None
        return content

    def _refusal(self, response: httpx.Response) -> ServerError:
        status, text = response.status_code, response.text
        try:
            message = str(json.loads(text)["error"]["message"])
        except (ValueError, KeyError, TypeError):
            message = ""
        said = message or text[:SHOWN_CHARACTERS]
        return ServerError(f"{self.base_url} answered {status}: {said}", status, message)

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            why = repr(error)
            raise ServerError(f"no answer from {self.base_url}: {why}", message=why) from None


def generate_all(
    base_url: str,
    bodies: Sequence[Body],
    parallel: int,
    api_key: str = "",
    timeout: float = TIMEOUT,
    on_reply: OnReply = no_one,
) -> list[Reply]:
    """``Client.generate_all`` for callers without an event loop.

    Raises: ServerError
    """

    async def run() -> list[Reply]:
        async with Client(base_url, api_key, timeout, connections=parallel) as client:
            return await client.generate_all(bodies, parallel, on_reply)

    return asyncio.run(run())


def read_cache(base_url: str, api_key: str = "") -> Reply:
    """What a server's prefix cache holds. Raises: ServerError"""

    async def read() -> Reply:
        async with Client(base_url, api_key) as client:
            return await client.cache()

    return asyncio.run(read())
