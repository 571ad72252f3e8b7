"""The HTTP application over the fake engine, in one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass
from typing import Any

import httpx
import uvicorn
import zmq
from fake_engine import FakeEngine, Script, length_of
from fastapi import FastAPI
from fastapi.routing import APIRoute
from llguidance import LLMatcher
from tiny_tokenizer import byte_level, spell

from mamba_eagle.config import ServerConfig
from mamba_eagle.constrain.vocabulary import Vocabulary
from mamba_eagle.message import Generate, GetState
from mamba_eagle.message.channel import make_socket_dir, remove_socket_dir
from mamba_eagle.metrics import Recorder
from mamba_eagle.metrics.request_log import RequestLog
from mamba_eagle.server.app import ROOMS, make_app
from mamba_eagle.server.bodies.kinds import Body
from mamba_eagle.server.state import ServerState
from mamba_eagle.tokenizer.manager import TokenizerManager

TOKENIZER = byte_level()
PATIENCE = 120.0  # seconds; only what hangs takes so long
_ROUTES = [one for room in ROOMS for one in room.router.routes if isinstance(one, APIRoute)]
_EXTRAS = {one.path: one.openapi_extra for one in _ROUTES if one.openapi_extra}
# The models that read bodies, by the paths of their routes.
BODIES: dict[str, type[Body]] = {path: one["body"] for path, one in _EXTRAS.items() if one["body"]}


def says(text: str) -> Script:
    """Each request gets this text, cut at its max_new_tokens."""

    def script(request: Generate) -> Any:
        tokens = spell(text)[: request.sampling.max_new_tokens]
        return tokens, length_of(tokens)

    return script


def silent(request: Generate) -> None:
    return None


@dataclass
class Harness:
    app: FastAPI
    client: httpx.AsyncClient
    engine: FakeEngine
    manager: TokenizerManager

    async def post(self, path: str, **body: Any) -> httpx.Response:
        return await self.client.post(path, json=body)

    def matcher(self, grammar: str) -> LLMatcher:
        """At the start of a grammar, on the tokenizer's vocabulary."""
        tokenizer, engine = self.manager.tokenizer, self.manager.engine
        assert tokenizer is not None
        return Vocabulary(tokenizer.json(), engine.vocab_size, engine.eos_token_ids).matcher(
            grammar
        )

    async def all_heard(self) -> None:
        """Returns when the engine has received all that it was sent until now."""
        await self.manager.ask(GetState(), PATIENCE)

    async def events(self, path: str, **body: Any) -> list[Any]:
        """The stream's objects; the last line must be [DONE]."""
        response = await self.client.post(path, json={**body, "stream": True})
        assert response.status_code == 200, response.text
        lines = response.text.split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""]
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


class Others:
    """Those who wait for the event loop, too: how often it was their turn."""

    def __init__(self) -> None:
        self._turns = 0
        self._task = asyncio.ensure_future(self._take_turns())

    async def _take_turns(self) -> None:
        while True:
            self._turns += 1
            await asyncio.sleep(0)

    def leave(self) -> int:
        self._task.cancel()
        return self._turns


@contextlib.asynccontextmanager
async def serving(
    script: Script,
    chunk: int = 1,
    tokenizer: Any = TOKENIZER,
    context_length: int = 64,
    vocab_size: int = 300,
    engine: type[FakeEngine] = FakeEngine,
    **settings: Any,
) -> AsyncIterator[Harness]:
    # No comments in streams, unless a test wants them: the machine may stand still.
    config = ServerConfig(model_path="tiny", **{"sse_keep_alive": 0.0, **settings})
    socket_dir = make_socket_dir()
    context = zmq.Context()
    log = RequestLog(config.log_prompts) if config.log_requests else None
    recorder = Recorder("tiny", log, config.metrics_prefixes)
    manager = TokenizerManager(config, context, socket_dir, recorder)
    manager.tokenizer = tokenizer
    fake = engine(socket_dir, script, chunk, vocab_size, context_length=context_length)
    await asyncio.wait_for(manager.ready, PATIENCE)
    app = make_app(ServerState(config, manager, recorder, socket_dir))
    transport = httpx.ASGITransport(app)
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            yield Harness(app, client, fake, manager)
    finally:
        fake.close()
        manager.close()
        context.destroy(linger=0)
        remove_socket_dir(socket_dir)


@contextlib.asynccontextmanager
async def listening(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    """The application behind real connections, for what a client sees of them."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
        task = asyncio.ensure_future(server._serve([listener]))
        while not server.started:
            await asyncio.sleep(0.005)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        try:
            async with httpx.AsyncClient(base_url=url, timeout=PATIENCE) as client:
                yield client
        finally:
            server.should_exit = True
            await task


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, PATIENCE))
