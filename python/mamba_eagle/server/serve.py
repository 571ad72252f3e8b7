"""Serves HTTP: the port is taken, the engine started, requests answered, and all ended together.

port bound ─▶ scheduler, runner started ─▶ Ready ─▶ listening ─▶ an Ending ─▶ all ended
"""

import asyncio
import gc
import importlib
import logging
import signal
import socket
from typing import Any

from mamba_eagle import logs
from mamba_eagle.chat.format import chat_problems
from mamba_eagle.config import ConfigError, ServerConfig
from mamba_eagle.core import Failure
from mamba_eagle.message.channel import new_socket_dir, remove_socket_dir
from mamba_eagle.message.lifetime import REFUSED
from mamba_eagle.resolve import resolve
from mamba_eagle.server.app import make_app
from mamba_eagle.server.bodies.grammars import whitespace_problems
from mamba_eagle.server.engine.children import Child, end_children
from mamba_eagle.server.engine.launch import SHUTTING_DOWN, Ending, Launch
from mamba_eagle.server.http.auth import api_keys
from mamba_eagle.server.http.connections import (
    LOG_SECONDS,
    Limits,
    descriptor_problems,
    room_for_connections,
)
from mamba_eagle.server.http.listener import HttpServer, run, tls_context
from mamba_eagle.server.http.origins import exposure_warning, origin_problems
from mamba_eagle.server.lifetime import Gate
from mamba_eagle.server.state import ServerState

CLOSE_SECONDS = 1.0  # for connections to close; their requests have been answered by then

log = logging.getLogger("mamba_eagle.server")


def launch(config: ServerConfig) -> int:
    """Serves until it is stopped. Returns the exit code.

    Raises: ConfigError with every setting that cannot work.
    """
    logs.set_up(config.log_level, config.log_format, "server")
    given, config = config, _resolve(config)
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
        ending = run(HttpLaunch(config, http_socket, socket_dir, given).run())
    finally:
        http_socket.close()
        remove_socket_dir(socket_dir)
    return _report(ending)


def _report(ending: Ending) -> int:
    if ending.message:
        logs.complain(f"mamba-eagle: {ending.message}")
    return ending.code


def _resolve(config: ServerConfig) -> ServerConfig:
    """Raises: ConfigError"""
    problems = descriptor_problems()
    if config.otlp_traces_endpoint:
        problems += _missing("--otlp-traces-endpoint", "mamba_eagle.metrics.tracing", "otel")
    if config.nnodes > 1:
        problems += _missing("--nnodes", "mamba_eagle.server.engine.ray_nodes", "ray")
    for check in (api_keys, tls_context):
        try:
            check(config)
        except ConfigError as error:
            problems += error.problems
    if not problems:
        problems += origin_problems(config)
    problems += chat_problems(config) + whitespace_problems(config)
    try:
        config = resolve(config)
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError(problems)
    return config


def _missing(flag: str, module: str, extra: str) -> list[str]:
    """What a flag needs of an extra that is not installed."""
    try:
        importlib.import_module(module)
    except ImportError as error:
        remedy = f"pip install 'mamba-eagle[{extra}]'"
        return [f"{flag} needs packages that are not installed ({error}): {remedy}"]
    return []


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


