"""Tells the server process whether the runner's main thread makes progress.

A step has no natural time limit: a long prompt on a slow CPU takes minutes, and so does compiling
a kernel. So the heartbeats come from a thread of their own, and say for how long the main thread
has shown none of these signs of progress while it had a plan to execute:

- a step has ended;
- its Python stack has changed while it launched a step;
- on a CPU, the process has used CPU time (a GPU's driver spins while it waits, which proves
  nothing);
- a child process runs that was started since: a compiler.

A thread that waits for the device, by polling or inside a call, shows none of them.
"""

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import zmq

from mamba_eagle.message import BEAT_SECONDS, Heartbeat, ToWatchdog
from mamba_eagle.message.channel import Sender

# A process that only sends heartbeats uses less than 0.001 of a core.
MIN_CPU_SHARE = 0.01


class Pulse:
    """Made in the main thread, which also calls everything but ``sample``."""

    def __init__(self, socket_dir: str, computes_on_cpu: bool, rank: int = 0) -> None:
        self._socket_dir, self._rank = socket_dir, rank
        self._computes_on_cpu = computes_on_cpu
        self._main_thread = threading.get_ident()
        self._launching = False
        self._launched = 0  # steps launched since the start
        self._ended = 0  # steps whose results were sent
        # What ``sample`` saw last:
        self._ended_before = 0
        self._stack = 0
        self._cpu_seconds = 0.0
        self._stuck_seconds = 0.0
        # Children that live as long as the process, such as multiprocessing's resource tracker.
        self._other_children = running_children()

    def start(self) -> None:
        """Starts sending. The thread ends with the process."""
        threading.Thread(target=self._send, name="pulse", daemon=True).start()

    @contextlib.contextmanager
    def launching(self) -> Iterator[None]:
        """Around the launch of one step."""
        self._launched += 1
        self._launching = True
        try:
            yield
        finally:
            self._launching = False

    def step_ended(self) -> None:
        """The result of the oldest launched step was sent."""
        self._ended += 1

    def _send(self) -> None:
        # A context of its own: terminating one that the main thread owns would wait for this
        # thread's socket.
        context = zmq.Context()
        heartbeats: Sender[ToWatchdog] = Sender(context, self._socket_dir, "to_watchdog")
        last = time.monotonic()
        while True:
            time.sleep(BEAT_SECONDS)
            now = time.monotonic()
            heartbeats.send(self.sample(now - last))
            last = now

    def sample(self, seconds: float) -> Heartbeat:
        """Looks at the main thread; ``seconds`` have passed since the last look."""
        ended, busy = self._ended, self._launched > self._ended
        if not busy or ended != self._ended_before or self._progressed(seconds):
            self._stuck_seconds = 0.0
        else:
            # Of a longer gap this process was suspended for a part, which says nothing.
            self._stuck_seconds += min(seconds, 2 * BEAT_SECONDS)
        self._ended_before = ended
        if not self._launching:
            self._other_children = running_children()
        stuck = self._stuck_seconds
        return Heartbeat(
            role="runner", rank=self._rank, busy=busy, steps=ended, stuck_seconds=stuck
        )

    def _progressed(self, seconds: float) -> bool:
        stack, cpu_seconds = stack_position(self._main_thread), time.process_time()
        moved = stack != self._stack
        computed = cpu_seconds - self._cpu_seconds > MIN_CPU_SHARE * seconds
        self._stack, self._cpu_seconds = stack, cpu_seconds
        if not self._launching:
            return False
        return moved or (computed and self._computes_on_cpu) or self._compiles()

    def _compiles(self) -> bool:
        return not running_children() <= self._other_children


def stack_position(thread: int) -> int:
    """A hash of where in the code the thread is, all callers included."""
    frame = sys._current_frames().get(thread)
    position = []
    while frame is not None:
        position.append((id(frame.f_code), frame.f_lasti))
        frame = frame.f_back
    return hash(tuple(position))


def running_children() -> set[int]:
    """The IDs of the child processes, ended ones aside. Empty where /proc is missing."""
    running = set()
    for path in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):  # a thread that has just ended
            for pid in path.read_text().split():
                with contextlib.suppress(OSError):  # a child that has just been waited for
                    state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
                    if state != "Z":
                        running.add(int(pid))
    return running
