"""The scheduler's and the runner's processes: started, watched and ended by the server's."""

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
from collections.abc import Callable

TERMINATE_AFTER = 2.5  # seconds between SIGTERM and SIGKILL; all is to end within 5


class Child:
    """One process, its standard error passed on and its last words kept."""

    def __init__(self, role: str, command: list[str], on_end: Callable[[Child], None]) -> None:
        self.role = role
        self.last_words: collections.deque[str] = collections.deque(maxlen=20)
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)
        self._loop = asyncio.get_running_loop()
        self._on_end = on_end
        self._reader = threading.Thread(target=self._pass_on, daemon=True)
        self._reader.start()
        threading.Thread(target=self._wait, daemon=True).start()

    @property
    def pid(self) -> int:
        return self.process.pid

    def _pass_on(self) -> None:
        """As it comes, not line by line: a progress bar ends no line until it is full."""
        assert self.process.stderr is not None
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        unfinished = ""
        while chunk := os.read(self.process.stderr.fileno(), 65536):
            text = decoder.decode(chunk)
            sys.stderr.write(text)
            sys.stderr.flush()
            *lines, unfinished = re.split(r"[\r\n]", unfinished + text)
            self._remember(lines)
        self._remember([unfinished])

    def _remember(self, lines: list[str]) -> None:
        self.last_words.extend(line.rstrip() for line in lines if line.strip())

    def _wait(self) -> None:
        self.process.wait()
        self._reader.join(0.5)  # a grandchild may hold the pipe open for longer
        with contextlib.suppress(RuntimeError):  # the loop has ended: nobody asks any more
            self._loop.call_soon_threadsafe(self._on_end, self)

    def how_it_ended(self) -> str:
        """For people: role, pid, how and the last thing it said."""
        code = self.process.returncode
        if code < 0:
            try:
                name = signal.Signals(-code).name
            except ValueError:
                name = f"signal {-code}"
            how = f"was killed by {name}"
        else:
            how = f"ended with exit code {code}"
        said = f": {self.last_words[-1]}" if self.last_words and code > 0 else ""
        return f"the {self.role} process (pid {self.pid}) {how}{said}"


def engine_command(role: str, socket_dir: str, config_file: str) -> list[str]:
    return [
        sys.executable,
        "-m",
        f"mamba_eagle.{role}.process",
        "--socket-dir",
        socket_dir,
        "--config-file",
        config_file,
    ]


def end_children(children: list[Child]) -> None:
    """SIGTERM for all, SIGKILL for those who do not heed it. Blocks for seconds at most."""
    for child in children:
        if child.process.poll() is None:
            child.process.terminate()
    deadline = time.monotonic() + TERMINATE_AFTER
    for child in children:
        try:
            child.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.process.kill()
            child.process.wait()
