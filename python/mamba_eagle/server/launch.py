"""Starts the three processes, serves HTTP, and ends them all together.

    launch ─▶ scheduler, runner started ─▶ Ready ─▶ HTTP served ─▶ an Ending ─▶ all ended

The first ``Ending`` to occur, be it a finished drain, a dead or frozen process or a port in use,
determines the exit code and the last line.
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
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import zmq

from mamba_eagle import logs
from mamba_eagle.config import ConfigError, EngineConfig, ServerConfig
from mamba_eagle.core import Failure
from mamba_eagle.message import BEAT_SECONDS, ToWatchdog
from mamba_eagle.message.channel import Receiver, remove_socket_dir
from mamba_eagle.message.lifetime import role_name
from mamba_eagle.message.ranks import RANK_ENVIRONMENT
from mamba_eagle.metrics import Recorder
from mamba_eagle.resolve import resolve
from mamba_eagle.server import descriptors
from mamba_eagle.server.auth import api_keys
from mamba_eagle.server.children import Child, end_children, engine_command
from mamba_eagle.server.connections import LOG_SECONDS, Limits
from mamba_eagle.server.http import make_app
from mamba_eagle.server.lifetime import Gate, Lifetime
from mamba_eagle.server.listener import HttpServer
from mamba_eagle.server.origins import exposure_warning, origin_problems
from mamba_eagle.server.socket_dir import new_socket_dir
from mamba_eagle.server.state import ServerState
from mamba_eagle.server.threads import share_interpreter
from mamba_eagle.server.tls import tls_context
from mamba_eagle.server.watchdog import Watchdog
from mamba_eagle.tokenizer.manager import TokenizerManager
from mamba_eagle.tokenizer.text import TextTokenizer

CLOSE_SECONDS = 1.0  # for connections to close; their requests have been answered by then
STACKS_SECONDS = 1.0  # for one process to write its stacks
SHUTTING_DOWN = "the server is shutting down"

log = logging.getLogger("mamba_eagle.server")
T = TypeVar("T")


class Ending(NamedTuple):
    """Why the server ends; code 0 when it was asked to."""

    code: int
    message: str


def say(line: str) -> None:
    print(line, flush=True)


def launch(config: ServerConfig) -> int:
    """Serves until told to stop. Returns the exit code.

    Raises: ConfigError with every setting that cannot work.
    """
    config = _resolve(config)
    logs.set_up(config.log_level, config.log_format, "server")
    # Anybody who connects can cause these.
    logging.getLogger("uvicorn.error").addFilter(logs.Rarely("Invalid HTTP request", LOG_SECONDS))
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
    problems = descriptors.problems()
    for check in (api_keys, tls_context):
        try:
            check(config)
        except ConfigError as error:
            problems += error.problems
    if not problems:
        problems += origin_problems(config)
    try:
        config = resolve(config)
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError(problems)
    return config


def _bind(config: ServerConfig) -> socket.socket:
    """Takes the port now, before minutes of loading. The server listens on it when it is ready."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    # The protocol is named because asyncio sets TCP_NODELAY only on sockets that name it. Without
    # the option a reply on a kept connection waits 40 ms for the client's delayed acknowledgement.
    http_socket = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
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
        self.lifetime = Lifetime()
        self.is_serving = False
        self.drain: asyncio.Task[None] | None = None

    async def run(self) -> Ending:
        loop = asyncio.get_running_loop()
        self.ending: asyncio.Future[Ending] = loop.create_future()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop)
        context = zmq.Context(io_threads=1)
        recorder = Recorder(
            self.config.served_model_name or self.config.model_path,
            self.config.log_requests,
            self.config.log_prompts,
        )
        self.manager = TokenizerManager(self.config, context, self.socket_dir, recorder)
        self.heartbeats: Receiver[ToWatchdog] = Receiver(context, self.socket_dir, "to_watchdog")
        try:
            self._start_engine()
            if await self._until_ready():
                share_interpreter()
                await self._serve(
                    ServerState(self.config, self.manager, recorder, lifetime=self.lifetime)
                )
            return await self.ending
        finally:
            self.manager.fail(SHUTTING_DOWN, Failure.UNAVAILABLE)
            await asyncio.to_thread(end_children, self.children)
            self.manager.close()
            self.heartbeats.close()
            context.destroy(linger=0)
            # Only tidying is left; an impatient second Ctrl-C must not end that in a traceback.
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)
                signal.signal(number, signal.SIG_IGN)

    def _end(self, ending: Ending) -> None:
        if not self.ending.done():
            self.ending.set_result(ending)

    # ── stop ─────────────────────────────────────────────────────────────────────────────────

    def _stop(self) -> None:
        """A signal came: the first lets open requests finish, the second does not."""
        if self.is_serving and self.drain is None:
            self.drain = asyncio.get_running_loop().create_task(self._drain())
        else:
            self._end(Ending(0, ""))

    async def _drain(self) -> None:
        seconds = self.config.shutdown_timeout
        if self.lifetime.open_requests:
            say(
                f"Shutting down: waiting up to {seconds:g} s for open requests "
                f"({self.lifetime.open_requests}); a second signal ends them at once"
            )
        left = await self.lifetime.drain(seconds)
        text = f"cut off after --shutdown-timeout {seconds:g}: {left} open requests"
        self._end(Ending(0, text if left else ""))

    # ── start ────────────────────────────────────────────────────────────────────────────────

    def _start_engine(self) -> None:
        names = [spec.name for spec in dataclasses.fields(EngineConfig)]
        config_file = Path(self.socket_dir, "config.json")
        config_file.write_text(json.dumps({name: getattr(self.config, name) for name in names}))
        say(f"server process: pid {os.getpid()}")
        ranks = range(self.config.tp_size)
        for kind, rank in (("scheduler", 0), *(("runner", rank) for rank in ranks)):
            command = engine_command(kind, self.socket_dir, str(config_file), rank)
            role = role_name(kind, rank)
            try:
                child = Child(role, command, self._child_ended, RANK_ENVIRONMENT)
            except OSError as error:
                self._end(Ending(1, f"cannot start the {role} process: {error.strerror}"))
                return
            self.children.append(child)
            say(f"{role} process: pid {child.pid}")

    def _child_ended(self, child: Child) -> None:
        """An Ending, unless there was one before: only the launcher ends a child."""
        # If both are dead, the one that was killed has taken the other along: name that one.
        dead = [one for one in self.children if one.process.poll() is not None]
        dead.sort(key=lambda one: (one.process.returncode >= 0, one is not child))
        first = dead[0] if dead else child
        if not self.ending.done():
            self.manager.fail(first.how_it_ended())
        self._end(Ending(max(first.process.returncode, 0) or 1, first.how_it_ended()))

    async def _until_ready(self) -> bool:
        """Loads the tokenizer while the engine loads the model. False if there was an Ending."""
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
        app = Gate(make_app(state), self.lifetime)
        server = HttpServer(app, self.http_socket, self._limits(), tls_context(self.config))
        try:
            serving = await server.start()
        except OSError as error:
            self._end(_port_taken(self.config, error))
            return
        watching = asyncio.get_running_loop().create_task(self._watch())
        host = f"[{self.config.host}]" if ":" in self.config.host else self.config.host
        if (warning := exposure_warning(self.config)) is not None:
            log.warning(warning)
        self.is_serving = True
        scheme = "https" if self.config.ssl_certfile else "http"
        say(f"Server is ready at {scheme}://{host}:{self.config.port}{self.config.root_path}")
        parts: set[asyncio.Future[Any]] = {serving, watching, self.ending}
        await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
        if not self.ending.done():
            name, task = ("watchdog", watching) if watching.done() else ("HTTP server", serving)
            log.error("the %s failed", name, exc_info=task.exception())
            self._end(Ending(1, f"the {name} ended unexpectedly"))
        watching.cancel()
        # Open requests get their error now, while their connections are still there.
        self.manager.fail(SHUTTING_DOWN, Failure.UNAVAILABLE)
        # Clients that do not read are cut off, which is not worth a traceback.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        server.end(CLOSE_SECONDS)
        await asyncio.gather(
            serving,
            asyncio.to_thread(end_children, self.children),
            watching,
            return_exceptions=True,
        )

    def _limits(self) -> Limits:
        """The settings, with no more connections than there are descriptors for."""
        config = self.config
        connections, spare = descriptors.room_for_connections(config.max_connections)
        if connections < config.max_connections:
            log.warning(
                "--max-connections %d: ulimit -n leaves room for %d; further ones are answered 503",
                config.max_connections,
                connections,
            )
        return Limits(
            connections,
            spare,
            config.header_timeout,
            config.body_timeout,
            config.write_timeout,
        )

    # ── watch ────────────────────────────────────────────────────────────────────────────────

    async def _watch(self) -> None:
        """Ends the server when scheduler or runner have stopped working."""
        watchdog = Watchdog(self.config.watchdog_timeout, self.config.tp_size)
        last = time.monotonic()
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            while (beat := self.heartbeats.receive(timeout_ms=0)) is not None:
                watchdog.heard(beat)
            now = time.monotonic()
            # For most of a longer gap this process was suspended, and perhaps the others with it.
            problem = watchdog.tick(min(now - last, 2 * BEAT_SECONDS))
            last = now
            if problem is not None:
                await self._give_up(problem)
                return

    async def _give_up(self, problem: str) -> None:
        """Fails the probes, writes where the processes hang, and ends the server."""
        self.lifetime.failure = problem
        log.error("%s: the server ends", problem)
        for child in self.children:
            log.error("stacks of the %s process (pid %d):", child.role, child.pid)
            child.dump_stacks()
            await asyncio.sleep(STACKS_SECONDS)
        self.manager.fail(problem, Failure.INTERNAL)
        self._end(Ending(1, problem))
