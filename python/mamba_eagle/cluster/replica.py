"""One server as a child process, and requests passed on to it byte by byte."""

import asyncio
import os
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import NamedTuple

import httpx

from mamba_eagle.message.lifetime import module_command

# Of one connection only (RFC 9110 section 7.6.1), or what the next hop computes anew.
HOP_HEADERS = frozenset(
    ("connection", "content-length", "host", "keep-alive", "te", "trailer", "transfer-encoding")
)
POLL_SECONDS = 0.2
CHARSET = "latin-1"  # of headers, as Starlette reads them: no byte changes


class Forwarded(NamedTuple):
    """A request as the ingress took it. ``prompt`` is what a router compares prefixes of."""

    prompt: str
    method: str
    path: str  # with the query
    headers: list[tuple[str, str]]
    body: bytes


class EventSource(NamedTuple):
    """A replica as a router by events knows it: its sockets as --kv-events-config names them, and
    its server."""

    endpoint: str
    replay_endpoint: str
    url: str = ""


class Head(NamedTuple):
    """How a reply begins; its body follows in pieces."""

    status: int
    headers: list[tuple[str, str]]


class ServerChild:
    """A server on a free port of this machine."""

    def __init__(self, flags: Sequence[str], host: str = "127.0.0.1") -> None:
        port = free_port()
        self.url = f"http://{host}:{port}"
        command = [*module_command("mamba_eagle.cluster.guarded_server"), str(os.getpid())]
        # The last of two equal flags counts.
        command += [*flags, "--host", host, "--port", str(port)]
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        self.client = httpx.AsyncClient(
            base_url=self.url,
            timeout=None,  # how long a request may take is for the server to decide
            trust_env=False,  # a proxy of the environment is not meant for servers of this machine
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
        )

    async def wait_until_ready(self, seconds: float) -> None:
        """Raises: RuntimeError if the server ends or takes longer."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                code = self.process.returncode
                raise RuntimeError(f"the server ended with exit code {code}; see its log")
            try:
                if (await self.client.get("/ready", timeout=5)).status_code == 200:
                    return
            except httpx.HTTPError:
                await asyncio.sleep(POLL_SECONDS)
        self.stop()
        raise RuntimeError(f"the server was not ready within {seconds:.0f} s")

    async def check_health(self) -> None:
        """Raises: RuntimeError or httpx.HTTPError if the server must be restarted."""
        if self.process.poll() is not None:
            raise RuntimeError(f"the server ended with exit code {self.process.returncode}")
        (await self.client.get("/health", timeout=10)).raise_for_status()

    def stop(self, seconds: float = 40.0) -> None:
        """Lets open requests finish (--shutdown-timeout), and kills what is left."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(seconds)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


async def forward(client: httpx.AsyncClient, request: Forwarded) -> AsyncIterator[Head | bytes]:
    """The reply: its head, then its body as it comes. Leaving the loop ends the request."""
    headers = httpx.Headers(request.headers, encoding=CHARSET)
    sent = client.stream(request.method, request.path, headers=headers, content=request.body)
    async with sent as reply:
        raw = (
            (name.lower().decode(CHARSET), value.decode(CHARSET))
            for name, value in reply.headers.raw
        )
        yield Head(reply.status_code, end_to_end(raw))
        async for piece in reply.aiter_raw():
            yield piece


def end_to_end(headers: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Without those that belong to one connection."""
    return [(name, value) for name, value in headers if name.lower() not in HOP_HEADERS]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
