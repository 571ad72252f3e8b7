"""A server in processes of its own on this machine: started, waited for, stopped."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import httpx

import mamba_eagle

START_SECONDS = 300.0
STOP_SECONDS = 40.0  # then it is killed
SHOWN_CHARACTERS = 4000  # of what a server printed that did not start
PACKAGE_ROOT = Path(mamba_eagle.__file__).parents[1]

Self = TypeVar("Self", bound="ServerProcess")


def free_port() -> int:
    """A port on 127.0.0.1 that nobody listens on; somebody else may take it before it is used."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class ServerProcess:
    """A server with this interpreter and this package, in a session of its own, so that a signal
    reaches it and its children and nothing else. As a context manager it waits for the first answer
    and stops the server at the end."""

    program: tuple[str, ...] = (sys.executable, "-m", "mamba_eagle.launch_server")

    def __init__(
        self,
        flags: Sequence[str],
        port: int = 0,
        environment: Mapping[str, str] | None = None,
        start_seconds: float = START_SECONDS,
    ) -> None:
        """port: 0 for a free one. environment: added to this process's."""
        self.port = port or free_port()
        self.base_url = f"http://127.0.0.1:{self.port}"
        self.start_seconds = start_seconds
        self.output = ""  # what all of its processes have printed so far
        path = os.pathsep.join(filter(None, [str(PACKAGE_ROOT), os.environ.get("PYTHONPATH")]))
        self.command = [*self.program, "--port", str(self.port), *flags]
        self.process = subprocess.Popen(
            self.command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": path, **(environment or {})},
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output += line

    # ── starting ─────────────────────────────────────────────────────────────────────────────

    def wait_for_output(self, text: str) -> None:
        """Returns once the server has printed ``text``.

        Raises: RuntimeError with the end of its output if it ends or takes too long; it is stopped.
        """
        self._wait_until(lambda: text in self.output, f"did not print {text!r}", pause=0.02)

    def wait_until_answering(self) -> None:
        """Returns once the server has generated a token.

        Raises: as ``wait_for_output``.
        """
        self._wait_until(self._answers, "did not answer", pause=0.2)

    def _answers(self) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            reply = httpx.get(f"{self.base_url}/health_generate", timeout=30, trust_env=False)
            return reply.status_code == 200
        return False

    def _wait_until(self, reached: Callable[[], bool], problem: str, pause: float) -> None:
        deadline = time.monotonic() + self.start_seconds
        while not reached():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self._reader.join(2)
                if reached():
                    return
                self.stop()
                raise RuntimeError(
                    f"{shlex.join(self.command)} {problem}:\n{self.output[-SHOWN_CHARACTERS:]}"
                )
            time.sleep(pause)

    def pids(self) -> dict[str, int]:
        """role -> pid, as printed at the start."""
        found = re.findall(r"^(\w+) process: pid (\d+)$", self.output, re.MULTILINE)
        return {role: int(pid) for role, pid in found}

    # ── ending ───────────────────────────────────────────────────────────────────────────────

    def wait(self, seconds: float) -> int:
        """The exit code of a server that ends by itself or was sent a signal."""
        code = self.process.wait(seconds)
        self._reader.join(2)
        return code

    def stop(self) -> None:
        """Ends it in any state; safe to call again."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait(5)
        self._reader.join(2)

    def __enter__(self: Self) -> Self:
        try:
            self.wait_until_answering()
        except BaseException:  # an interrupted start, too, leaves no server behind
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()


def exit_on_sigterm() -> None:
    """From now on SIGTERM raises SystemExit, so that context managers stop what they started."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
