"""Starts the three processes, serves HTTP, and ends them all together.

    launch ─▶ scheduler, runner started ─▶ Ready ─▶ HTTP served ─▶ an Ending ─▶ all ended

There is one way out: the first Ending, whoever brings it (a signal, a dead process, a port in
use), is what the exit code and the last line say.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import uvicorn
import zmq

from mamba_eagle.config import ConfigError, EngineConfig, ServerConfig
from mamba_eagle.core import Failure
from mamba_eagle.message.channel import remove_socket_dir
from mamba_eagle.metrics import Recorder
from mamba_eagle.resolve import resolve
from mamba_eagle.server.auth import api_keys
from mamba_eagle.server.children import Child, end_children, engine_command
from mamba_eagle.server.http import make_app
from mamba_eagle.server.socket_dir import new_socket_dir
from mamba_eagle.server.state import ServerState
from mamba_eagle.server.threads import share_interpreter
from mamba_eagle.tokenizer.manager import TokenizerManager
from mamba_eagle.tokenizer.text import TextTokenizer

# Open requests have been answered by then; what is left are clients that do not read.
CLOSE_CONNECTIONS_AFTER = 1


T = TypeVar("T")


class Ending(NamedTuple):
    """Why the server ends; code 0 when it was asked to."""

    code: int
    message: str


def say(line: str) -> None:
    print(line, flush=True)


def launch(config: ServerConfig) -> int:
    """Serves until told to stop; gives the exit code.

    Raises: ConfigError with every setting that cannot work.
    """
    config = _resolve(config)
    logging.basicConfig(
        level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    for noisy in ("httpx", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    try:
        http_socket = _bind(config)
    except OSError as error:
        return _report(_port_taken(config, error))
    socket_dir = new_socket_dir()
    try:
        ending = asyncio.run(_Launch(config, http_socket, socket_dir).run())
    finally:
        http_socket.close()
        remove_socket_dir(socket_dir)
    return _report(ending)


def _report(ending: Ending) -> int:
    if ending.message:
        print(f"mamba-eagle: {ending.message}", file=sys.stderr, flush=True)
    return ending.code


def _resolve(config: ServerConfig) -> ServerConfig:
    """Raises: ConfigError"""
    problems: list[str] = []
    try:
        api_keys(config)
    except ConfigError as error:
        problems += error.problems
    try:
        config = resolve(config)
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError(problems)
    return config


def _bind(config: ServerConfig) -> socket.socket:
    """The port is taken at the start, before minutes of loading, but listened on when ready."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    http_socket = socket.socket(family, socket.SOCK_STREAM)
    http_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        http_socket.bind((config.host, config.port))
    except OSError:
        http_socket.close()
        raise
    return http_socket


def _port_taken(config: ServerConfig, error: OSError) -> Ending:
    reason = error.strerror or str(error)
    return Ending(
        1,
        f"cannot listen on {config.host} port {config.port}: {reason}; "
        "choose another with --host and --port",
    )


class _Server(uvicorn.Server):
    """Signals are the launcher's business."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _in_thread(function: Callable[[], T]) -> asyncio.Future[T]:
    """Like asyncio.to_thread, but the end of the loop does not wait for it."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: Exception | None) -> None:
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(cast(T, result))

    def work() -> None:
        result, error = None, None
        try:
            result = function()
        except Exception as caught:
            error = caught
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=work, daemon=True).start()
    return future


