"""The scheduler and runner processes as the server process starts, watches and ends them."""

from __future__ import annotations

import asyncio
import codecs
import collections
import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from mamba_eagle import logs
from mamba_eagle.config import EngineConfig
from mamba_eagle.message import Heartbeat
from mamba_eagle.message.channel import remove_stale_dirs
from mamba_eagle.message.lifetime import END_SIGNAL, STACKS_SIGNAL, module_command, role_name
from mamba_eagle.message.ranks import RANK_ENVIRONMENT

SETTINGS = "config.json"  # in the folder of the sockets
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
        self.pid = self.process.pid
        self._loop = asyncio.get_running_loop()
        self._on_end = on_end
        self._reader = threading.Thread(target=self._pass_on, daemon=True)
        self._reader.start()
        threading.Thread(target=self._wait, daemon=True).start()

    def _pass_on(self) -> None:
        """Passes on what comes at once: a progress bar writes no line end until it is full."""
        assert self.process.stderr is not None
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        unfinished = ""
        with self.process.stderr as pipe:
            while chunk := os.read(pipe.fileno(), 65536):
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
        can. A stopped process is continued for that: it is about to be ended anyway. That comes
        first: any thread may take a signal that waits for a stopped process, and one that reads
        the main thread's frames while that runs crashes."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGCONT)
            self.process.send_signal(STACKS_SIGNAL)

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


def write_settings(socket_dir: str, config: EngineConfig) -> None:
    """Writes the settings for processes that are started in this folder. Raises: OSError"""
    Path(socket_dir, SETTINGS).write_text(json.dumps(dataclasses.asdict(config)))


def engine_child(kind: str, rank: int, socket_dir: str, on_end: Callable[[Child], None]) -> Child:
    """A scheduler or a runner. Raises: OSError"""
    command = [*module_command(f"mamba_eagle.{kind}.process"), "--socket-dir", socket_dir]
    command += ["--config-file", str(Path(socket_dir, SETTINGS)), "--rank", str(rank)]
    command += ["--parent", str(os.getpid())]
    return Child(role_name(kind, rank), command, on_end, RANK_ENVIRONMENT)


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
    remove_stale_dirs()  # a runner that is ended leaves the weights that it has received


# A step that shows progress may still be an endless loop: it has this many time-outs to end.
MAX_TIMEOUTS_PER_STEP = 10


@dataclass
class Pulse:
    """What is known of one process. Times are seconds; all but ``silence`` end at its last
    heartbeat, so that a silent process is accused of its silence only."""

    silence: float = 0.0  # since its last heartbeat
    last: Heartbeat | None = None
    same_step: float = 0.0  # in which it was busy and its number of steps stayed the same
    idle: float = 0.0  # in which it was not busy

    def heard(self, beat: Heartbeat) -> None:
        same = self.last is not None and beat.busy and beat.steps == self.last.steps
        self.same_step = self.same_step + self.silence if same else 0.0
        self.idle = 0.0 if beat.busy else self.idle + self.silence
        self.silence, self.last = 0.0, beat


class Watchdog:
    """Heartbeats go in by ``heard``, passing time by ``tick``."""

    def __init__(self, timeout: float, ranks: int = 1, ranks_per_node: int = 0) -> None:
        """``timeout``: seconds; 0: nothing is ever wrong. ranks: number of runner processes.
        ranks_per_node: how many of them are on each machine; 0: all."""
        self.timeout = timeout
        each = ranks_per_node or ranks
        self._names = [
            role_name("runner", rank) + (f" (node {rank // each})" if each < ranks else "")
            for rank in range(ranks)
        ]
        self._scheduler = Pulse()
        self._runners = [Pulse() for _ in range(ranks)]

    def heard(self, beat: Heartbeat) -> None:
        known = self._scheduler if beat.role == "scheduler" else self._runners[beat.rank]
        known.heard(beat)

    def tick(self, seconds: float) -> str | None:
        """``seconds`` have passed. Returns what is wrong, for the log and for clients; None if the
        engine works."""
        for pulse in (self._scheduler, *self._runners):
            pulse.silence += seconds
        return self._problem() if self.timeout else None

    def silent(self, limit: float) -> str | None:
        """Which process has sent nothing for ``limit`` seconds; None if each has, or for 0."""
        for role, pulse in (("scheduler", self._scheduler), *zip(self._names, self._runners)):
            if limit and pulse.silence >= limit:
                return f"the {role} process has not answered for {limit:g} s"
        return None

    def _problem(self) -> str | None:
        limit = self.timeout
        runners = list(zip(self._names, self._runners))
        # A rank that is silent or idle makes the others wait: it is named before these.
        if (silent := self.silent(limit)) is not None:
            return silent
        for role, runner in runners:
            # It may be heard between two steps each time: then the scheduler's number changes.
            if min(runner.idle, self._scheduler.same_step) >= limit:
                return f"requests have waited for {limit:g} s although the {role} process is idle"
        for role, runner in runners:
            if runner.last is not None and runner.last.stuck_seconds >= limit:
                return f"the {role} process has made no progress in a step for {limit:g} s"
            if runner.same_step >= MAX_TIMEOUTS_PER_STEP * limit:
                seconds = MAX_TIMEOUTS_PER_STEP * limit
                return f"the {role} process has worked on a single step for {seconds:g} s"
        return None
