"""Whichever process is killed under load, and however clients leave, every client gets an end and
nothing is left."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
from chaos_rig import (
    ENDLESS,
    PATIENCE,
    SCALE,
    SEED,
    Start,
    Stream,
    assert_serves,
    eventually,
    generate_body,
    report,
    running_requests,
)
from running_server import RunningServer, assert_all_ended, is_running

from benchmark.lib.soak import leaks

ROLES = ("runner", "scheduler", "server")
CLIENTS = 12  # half of them stream
LEAVING = 150 * SCALE
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing resets the connection


class PlainRequest:
    """A request for a whole reply, sent by a thread."""

    def __init__(self, server: RunningServer) -> None:
        self.reply: httpx.Response | None = None
        self.problem: httpx.HTTPError | None = None  # why there is no reply
        url = f"{server.base_url}/generate"
        self._thread = threading.Thread(target=self._post, args=(url,), daemon=True)
        self._thread.start()

    def _post(self, url: str) -> None:
        try:
            self.reply = httpx.post(url, json=ENDLESS, timeout=PATIENCE)
        except httpx.HTTPError as error:
            self.problem = error

    def wait(self) -> httpx.Response | None:
        """None if the connection was lost."""
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive(), "the request hangs"
        assert not isinstance(self.problem, httpx.TimeoutException), self.problem
        return self.reply


def kill_under_load(start: Start, role: str, delay: float) -> int:
    """The number of clients, all of which got an end that says why."""
    server = start().wait_until_ready()
    plain = [PlainRequest(server) for _ in range(CLIENTS // 2)]
    streams = [Stream(server, ENDLESS) for _ in range(CLIENTS // 2)]
    eventually(lambda: all(stream.events for stream in streams), "every stream has begun")
    eventually(lambda: running_requests(server) == CLIENTS, "every request runs")
    time.sleep(delay)
    pids = server.pids()
    os.kill(pids[role], signal.SIGKILL)
    if role == "server":
        assert server.wait(PATIENCE) == -signal.SIGKILL
        assert [request.wait() for request in plain] == [None] * len(plain)
        assert all(stream.lost() for stream in streams)
        eventually(lambda: not any(map(is_running, pids.values())), "its children have ended")
    else:
        assert server.wait(PATIENCE) == 1
        killed = f"the {role} process (pid {pids[role]}) was killed by SIGKILL"
        assert killed in server.output
        for request in plain:
            reply = request.wait()
            assert reply is not None and reply.status_code == 500
            assert killed in reply.json()["error"]["message"]
        for stream in streams:
            assert killed in stream.wait()["error"]["message"]
        assert_all_ended(server)
    assert "Traceback" not in server.output, server.output
    server.stop()
    return CLIENTS


def test_every_client_of_a_killed_process_gets_an_end(start: Start) -> None:
    rng = random.Random(SEED)
    roles = ROLES * SCALE
    with ThreadPoolExecutor(2) as pool:
        tasks = [pool.submit(kill_under_load, start, role, rng.uniform(0, 0.5)) for role in roles]
        clients = sum(task.result() for task in tasks)
    report("kills", len(roles), "kills", seed=SEED, clients=clients, ended=clients, left=0)


def leave(server: RunningServer, moment: int) -> None:
    """A client that goes within its request, at the first event or before it, with a reset or
    without."""
    body = json.dumps({**ENDLESS, "stream": moment % 2 == 0}).encode()
    head = b"POST /generate HTTP/1.1\r\nHost: localhost\r\n"
    request = head + f"Content-Length: {len(body)}\r\n\r\n".encode() + body
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE) as client:
        if moment % 3 == 0:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        client.sendall(request[: len(request) - (moment % 5 == 0)])  # some bodies are not whole
        if moment % 4 == 0 and moment % 5:  # these stream
            assert client.recv(100)


def test_a_storm_of_clients_that_leave_harms_nobody(plain: RunningServer) -> None:
    body = generate_body(150)
    expected = Stream(plain, body).wait()["text"]
    with ThreadPoolExecutor(16) as pool:
        leaving = [pool.submit(leave, plain, moment) for moment in range(LEAVING)]
        staying = [Stream(plain, body) for _ in range(4)]
        for task in leaving:
            task.result()
    assert [stream.wait()["text"] for stream in staying] == [expected] * len(staying)
    eventually(lambda: running_requests(plain) == 0, "all slots are free")
    with httpx.Client(base_url=plain.base_url, timeout=PATIENCE) as client:
        assert client.post(f"/flush_cache?timeout={PATIENCE:g}").status_code == 200
        assert leaks(client.get("/server_info").json()) == []
    assert_serves(plain)
    assert "Traceback" not in plain.output, plain.output
    report("disconnects", LEAVING, "clients that left", streams_kept=len(staying))
