"""What the chaos tests share: raw connections, streams in threads, and how much of all there is."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import httpx
from running_server import RunningServer

from mamba_eagle.bench import facts, results

# Multiplies the counts of clients and rounds: 1 for a run in minutes.
SCALE = int(os.environ.get("MAMBA_EAGLE_CHAOS_SCALE", "1"))
SEED = int(os.environ.get("MAMBA_EAGLE_CHAOS_SEED", "1"))  # of all that is random
# A file to which counts of what was done are appended; "": none.
RESULTS = os.environ.get("MAMBA_EAGLE_CHAOS_RESULTS", "")
PATIENCE = 120.0  # seconds; only what hangs takes so long
# Which drafter there is matters to none of these tests; without one a server starts fastest.
FLAGS = ("--speculative-algorithm", "NONE", "--cpu-threads", "1")
T = TypeVar("T")
Start = Callable[..., RunningServer]  # the fixture: flags and ``max_files`` go in


def generate_body(tokens: int, **fields: Any) -> dict[str, Any]:
    """A /generate body whose output has exactly ``tokens`` tokens."""
    sampling = {"max_new_tokens": tokens, "ignore_eos": True, "temperature": 0}
    return {"input_ids": [5, 6, 7], "sampling_params": sampling, **fields}


ENDLESS = generate_body(8000)


def eventually(look: Callable[[], T | None], what: str) -> T:
    """The first result of ``look`` that is true."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        if result := look():
            return result
        time.sleep(0.02)
    raise AssertionError(f"not within {PATIENCE:g} s: {what}")


class Stream:
    """A streamed request that a thread reads to its end."""

    def __init__(self, server: RunningServer, body: dict[str, Any]) -> None:
        self.events: list[dict[str, Any]] = []
        self.is_complete = False  # [DONE] has come
        self.problem: str | None = None
        self._thread = threading.Thread(target=self._read, args=(server, body), daemon=True)
        self._thread.start()

    def _read(self, server: RunningServer, body: dict[str, Any]) -> None:
        url = f"{server.base_url}/generate"
        try:
            with httpx.stream(
                "POST", url, json={**body, "stream": True}, timeout=PATIENCE
            ) as reply:
                if reply.status_code != 200:
                    self.problem = f"{reply.status_code}: {reply.read().decode()}"
                    return
                for line in reply.iter_lines():
                    if line == "data: [DONE]":
                        self.is_complete = True
                    elif line.startswith("data: "):  # else a comment, which breaks a silence
                        self.events.append(json.loads(line.removeprefix("data: ")))
        except (httpx.HTTPError, ValueError) as error:
            self.problem = repr(error)

    def wait(self) -> dict[str, Any]:
        """The last event."""
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive(), "the stream hangs"
        assert self.problem is None, self.problem
        assert self.is_complete and self.events, self.events[-1:]
        return self.events[-1]

    def lost(self) -> bool:
        """Whether it ended by a lost connection, as when the server is killed."""
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive(), "the stream hangs"
        assert "Timeout" not in (self.problem or ""), self.problem
        return self.problem is not None and not self.is_complete


@contextmanager
def raw_connections(server: RunningServer, count: int, send: bytes = b"") -> Iterator[list[Any]]:
    """Sockets that have sent ``send`` and nothing else. Some may be refused."""
    sockets: list[socket.socket] = []
    try:
        for _ in range(count):
            sockets.append(socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE))
            if send:
                sockets[-1].sendall(send)
        yield sockets
    finally:
        for one in sockets:
            one.close()


def received(client: socket.socket) -> bytes:
    """All that comes until the server closes the connection."""
    parts = []
    try:
        while part := client.recv(65536):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


def running_requests(server: RunningServer) -> int:
    load = httpx.get(f"{server.base_url}/get_load", timeout=PATIENCE).json()[0]
    return int(load["num_reqs"])


def metric(server: RunningServer, name: str, label: str = "") -> float:
    """The sum of a metric's series, of those with this label; 0 while there are none."""
    text = httpx.get(f"{server.base_url}/metrics", timeout=PATIENCE).text
    lines = [line for line in text.splitlines() if line.startswith(f"mamba_eagle:{name}{{")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if label in line)


def assert_serves(server: RunningServer) -> None:
    """A new client gets an answer."""
    reply = httpx.post(f"{server.base_url}/generate", json=generate_body(4), timeout=PATIENCE)
    assert reply.status_code == 200, reply.text
    assert reply.json()["meta_info"]["completion_tokens"] == 4


def report(name: str, value: float, unit: str, **counts: Any) -> None:
    """Says what a test that has passed did, and keeps it where a file for it is given."""
    print(f"{name}: {value} {unit}, {counts}")
    if RESULTS:
        about = {"machine": facts.cpu_model(), "commit": facts.commit(), "date": facts.today()}
        line = {"name": name, "value": value, "unit": unit, **counts, "scale": SCALE, **about}
        results.append(RESULTS, [line])
