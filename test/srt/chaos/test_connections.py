"""No client can hold a connection, a slot or the server by being slow, idle or many."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack

import httpx
import pytest
from chaos_rig import (
    ENDLESS,
    PATIENCE,
    SCALE,
    Start,
    assert_serves,
    eventually,
    metric,
    raw_connections,
    received,
    running_requests,
)
from running_server import RunningServer

LIMIT = 24
HEAD = b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@pytest.fixture(scope="module")
def server(start: Start) -> Iterator[RunningServer]:
    timeouts = [f"--{name}-timeout" for name in ("header", "body", "write")]
    flags = [part for flag in timeouts for part in (flag, "1")]
    yield start("--max-connections", str(LIMIT), *flags).wait_until_ready()


@pytest.fixture(autouse=True)
def unharmed(server: RunningServer) -> Iterator[None]:
    yield
    eventually(lambda: running_requests(server) == 0, "all slots are free")
    assert_serves(server)
    assert "Traceback" not in server.output, server.output


def test_idle_and_slow_headers_are_disconnected(server: RunningServer) -> None:
    with ExitStack() as stack:
        clients = []
        for sent in (b"", b"GET /health HT", HEAD):
            clients += stack.enter_context(raw_connections(server, LIMIT // 4, sent))
        assert [received(client) for client in clients] == [b""] * len(clients)


def test_headers_that_drip_are_disconnected(server: RunningServer) -> None:
    with raw_connections(server, 1, HEAD + b"X-Slow: ") as (client,):

        def gone() -> bool:
            try:
                client.sendall(b"a")
                time.sleep(0.05)
            except OSError:
                return True
            return False

        eventually(gone, "the connection is closed")


def test_slow_bodies_are_refused(server: RunningServer) -> None:
    part = HEAD + b'Content-Length: 1000\r\n\r\n{"text": '
    with raw_connections(server, LIMIT // 2, part) as clients:
        for client in clients:
            head, _, body = received(client).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 408") and b"connection: close" in head.lower()
            assert "--body-timeout" in json.loads(body)["error"]["message"]


def test_bodies_that_drip_are_refused(server: RunningServer) -> None:
    """Each byte arrives in time, but 64 KiB would take a day."""
    with raw_connections(server, 1, HEAD + b"Content-Length: 1000000\r\n\r\n") as (client,):
        client.settimeout(0.05)
        deadline = time.monotonic() + PATIENCE
        answer = b""
        while not answer and time.monotonic() < deadline:
            client.sendall(b" ")
            try:
                answer = client.recv(100)
            except TimeoutError:
                continue
        assert answer.startswith(b"HTTP/1.1 408")


def test_a_refused_upload_does_not_keep_its_connection(server: RunningServer) -> None:
    """The answer comes before the body, which then never ends."""
    with raw_connections(server, 1, b"POST /nowhere HTTP/1.1\r\nHost: localhost\r\n") as (client,):
        client.sendall(b"Content-Length: 1000000\r\n\r\n")
        client.settimeout(0.05)
        answers = b""

        def gone() -> bool:
            nonlocal answers
            try:
                client.sendall(b" ")
                piece = client.recv(1000)
                answers += piece
                return not piece
            except TimeoutError:
                return False
            except OSError:
                return True

        eventually(gone, "the connection is closed")
        assert answers.startswith(b"HTTP/1.1 404")


def test_a_stream_that_nobody_reads_ends_and_frees_its_slots(server: RunningServer) -> None:
    before = metric(server, "num_aborted_requests_total")
    body = json.dumps({**ENDLESS, "stream": True}).encode()
    clients = [socket.socket() for _ in range(min(2 * SCALE, LIMIT // 2))]
    try:
        for client in clients:
            # The kernel takes less of the stream, so that it fills sooner.
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", server.port))
            client.sendall(HEAD + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
        eventually(
            lambda: metric(server, "num_aborted_requests_total") == before + len(clients),
            "the streams are aborted",
        )
    finally:
        for client in clients:
            client.close()


def test_connections_beyond_the_limit_are_answered(server: RunningServer) -> None:
    ask = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
    url = server.base_url
    with raw_connections(server, LIMIT, ask) as clients:
        # Answered and kept: that is what holds a place for long.
        assert all(client.recv(15).startswith(b"HTTP/1.1 200") for client in clients)
        for _ in range(3):
            refused = httpx.post(f"{url}/generate", json=ENDLESS, timeout=PATIENCE)
            assert refused.status_code == 503 and int(refused.headers["Retry-After"]) > 0
            assert "too many open connections" in refused.json()["error"]["message"]
            # Probes are answered, or a flood of clients would have the server restarted.
            assert httpx.get(f"{url}/health", timeout=PATIENCE).status_code == 200
        # A body that is larger than what fits into the kernel's buffers does not lose the answer.
        large = httpx.post(f"{url}/generate", content=b" " * 4_000_000, timeout=PATIENCE)
        assert large.status_code == 503
        clients.pop().close()
        eventually(
            lambda: httpx.get(f"{url}/v1/models", timeout=PATIENCE).status_code == 200,
            "there is room again",
        )
    assert server.output.count(f"{LIMIT} connections are open (--max-connections") == 1


def test_out_of_descriptors_is_one_line_and_no_storm(start: Start) -> None:
    server = start("--header-timeout", str(PATIENCE), max_files=64).wait_until_ready()
    assert "ulimit -n leaves room for" in server.output
    before, began = len(server.output.splitlines()), time.monotonic()
    with raw_connections(server, 28 * min(SCALE, 8), b"GET /health HTTP/1.1\r\n") as clients:
        assert clients[-1].recv(12) == b"HTTP/1.1 503"
        for _ in range(3):
            assert httpx.get(f"{server.base_url}/health", timeout=PATIENCE).status_code == 200
            busy = httpx.get(f"{server.base_url}/v1/models", timeout=PATIENCE)
            assert busy.status_code == 503
    eventually(lambda: answers(server), "the server answers once they have left")
    assert_serves(server)
    assert "Traceback" not in server.output
    minutes = 1 + int(time.monotonic() - began) // 60  # in each of which a line may come again
    assert len(server.output.splitlines()) - before <= 3 * minutes, server.output


def answers(server: RunningServer) -> bool:
    return httpx.get(f"{server.base_url}/v1/models", timeout=PATIENCE).status_code == 200
