"""The real server with the embedded model, on a free port."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from mamba_eagle.bench.server import ServerProcess
from mamba_eagle.embedded import EMBEDDED_HEADS, EMBEDDED_MODEL

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))  # models in full forward passes

START_SECONDS = 120


def is_running(pid: int) -> bool:
    """False for zombies, too: whoever should reap them may not be the server."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (OSError, IndexError):
        return False


class RunningServer(ServerProcess):
    """With a temporary folder of its own, to see what is left in it."""

    def __init__(self, *flags: str, port: int = 0, temporary: str = "") -> None:
        self.temporary = temporary or tempfile.mkdtemp(prefix="me-")  # sockets need short paths
        super().__init__(flags, port, {"TMPDIR": self.temporary}, START_SECONDS)

    def wait_until_ready(self) -> RunningServer:
        self.wait_for_output("Server is ready at")
        return self

    def leftovers(self) -> list[str]:
        """Its socket folders."""
        return [path.name for path in Path(self.temporary).glob("mamba-eagle-*")]

    def stop(self) -> None:
        super().stop()
        shutil.rmtree(self.temporary, ignore_errors=True)


def need_weights(*folders: Path) -> None:
    for folder in folders:
        if not (folder / "model.safetensors").exists():
            pytest.skip(f"{folder.name}/model.safetensors is missing: the embedded model's recipe")


StartServer = Callable[..., RunningServer]


@pytest.fixture(scope="session")
def start_server() -> Iterator[StartServer]:
    """``start_server(*flags)`` gives a server that takes requests."""
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
def server(start_server: StartServer) -> Iterator[RunningServer]:
    """One for all tests that only send requests, with default settings."""
    has_head = (EMBEDDED_HEADS["EAGLE"] / "model.safetensors").exists()
    running = start_server(*(() if has_head else ("--speculative-algorithm", "NONE")))
    yield running
    running.stop()


@pytest.fixture
def client(server: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.base_url, timeout=60) as client:
        yield client