class HttpLaunch(Launch):
    """Serves HTTP, until a signal comes."""

    def __init__(
        self, config: ServerConfig, http_socket: socket.socket, socket_dir: str, given: ServerConfig
    ) -> None:
        super().__init__(config, socket_dir, given)
        self.http_socket = http_socket
        self.is_serving = False
        self.drain: asyncio.Task[None] | None = None

    async def run(self) -> Ending:
        loop = asyncio.get_running_loop()
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # which nohup makes it
            numbers.append(signal.SIGHUP)
        for number in numbers:
            hung_up = number == signal.SIGHUP
            loop.add_signal_handler(number, self._hang_up if hung_up else self._stop)
        try:
            return await super().run()
        finally:
            # Only tidying is left; an impatient second Ctrl-C must not end that in a traceback.
            for number in numbers:
                loop.remove_signal_handler(number)
                signal.signal(number, signal.SIG_IGN)

    def say(self, line: str) -> None:
        logs.say(line)

    # ── stop ─────────────────────────────────────────────────────────────────────────────────

    def _stop(self) -> None:
        """A signal came: the first lets open requests finish, the second does not."""
        if self.is_serving and self.drain is None:
            self.drain = asyncio.get_running_loop().create_task(self._drain())
        else:
            self.end(Ending(0, ""))

    def _hang_up(self) -> None:
        """The terminal was closed. A shell passes SIGHUP on, and the kernel sends another as the
        shell ends: the second says nothing new."""
        if self.drain is None:
            self._stop()

    def account_of(self, child: Child) -> str:
        """What a refusal said stands just above, unless another node reads it."""
        refused = child.process.returncode == REFUSED
        return child.how_it_ended(quotes=not refused or self.config.nnodes > 1)

    async def _drain(self) -> None:
        seconds = self.config.shutdown_timeout
        if self.lifetime.open_requests:
            self.say(
                f"Shutting down: waiting up to {seconds:g} s for open requests "
                f"({self.lifetime.open_requests}); a second signal ends them at once"
            )
        if self.judge is not None:
            self.judge.hurry()
        left = await self.lifetime.drain(seconds)
        text = f"cut off after --shutdown-timeout {seconds:g}: {left} open requests"
        self.end(Ending(0, text if left else ""))

    # ── serve ────────────────────────────────────────────────────────────────────────────────

    async def serve(self, state: ServerState) -> None:
        # A full collection stops all threads, and what was loaded so far is never garbage here.
        # In a process that uses an Engine as a library it may be.
        gc.collect()
        gc.freeze()
        app = Gate(make_app(state), self.lifetime)
        server = HttpServer(app, self.http_socket, self._limits(), tls_context(self.config))
        try:
            serving = await server.start()
        except OSError as error:
            self.end(_port_taken(self.config, error))
            return
        watching = asyncio.get_running_loop().create_task(self.watch())
        host = f"[{self.config.host}]" if ":" in self.config.host else self.config.host
        if (warning := exposure_warning(self.config)) is not None:
            log.warning(warning)
        if self.config.simulate_acc_len:
            log.warning(
                "SIMULATED: --simulate-acc-len forces %g accepted tokens per step and request; "
                "texts mean nothing, and every reply says so in its headers",
                self.config.simulate_acc_len,
            )
        self.is_serving = True
        scheme = "https" if self.config.ssl_certfile else "http"
        self.say(f"Server is ready at {scheme}://{host}:{self.config.port}{self.config.root_path}")
        parts: set[asyncio.Future[Any]] = {serving, watching, self.ending}
        await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
        if not self.ending.done():
            name, task = ("watchdog", watching) if watching.done() else ("HTTP server", serving)
            log.error("the %s failed", name, exc_info=task.exception())
            self.end(Ending(1, f"the {name} ended unexpectedly"))
        watching.cancel()
        # Open requests get their error now, while their connections are still there.
        self.manager.fail(SHUTTING_DOWN, Failure.UNAVAILABLE)
        # Clients that do not read are cut off, which is not worth a traceback.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        server.end(CLOSE_SECONDS)
        ending = asyncio.to_thread(end_children, self.children)
        await asyncio.gather(serving, ending, watching, return_exceptions=True)

    def _limits(self) -> Limits:
        """The settings, with no more connections than there are descriptors for."""
        config = self.config
        connections, spare = room_for_connections(config.max_connections)
        if connections < config.max_connections:
            log.warning(
                "--max-connections %d: ulimit -n leaves room for %d; further ones are answered 503",
                config.max_connections,
                connections,
            )
        return Limits(
            connections, spare, config.header_timeout, config.body_timeout, config.write_timeout
        )
