"""What benchmarks ask a server for beyond whole replies: streams, aborts, its state."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

import httpx

from mamba_eagle.bench.client import Body, Client, Reply, ServerError


class StreamClient(Client):
    """``Client``, and more."""

    @contextlib.asynccontextmanager
    async def stream(self, body: Body) -> AsyncIterator[AsyncIterator[Reply]]:
        """Entered when the server has accepted the request; gives the pieces as they come.
        Leaving early closes the connection, which ends the request."""
        with self._translated():
            content = {**body, "stream": True}
            async with self._http.stream("POST", "/generate", json=content) as response:
                if response.status_code != 200:
                    await response.aread()
                    raise self._refusal(response)
                yield self._pieces(response)

    async def _pieces(self, response: httpx.Response) -> AsyncIterator[Reply]:
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            piece: Reply = json.loads(line[len("data: ") :])
            if "error" in piece:
                error = piece["error"]
                raise ServerError(f"{self.base_url} ended a stream: {error}", error.get("code", 0))
            yield piece

    async def abort(self, rid: str) -> None:
        """Ends the request with this id, if there is one."""
        with self._translated():
            await self._http.post("/abort_request", json={"rid": rid})

    async def server_info(self) -> Reply:
        with self._translated():
            response = await self._http.get("/server_info")
        return self._content(response)


def server_info(base_url: str, api_key: str = "", timeout: float = 30.0) -> Reply:
    """What GET /server_info answers.

    Raises: ServerError
    """

    async def run() -> Reply:
        async with StreamClient(base_url, api_key, timeout) as client:
            return await client.server_info()

    return asyncio.run(run())
