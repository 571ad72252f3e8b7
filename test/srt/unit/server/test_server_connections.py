"""Connections in one event loop, around a small application."""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
import socket
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from mamba_eagle.config import ConfigError, ServerConfig
from mamba_eagle.server.errors import RequestError
from mamba_eagle.server.http import connections
from mamba_eagle.server.http.connections import Limits
from mamba_eagle.server.http.listener import HttpServer, tls_context
from mamba_eagle.server.serve import _bind

LIMITS = Limits(
    connections=100, spare_connections=4, header_timeout=60, body_timeout=60, write_timeout=60
)
BODY = b"x" * 300_000
WAIT_SECONDS = 120  # only what hangs takes so long


async def large_answer(scope: Scope, receive: Receive, send: Send) -> None:
    headers = [(b"content-length", str(len(BODY)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": BODY})


def listener(port: int = 0) -> socket.socket:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return _bind(ServerConfig(port=port))


@contextlib.asynccontextmanager
async def serving(
    limits: Limits = LIMITS,
    send_buffer: int = 0,
    tls: ssl.SSLContext | None = None,
    app: ASGIApp = large_answer,
) -> AsyncIterator[HttpServer]:
    bound = listener()
    if send_buffer:  # accepted sockets inherit it
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    server = HttpServer(app, bound, limits, tls)
    task = await server.start()
    try:
        yield server
    finally:
        server.end(0.1)
        await task


def url(server: HttpServer) -> str:
    return f"http://127.0.0.1:{server.listener.getsockname()[1]}"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> str:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl on this machine to make a certificate")
    path = tmp_path_factory.mktemp("tls") / "both.pem"
    name = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    made = ["-newkey", "rsa:2048", "-nodes", "-keyout", str(path), "-out", f"{path}.crt"]
    subprocess.run(["openssl", "req", "-x509", *made, *name], check=True, capture_output=True)
    path.write_text(path.read_text() + Path(f"{path}.crt").read_text())
    return str(path)


def test_tls_serves_who_shakes_hands(certificate: str) -> None:
    """And who does not is cut off after --header-timeout."""

    context = tls_context(ServerConfig(ssl_certfile=certificate))

    async def test() -> None:
        async with serving(tls=context) as server:
            address = url(server).replace("http", "https")
            trusted = ssl.create_default_context(cafile=certificate)
            async with httpx.AsyncClient(verify=trusted, timeout=WAIT_SECONDS) as client:
                assert (await client.get(address)).content == BODY
        async with serving(LIMITS._replace(header_timeout=0.2), tls=context) as server:
            reader, writer = await asyncio.open_connection(*server.listener.getsockname())
            assert await asyncio.wait_for(reader.read(), WAIT_SECONDS) == b""
            writer.close()

    asyncio.run(test())


def test_a_head_that_came_while_the_process_stood_still_is_served() -> None:
    """Then the loop reads it, and the timer is due before the request's task has begun."""

    async def test() -> None:
        async with serving() as server:
            reader, writer = await asyncio.open_connection(*server.listener.getsockname())
            open_ones = server.server_state.connections
            await asyncio.wait_for(until(lambda: bool(open_ones)), WAIT_SECONDS)
            (connection,) = open_ones
            connection.data_received(b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
            connection._give_up_on_headers()
            assert (await asyncio.wait_for(reader.read(), WAIT_SECONDS)).endswith(BODY)
            writer.close()

    asyncio.run(test())


def test_keys_that_cannot_be_used_are_named(certificate: str) -> None:
    for settings, problem in (
        ({"ssl_certfile": "/no/file"}, "--ssl-certfile /no/file: No such file"),
        ({"ssl_keyfile": "x"}, "--ssl-keyfile x needs --ssl-certfile"),
        ({"ssl_certfile": f"{certificate}.crt"}, f"--ssl-certfile {certificate}.crt: "),
    ):
        with pytest.raises(ConfigError, match=re.escape(problem)):
            tls_context(ServerConfig(**settings))


def test_replies_leave_at_once() -> None:
    """Without TCP_NODELAY each reply on a kept connection takes 40 ms more."""

    async def test() -> None:
        async with serving() as server, httpx.AsyncClient(timeout=WAIT_SECONDS) as client:
            for _ in range(2):
                assert (await client.get(url(server))).content == BODY
            (connection,) = server.server_state.connections
            accepted = connection.transport.get_extra_info("socket")
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)

    asyncio.run(test())


async def all_closed(server: HttpServer) -> None:
    async def look() -> None:
        while server.server_state.connections:
            await asyncio.sleep(0.01)

    await asyncio.wait_for(look(), WAIT_SECONDS)


async def bytes_read(
    server: HttpServer, pause: float, once_cut_off: bool = False, piece_size: int = 8192
) -> int:
    """How much of the answer arrives at a client that reads so many bytes at a time, with pauses,
    or none before the server has closed its connection."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
    client.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(client, server.listener.getsockname())
    await loop.sock_sendall(client, b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    while not server.server_state.connections:
        await asyncio.sleep(0.01)
    if once_cut_off:
        await all_closed(server)
    total = 0
    with contextlib.closing(client), contextlib.suppress(ConnectionResetError):
        while piece := await loop.sock_recv(client, piece_size):
            total += len(piece)
            await asyncio.sleep(pause)
    return total


def test_a_slow_reader_gets_everything_and_one_that_stops_is_cut_off() -> None:
    limits = LIMITS._replace(write_timeout=1.0)

    async def test() -> None:
        async with serving(limits, send_buffer=8192) as server:
            # 37 pieces or more: together they take longer than the time-out.
            assert await bytes_read(server, pause=0.04) > len(BODY)
            await all_closed(server)
            assert await bytes_read(server, pause=0, once_cut_off=True) < len(BODY)

    asyncio.run(test())


def test_a_reader_that_always_takes_a_little_is_cut_off_and_its_request_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "MIN_READ", len(BODY))
    ended: list[str] = []

    async def answers(scope: Scope, receive: Receive, send: Send) -> None:
        await large_answer(scope, receive, send)
        ended.append((await receive())["type"])

    async def test() -> None:
        limits = LIMITS._replace(write_timeout=1.0)
        async with serving(limits, send_buffer=8192, app=answers) as server:
            assert await bytes_read(server, pause=0.1, piece_size=4096) < len(BODY)
            await asyncio.wait_for(until(lambda: ended == ["http.disconnect"]), WAIT_SECONDS)

    asyncio.run(test())


# HttpServer where only eight more descriptors can be opened than it has itself.
SMALL_SERVER = """
import asyncio, logging, os, resource, sys
sys.path.insert(0, UNIT)
from test_server_connections import LIMITS, HttpServer, large_answer, listener

logging.basicConfig(level="WARNING")

async def main():
    server = HttpServer(large_answer, listener(), LIMITS)
    task = await server.start()
    limit = len(os.listdir("/proc/self/fd")) + 8
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    print(server.listener.getsockname()[1], flush=True)
    await task

asyncio.run(main())
"""


def test_running_out_of_descriptors_is_one_line() -> None:
    code = SMALL_SERVER.replace("UNIT", repr(str(Path(__file__).parent)))
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(30)]
        with pytest.raises(httpx.TimeoutException):
            httpx.get(f"http://127.0.0.1:{port}", timeout=2.5)  # accepting has been retried twice
        for client in clients:
            client.close()
        assert httpx.get(f"http://127.0.0.1:{port}", timeout=30).content == BODY
    finally:
        process.kill()
        log = process.communicate()[1]
    assert len(log.splitlines()) == 1
    assert "no connection can be accepted" in log and "ulimit -n" in log


HEAD = b"POST / HTTP/1.1\r\nHost: a\r\n"
ENDLESS = {
    "a header": (HEAD + b"x: ", b"y" * 32_768),
    "headers": (HEAD, b"x: y\r\n" * 5000),
    "an address": (b"GET /", b"y" * 32_768),
    "trailers": (
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n",
        b"x: y\r\n" * 5000,
    ),
    "the head of the next request": (
        b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" + HEAD,
        b"x: y\r\n" * 5000,
    ),
}


@pytest.mark.parametrize("beginning, more", ENDLESS.values(), ids=ENDLESS)
def test_a_head_without_end_ends_its_connection(beginning: bytes, more: bytes) -> None:
    """Whichever parser there is; no timer would end it so soon."""

    async def test() -> None:
        async with serving(LIMITS._replace(header_timeout=600, body_timeout=600)) as server:
            reader, writer = await asyncio.open_connection(*server.listener.getsockname())
            writer.write(beginning)
            reading = asyncio.ensure_future(reader.read())
            sent = 0
            with contextlib.suppress(ConnectionError):
                while sent < 64 * 2**20 and not reading.done():
                    writer.write(more)
                    sent += len(more)
                    await writer.drain()
                    await asyncio.sleep(0)
            assert sent < 64 * 2**20
            with contextlib.suppress(ConnectionError):
                await reading
            writer.close()
            async with httpx.AsyncClient(timeout=WAIT_SECONDS) as client:  # others are served
                long = {"x": "y" * 10_000}
                assert (await client.get(url(server), headers=long)).content == BODY
                assert (await client.post(url(server), content=b"z" * 300_000)).content == BODY

    asyncio.run(test())


def head_of(size: int, sent: str) -> bytes:
    """A request whose head has so many bytes, about, in one of the ways to be long."""
    if sent == "address":
        return b"GET /" + b"y" * size + b" HTTP/1.1\r\nHost: a\r\n\r\n"
    many = b"".join(b"x-%05d: %090d\r\n" % (i, i) for i in range(size // 101))
    return HEAD + (many if sent == "headers" else b"x: " + b"y" * size + b"\r\n") + b"\r\n"


@pytest.mark.parametrize("sent", ["header", "headers", "address"])
def test_a_head_above_its_limit_is_refused(sent: str) -> None:
    async def test() -> None:
        async with serving() as server:
            refused = b"400" if sent == "address" else b"431"  # its parser has a limit of its own
            for size, status in ((60_000, b"200"), (70_000, refused), (90_000, refused)):
                reader, writer = await asyncio.open_connection(*server.listener.getsockname())
                writer.write(head_of(size, sent))
                answer = await asyncio.wait_for(reader.read(1000), WAIT_SECONDS)
                assert answer.split()[1] == status, (size, answer)
                writer.close()

    asyncio.run(test())


def test_every_pipelined_request_learns_that_its_client_has_left() -> None:
    """uvicorn lets the last one know alone; the others would write to a closed connection."""
    told: list[str] = []

    async def waits(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        told.append(scope["path"])

    async def test() -> None:
        async with serving(app=waits) as server:
            _, writer = await asyncio.open_connection(*server.listener.getsockname())
            requests = [b"GET /%d HTTP/1.1\r\nHost: a\r\n\r\n" % number for number in range(3)]
            writer.write(b"".join(requests))
            await asyncio.wait_for(until(lambda: bool(server.server_state.tasks)), WAIT_SECONDS)
            writer.transport.abort()
            await asyncio.wait_for(until(lambda: told == ["/0"]), WAIT_SECONDS)

    asyncio.run(test())


@pytest.mark.parametrize("length", [None, 6])
@pytest.mark.parametrize("keep", ["", "Connection: keep-alive\r\n"])
def test_a_client_of_http_1_0_gets_no_chunks(length: int | None, keep: str) -> None:
    """They came in the middle of its text. What has no length ends with the connection."""

    async def streams(scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-length", b"%d" % length)] if length else []
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for piece in (b"abc", b"", b"def"):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body"})

    async def test() -> None:
        async with serving(app=streams) as server:
            reader, writer = await asyncio.open_connection(*server.listener.getsockname())
            writer.write(f"GET / HTTP/1.0\r\n{keep}\r\n".encode())
            head, body = (await asyncio.wait_for(reader.read(), WAIT_SECONDS)).split(b"\r\n\r\n")
            assert body == b"abcdef" and b"transfer-encoding" not in head
            assert b"connection: close" in head and (b"content-length: 6" in head) == bool(length)
            writer.close()

    asyncio.run(test())


@pytest.mark.parametrize("size, is_read", [(1, False), (300, True)])
def test_a_body_in_too_many_pieces_is_refused(size: int, is_read: bool) -> None:
    received: list[int] = []
    refused: list[int] = []

    async def reads(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            received.append(len(await Request(scope, receive).body()))
        except RequestError as error:
            refused.append(error.status)
            await error.response()(scope, receive, send)
        else:
            await Response()(scope, receive, send)

    async def test() -> None:
        async with serving(app=reads) as server:
            _, writer = await asyncio.open_connection(*server.listener.getsockname())
            chunk = b"%x\r\n%s\r\n" % (size, b"x" * size)
            with contextlib.suppress(ConnectionError):
                writer.write(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunk * 20_000)
                writer.write(b"0\r\n\r\n")
                await writer.drain()
            await asyncio.wait_for(until(lambda: bool(received or refused)), WAIT_SECONDS)
            assert (received, refused) == (([size * 20_000], []) if is_read else ([], [400]))
            writer.close()

    asyncio.run(test())


OFFER = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
BODIES = {
    "length": b"Content-Length: 5\r\n\r\nhello",
    "chunks": b"Transfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n",
    "none": b"\r\n",
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_an_offer_of_another_protocol_is_declined_and_the_request_served(
    body: bytes, size: int
) -> None:
    """Each stock client of Java's offers HTTP/2 with its first request."""
    heard: list[bytes] = []

    async def reads(scope: Scope, receive: Receive, send: Send) -> None:
        heard.append(await Request(scope, receive).body())
        await Response()(scope, receive, send)

    async def test() -> None:
        async with serving(app=reads) as server:
            _, writer = await asyncio.open_connection(*server.listener.getsockname())
            sent = (HEAD + OFFER + body) * 2 + HEAD + b"Content-Length: 2\r\n\r\nhi"
            for at in range(0, len(sent), size):
                writer.write(sent[at : at + size])
                await asyncio.sleep(0)
            await asyncio.wait_for(until(lambda: len(heard) == 3), WAIT_SECONDS)
            assert heard == [b"hello" if b"llo" in body else b""] * 2 + [b"hi"]
            writer.close()
            for form in (b"/x", b"http://a/x", b"*", b"a:1"):  # of a request to a proxy
                reader, writer = await asyncio.open_connection(*server.listener.getsockname())
                writer.write(b"CONNECT %s HTTP/1.1\r\nHost: a\r\n\r\n" % form)
                answer = await asyncio.wait_for(reader.read(), WAIT_SECONDS)
                assert answer.split()[1] == b"400", (form, answer)
                writer.close()

    asyncio.run(test())


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0.01)
