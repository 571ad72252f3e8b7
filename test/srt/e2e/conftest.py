"""The real server with the embedded model, on a free port."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

import mamba_eagle
from mamba_eagle.embedded import EMBEDDED_HEADS, EMBEDDED_MODEL

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))  # models in full forward passes

START_SECONDS = 120
PACKAGE_ROOT = Path(mamba_eagle.__file__).parents[1]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def is_running(pid: int) -> bool:
    """False for zombies, too: whoever should reap them may not be the server."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (OSError, IndexError):
        return False


class RunningServer:
    """A server in a session of its own, so that a Ctrl-C can be sent to all of its processes."""

    def __init__(self, *flags: str, port: int = 0, temporary: str = "") -> None:
        self.port = port or free_port()
        self.base_url = f"http://127.0.0.1:{self.port}"
        self.temporary = temporary or tempfile.mkdtemp(prefix="me-")  # sockets need short paths
        path = os.pathsep.join(filter(None, [str(PACKAGE_ROOT), os.environ.get("PYTHONPATH")]))
        command = [sys.executable, "-m", "mamba_eagle.launch_server", "--port", str(self.port)]
        self.process = subprocess.Popen(
            [*command, *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": path, "TMPDIR": self.temporary},
        )
        self.output = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output += line

    def wait_for_output(self, text: str) -> None:
        deadline = time.monotonic() + START_SECONDS
        while text not in self.output:
            if self.process.poll() is not None or time.monotonic() > deadline:
                self._reader.join(2)
                if text not in self.output:
                    self.stop()
                    pytest.fail(f"the server did not say {text!r}:\n{self.output}")
            time.sleep(0.02)

    def wait_until_ready(self) -> RunningServer:
        self.wait_for_output("Server is ready at")
        return self

    def pids(self) -> dict[str, int]:
        """role -> pid, as printed at the start."""
        found = re.findall(r"^(\w+) process: pid (\d+)$", self.output, re.MULTILINE)
        return {role: int(pid) for role, pid in found}

    def wait(self, seconds: float) -> int:
        """The exit code."""
        code = self.process.wait(seconds)
        self._reader.join(2)
        return code

    def leftovers(self) -> list[str]:
        """Its socket folders."""
        return [name for name in os.listdir(self.temporary) if name.startswith("mamba-eagle-")]

    def stop(self) -> None:
        """Ends it in any state; safe to call again."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait(5)
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
