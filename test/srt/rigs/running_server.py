"""The real server as a child process of the tests."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from ports import free_ports

from benchmark.lib.server import ServerProcess

START_SECONDS = 240  # the first one on a machine compiles its kernels
PATIENCE = 120.0  # seconds; only what hangs takes so long


def is_running(pid: int) -> bool:
    """False for zombies, too: whoever should reap them may not be the server."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (OSError, IndexError):
        return False


class RunningServer(ServerProcess):
    """With a temporary folder of its own, to see what is left in it."""

    def __init__(self, *flags: str, port: int = 0, temporary: str = "", max_files: int = 0) -> None:
        """max_files: the limit of open files (ulimit -n); 0: as it is."""
        self.temporary = temporary or tempfile.mkdtemp(prefix="me-")  # sockets need short paths
        if max_files:
            limit = f'ulimit -n {max_files}; exec "$@"'
            self.program = ("sh", "-c", limit, "sh", *ServerProcess.program)
        # Not one that a connection could take before the server does.
        super().__init__(flags, port or free_ports(1), {"TMPDIR": self.temporary}, START_SECONDS)

    def wait_until_ready(self) -> RunningServer:
        self.wait_for_output("Server is ready at")
        return self

    def leftovers(self) -> list[str]:
        """Its socket folders."""
        return [path.name for path in Path(self.temporary).glob("mamba-eagle-*")]

    def stop(self) -> None:
        super().stop()
        shutil.rmtree(self.temporary, ignore_errors=True)


StartServer = Callable[..., RunningServer]  # a fixture: flags go in


def assert_end(pids: dict[str, int]) -> None:
    """No process of these, by role, is left, or will be in a moment."""
    deadline = time.monotonic() + PATIENCE
    while any(map(is_running, pids.values())) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert [role for role, pid in pids.items() if is_running(pid)] == []


def assert_all_ended(server: RunningServer) -> None:
    """No process, no folder, no traceback is left of a server that served."""
    pids = server.pids()
    assert set(pids) == {"server", "scheduler", "runner"}
    assert_end(pids)
    assert server.leftovers() == []
    assert "Traceback" not in server.output, server.output


def need_weights(*folders: Path) -> None:
    for folder in folders:
        if not (folder / "model.safetensors").exists():
            pytest.skip(f"{folder.name}/model.safetensors is missing: the embedded model's recipe")