class _Launch:
    def __init__(self, config: ServerConfig, http_socket: socket.socket, socket_dir: str) -> None:
        self.config = config
        self.http_socket = http_socket
        self.socket_dir = socket_dir
        self.children: list[Child] = []

    async def run(self) -> Ending:
        loop = asyncio.get_running_loop()
        self.ending: asyncio.Future[Ending] = loop.create_future()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._end, Ending(0, ""))
        context = zmq.Context(io_threads=1)
        recorder = Recorder(
            self.config.served_model_name or self.config.model_path,
            self.config.log_requests,
            self.config.log_prompts,
        )
        self.manager = TokenizerManager(self.config, context, self.socket_dir, recorder)
        try:
            self._start_engine()
            if await self._until_ready():
                share_interpreter()
                await self._serve(ServerState(self.config, self.manager, recorder))
            return await self.ending
        finally:
            self.manager.fail("the server is shutting down", Failure.UNAVAILABLE)
            await asyncio.to_thread(end_children, self.children)
            self.manager.close()
            context.destroy(linger=0)
            # Only tidying is left; an impatient second Ctrl-C must not end that in a traceback.
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)
                signal.signal(number, signal.SIG_IGN)

    def _end(self, ending: Ending) -> None:
        if not self.ending.done():
            self.ending.set_result(ending)

    # ── start ────────────────────────────────────────────────────────────────────────────────

    def _start_engine(self) -> None:
        names = [spec.name for spec in dataclasses.fields(EngineConfig)]
        config_file = Path(self.socket_dir, "config.json")
        config_file.write_text(json.dumps({name: getattr(self.config, name) for name in names}))
        say(f"server process: pid {os.getpid()}")
        for role in ("scheduler", "runner"):
            command = engine_command(role, self.socket_dir, str(config_file))
            child = Child(role, command, self._child_ended)
            self.children.append(child)
            say(f"{role} process: pid {child.pid}")

    def _child_ended(self, child: Child) -> None:
        """Nobody ends them but the launcher, and only after an Ending."""
        # The one whose death took the other along is the one to name: the one that was killed.
        dead = [one for one in self.children if one.process.poll() is not None]
        dead.sort(key=lambda one: (one.process.returncode >= 0, one is not child))
        first = dead[0] if dead else child
        if not self.ending.done():
            self.manager.fail(first.how_it_ended())
        self._end(Ending(max(first.process.returncode, 0) or 1, first.how_it_ended()))

    async def _until_ready(self) -> bool:
        """Loads the tokenizer while the engine loads the model; False: there was an Ending."""
        if not self.config.skip_tokenizer_init:
            load = _in_thread(lambda: TextTokenizer.load(self.config.tokenizer_path))
            if await self._ended_before(load):
                return False
            if (error := load.exception()) is not None:
                message = (
                    f"--tokenizer-path {self.config.tokenizer_path}: no tokenizer can be loaded "
                    f"({error}); give another folder or add --skip-tokenizer-init"
                )
                self._end(Ending(2, message))
                return False
            self.manager.tokenizer = load.result()
        return not await self._ended_before(self.manager.ready)

    async def _ended_before(self, awaited: asyncio.Future[Any]) -> bool:
        futures: set[asyncio.Future[Any]] = {awaited, self.ending}
        await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
        return self.ending.done()

    # ── serve ────────────────────────────────────────────────────────────────────────────────

    async def _serve(self, state: ServerState) -> None:
        try:
            self.http_socket.listen(2048)
        except OSError as error:
            self._end(_port_taken(self.config, error))
            return
        server = _Server(
            uvicorn.Config(
                make_app(state),
                log_level="warning",
                access_log=False,
                timeout_graceful_shutdown=CLOSE_CONNECTIONS_AFTER,
                ws="none",
                lifespan="off",
            )
        )
        serving = asyncio.ensure_future(server.serve(sockets=[self.http_socket]))
        while not server.started and not serving.done():
            await asyncio.sleep(0.01)
        host = f"[{self.config.host}]" if ":" in self.config.host else self.config.host
        say(f"Server is ready at http://{host}:{self.config.port}")
        if not await self._ended_before(serving):
            self._end(Ending(1, "the HTTP server ended unexpectedly"))
        # Open requests get their error now, while their connections are still there.
        self.manager.fail("the server is shutting down", Failure.UNAVAILABLE)
        # Clients that do not read are cut off, which is no news worth a traceback.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        server.should_exit = True
        await asyncio.gather(
            serving, asyncio.to_thread(end_children, self.children), return_exceptions=True
        )
