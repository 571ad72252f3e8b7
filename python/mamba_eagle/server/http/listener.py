"""Accepts connections and hands them to uvicorn.

asyncio's own server would log a traceback for each attempt to accept without a free descriptor, by
the thousand, and cannot be paused.
"""

import asyncio
import contextlib
import errno
import importlib
import logging
import socket
import ssl
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

import uvicorn
from starlette.types import ASGIApp

from mamba_eagle.config import ConfigError, ServerConfig
from mamba_eagle.logs import Rarely
from mamba_eagle.server.http.connections import KEEP_ALIVE_SECONDS, LOG_SECONDS, Connection, Limits

log = logging.getLogger("mamba_eagle.server")
log.addFilter(Rarely("no connection can be accepted", LOG_SECONDS))

BACKLOG = 2048  # connections that the kernel holds until they are accepted
FULL_PAUSE = 0.05  # seconds without accepting, when there is not even a spare place
OUT_OF_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
OUT_OF_RESOURCES_PAUSE = 1.0


class HttpServer(uvicorn.Server):
    """Serves ``app`` on a bound socket: accepts one connection per turn of the event loop, and
    pauses when it must. Signals and log lines are the launcher's business."""

    def __init__(
        self,
        app: ASGIApp,
        listener: socket.socket,
        limits: Limits,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=Connection,
                ws="none",
                lifespan="off",
                log_level="warning",
                access_log=False,
                log_config=None,  # its lines go where all others go
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
            )
        )
        self.listener = listener
        self._tls: dict[str, Any] = {}
        if tls is not None:
            self._tls = {"ssl": tls, "ssl_handshake_timeout": limits.header_timeout}
        self._limits = limits
        self._connecting: set[asyncio.Task[None]] = set()
        self._pause_timer: asyncio.TimerHandle | None = None
        self.servers = []  # asyncio's; this one stands for them

    async def start(self) -> asyncio.Task[None]:
        """Listens. The task ends when the server has.

        Raises: OSError when another server listens on the address.
        """
        self._loop = asyncio.get_running_loop()
        self.listener.setblocking(False)
        self.listener.listen(BACKLOG)
        self._loop.add_reader(self.listener, self._accept)
        serving = self._loop.create_task(self.serve())
        while not self.started and not serving.done():
            await asyncio.sleep(0.01)
        return serving

    def end(self, seconds: float) -> None:
        """Closes idle connections, and the others when they are answered or after ``seconds``."""
        self.config.timeout_graceful_shutdown = seconds  # type: ignore[assignment]
        self.should_exit = True

    # ── connections ──────────────────────────────────────────────────────────────────────────

    def _accept(self) -> None:
        most = self._limits.connections + self._limits.spare_connections
        if len(self.server_state.connections) + len(self._connecting) >= most:
            self._pause(FULL_PAUSE)
            return
        try:
            client, _ = self.listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return  # the client has left already
        except OSError as error:
            if error.errno not in OUT_OF_RESOURCES:
                raise
            log.warning(
                "no connection can be accepted: %s; trying again every second "
                "(raise ulimit -n, or lower --max-connections)",
                error.strerror,
            )
            self._pause(OUT_OF_RESOURCES_PAUSE)
            return
        task = self._loop.create_task(self._connect(client))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _connect(self, client: socket.socket) -> None:
        client.setblocking(False)
        try:
            await self._loop.connect_accepted_socket(self._make_protocol, client, **self._tls)
        except OSError as error:  # also when a handshake has failed
            log.debug("a client left while it was being connected: %s", error)
            client.close()

    def _make_protocol(self) -> asyncio.Protocol:
        uvicorns = {"config": self.config, "server_state": self.server_state, "app_state": {}}
        return Connection(self._limits, **uvicorns)

    def _pause(self, seconds: float) -> None:
        self._loop.remove_reader(self.listener)
        self._pause_timer = self._loop.call_later(
            seconds, self._loop.add_reader, self.listener, self._accept
        )

    # ── instead of uvicorn's ─────────────────────────────────────────────────────────────────

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop.remove_reader(self.listener)
        if self._pause_timer is not None:
            self._pause_timer.cancel()
        self.listener.close()
        await super().shutdown(sockets)


def tls_context(config: ServerConfig) -> ssl.SSLContext | None:
    """None for plain HTTP.

    Raises: ConfigError for a certificate or key that cannot be used.
    """
    if not config.ssl_certfile:
        if config.ssl_keyfile:
            raise ConfigError([f"--ssl-keyfile {config.ssl_keyfile} needs --ssl-certfile"])
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    flags = f"--ssl-certfile {config.ssl_certfile}"
    if config.ssl_keyfile:
        flags += f" --ssl-keyfile {config.ssl_keyfile}"

    def no_password() -> str:
        raise ConfigError([f"{flags}: the key has a password; give one without"])

    try:
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile or None, no_password)
    except OSError as error:  # SSLError as well
        reason = error.strerror or str(error) or "not a certificate with its private key"
        raise ConfigError([f"{flags}: {reason}"]) from None
    return context


T = TypeVar("T")


def run(main: Coroutine[Any, Any, T]) -> T:
    """As ``asyncio.run``. Each token of a stream is an event of the loop: with uvloop and
    httptools, which uvicorn finds by itself, it costs this process a sixth less time."""
    try:
        uvloop = importlib.import_module("uvloop")  # not available on every system
    except ImportError:
        return asyncio.run(main)
    return uvloop.run(main)
