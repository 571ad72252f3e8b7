"""Three processes start together and end together, whichever of them ends first; when one is killed
under load: chaos/test_kills.py."""

from __future__ import annotations

import concurrent.futures
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from running_server import PATIENCE, RunningServer, assert_all_ended, assert_end, need_weights

from mamba_eagle.embedded import EMBEDDED_MODEL

pytestmark = pytest.mark.e2e

# The lifetime of a server does not depend on what it serves; this starts fastest.
FLAGS = ("--speculative-algorithm", "NONE")
ENDLESS = {"text": "Hello", "sampling_params": {"max_new_tokens": 8000, "ignore_eos": True}}
Start = Callable[..., RunningServer]


@pytest.fixture
def start() -> Iterator[Start]:
    """Servers that may end in a test; not waited for."""
    need_weights(EMBEDDED_MODEL)
    started: list[RunningServer] = []

    def start(*flags: str, port: int = 0, temporary: str = "") -> RunningServer:
        started.append(RunningServer(*(flags or FLAGS), port=port, temporary=temporary))
        return started[-1]

    yield start
    for server in started:
        server.stop()


class OpenRequests:
    """A plain request and a stream that are being served."""

    def __init__(self, server: RunningServer) -> None:
        self.client = httpx.Client(base_url=server.base_url, timeout=PATIENCE)
        self.pool = concurrent.futures.ThreadPoolExecutor()
        self.streaming = False
        self.plain = self.pool.submit(self.client.post, "/generate", json=ENDLESS)
        self.stream = self.pool.submit(self._stream)
        deadline = time.monotonic() + PATIENCE
        while not (self.streaming and self._both_run()):
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def _both_run(self) -> bool:
        return self.client.get("/get_load").json()[0]["num_running_reqs"] == 2

    def _stream(self) -> str:
        text = ""
        with self.client.stream("POST", "/generate", json={**ENDLESS, "stream": True}) as reply:
            for piece in reply.iter_text():
                text = (text + piece)[-2000:]
                self.streaming = True
        return text

    def assert_errors(self) -> None:
        reply, word = self.plain.result(PATIENCE), "shutting down"
        assert reply.status_code == 503
        assert word in reply.json()["error"]["message"]
        tail = self.stream.result(PATIENCE)
        assert '"error"' in tail and word in tail and "[DONE]" in tail


@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, signal.SIGINT, signal.SIGHUP],
    ids=["sigterm", "ctrl-c", "closed-terminal"],
)
def test_requested_stop_is_clean(start: Start, number: int) -> None:
    """The second signal does not wait for open requests. As a terminal is closed two may come."""
    server = start().wait_until_ready()
    requests = OpenRequests(server)

    def send() -> None:
        if number == signal.SIGTERM:
            server.process.send_signal(number)
        else:  # a terminal sends Ctrl-C to every process, and SIGHUP when it is closed
            os.killpg(server.process.pid, number)

    send()
    server.wait_for_output("Shutting down: waiting")
    if number == signal.SIGHUP:
        send()
        for _ in range(2):  # it still listens, and has seen the signal by the second time
            assert requests.client.get("/health").status_code == 200
        number = signal.SIGTERM
    send()
    assert server.wait(PATIENCE) == 0
    requests.assert_errors()
    assert_all_ended(server)


def test_killed_server_leaves_no_process_and_the_next_one_tidies(start: Start) -> None:
    server = start().wait_until_ready()
    server.process.kill()
    server.wait(PATIENCE)
    assert_end(server.pids())
    (left,) = server.leftovers()
    successor = start(temporary=server.temporary)
    successor.wait_for_output("runner process")
    assert left not in server.leftovers()
    successor.process.send_signal(signal.SIGTERM)
    assert successor.wait(PATIENCE) == 0


def test_frozen_child_is_killed_in_time(start: Start) -> None:
    server = start().wait_until_ready()
    os.kill(server.pids()["runner"], signal.SIGSTOP)
    server.process.send_signal(signal.SIGTERM)
    assert server.wait(PATIENCE) == 0
    assert_all_ended(server)


def test_stop_while_loading(start: Start) -> None:
    server = start()
    server.wait_for_output("runner process")
    server.process.send_signal(signal.SIGTERM)
    assert server.wait(PATIENCE) == 0
    assert_all_ended(server)


def test_port_in_use_is_said_before_anything_starts(start: Start) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        server = start(port=port)
        assert server.wait(PATIENCE) == 1
    assert str(port) in server.output and "--port" in server.output
    assert "Traceback" not in server.output
    assert server.pids() == {}
    assert server.leftovers() == []


def test_missing_model_is_a_clear_error(start: Start) -> None:
    server = start("--model-path", "/no/such/folder")
    assert server.wait(PATIENCE) == 2
    assert "--model-path /no/such/folder" in server.output


def test_broken_model_ends_with_the_runners_last_words(start: Start, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((EMBEDDED_MODEL / name).read_bytes())
    (tmp_path / "config.json").write_text("{}")
    server = start("--model-path", str(tmp_path), *FLAGS)
    assert server.wait(PATIENCE) != 0
    assert "the runner process" in server.output
    assert "ended with exit code" in server.output
    assert_all_ended(server)
