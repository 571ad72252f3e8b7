"""The real server with the embedded model, on a free port."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from running_server import RunningServer, StartServer, need_weights

from mamba_eagle.embedded import EMBEDDED_HEADS, EMBEDDED_MODEL


@pytest.fixture(scope="module")
def start_server() -> Iterator[StartServer]:
    """``start_server(*flags)`` gives a server that takes requests until the file's last test."""
    need_weights(EMBEDDED_MODEL)
    started: list[RunningServer] = []

    def start(*flags: str) -> RunningServer:
        if "EAGLE" in flags and "--speculative-draft-model-path" not in flags:
            need_weights(EMBEDDED_HEADS["EAGLE"])
        server = RunningServer(*flags)
        started.append(server)
        return server.wait_until_ready()

    yield start
    for server in started:
        server.stop()


@pytest.fixture(scope="session")
def server() -> Iterator[RunningServer]:
    """One for all tests that only send requests, with default settings."""
    need_weights(EMBEDDED_MODEL)
    has_head = (EMBEDDED_HEADS["EAGLE"] / "model.safetensors").exists()
    running = RunningServer(*(() if has_head else ("--speculative-algorithm", "NONE")))
    yield running.wait_until_ready()
    running.stop()


@pytest.fixture
def client(server: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.base_url, timeout=120) as client:
        yield client
