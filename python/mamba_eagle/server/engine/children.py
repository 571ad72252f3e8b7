"""The scheduler and runner processes as the server process starts, watches and ends them."""

from __future__ import annotations

import asyncio
import codecs
import collections
import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping

from mamba_eagle import logs
from mamba_eagle.message.lifetime import END_SIGNAL, STACKS_SIGNAL

KILL_AFTER = 2.5  # seconds between END_SIGNAL and SIGKILL, so that all ends within 5


class Child:
    """One process. Its standard error is passed on, and the last lines of it are kept."""

    def __init__(
        self,
        role: str,
        command: list[str],
        on_end: Callable[[Child], None],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """environment: added to this process's."""
        self.role = role
        self.last_words: collections.deque[str] = collections.deque(maxlen=20)
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={**os.environ, **(environment or {})},
        )
        self._loop = asyncio.get_running_loop()
        self._on_end = on_end
        self._reader = threading.Thread(target=self._pass_on, daemon=True)
        self._reader.start()
        threading.Thread(target=self._wait, daemon=True).start()

    @property
    def pid(self) -> int:
        return self.process.pid

    def _pass_on(self) -> None:
        """Passes on what comes at once: a progress bar writes no line end until it is full."""
        assert self.process.stderr is not None
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        unfinished = ""
        while chunk := os.read(self.process.stderr.fileno(), 65536):
            text = decoder.decode(chunk)
            *lines, unfinished = re.split(r"[\r\n]", unfinished + text)
            logs.pass_on(self.role, text, lines)
            self._remember(lines)
        logs.pass_on(self.role, "", [unfinished])
        self._remember([unfinished])

    def _remember(self, lines: list[str]) -> None:
        self.last_words.extend(line.rstrip() for line in lines if line.strip())

    def _wait(self) -> None:
        self.process.wait()
        self._reader.join(0.5)  # a grandchild may hold the pipe open for longer
        with contextlib.suppress(RuntimeError):  # the loop has ended: no one asks any more
            self._loop.call_soon_threadsafe(self._on_end, self)

    def dump_stacks(self) -> None:
        """Makes the process write the stacks of its threads to its standard error, if it still
        can. A stopped process is continued for that: it is about to be ended anyway."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(STACKS_SIGNAL)
            self.process.send_signal(signal.SIGCONT)

    def how_it_ended(self, quotes: bool = True) -> str:
        """For people: role, pid, exit code or signal, and with ``quotes`` the last line that it
        wrote."""
        code = self.process.returncode
        if code < 0:
            try:
                name = signal.Signals(-code).name
            except ValueError:
                name = f"signal {-code}"
            how = f"was killed by {name}"
        else:
            how = f"ended with exit code {code}"
        said = f": {self.last_words[-1]}" if quotes and self.last_words and code > 0 else ""
        return f"the {self.role} process (pid {self.pid}) {how}{said}"


def engine_command(role: str, socket_dir: str, config_file: str, rank: int = 0) -> list[str]:
    return [
        sys.executable,
        "-m",
        f"mamba_eagle.{role}.process",
        "--socket-dir",
        socket_dir,
        "--config-file",
        config_file,
        "--rank",
        str(rank),
    ]


def end_children(children: list[Child]) -> None:
    """Sends END_SIGNAL to all and SIGKILL to those that ignore it. Blocks for KILL_AFTER seconds
    at most."""
    for child in children:
        if child.process.poll() is None:
            child.process.send_signal(END_SIGNAL)
    deadline = time.monotonic() + KILL_AFTER
    for child in children:
        try:
            child.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.process.kill()
            child.process.wait()
