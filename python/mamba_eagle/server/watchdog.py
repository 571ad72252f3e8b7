"""Decides from the engine's heartbeats whether it has stopped working. No processes, no clock."""

from __future__ import annotations

from dataclasses import dataclass

from mamba_eagle.message import Heartbeat

# A step that shows progress may still be an endless loop: it has this many time-outs to end.
MAX_TIMEOUTS_PER_STEP = 10


@dataclass
class Pulse:
    """What is known of one process; times are seconds."""

    silence: float = 0.0  # since its last heartbeat
    last: Heartbeat | None = None
    same_step: float = 0.0  # since its number of steps changed or it was idle

    def heard(self, beat: Heartbeat) -> None:
        if self.last is None or beat.steps != self.last.steps or not beat.busy:
            self.same_step = 0.0
        self.silence, self.last = 0.0, beat

    def tick(self, seconds: float) -> None:
        self.silence += seconds
        if self.last is not None and self.last.busy:
            self.same_step += seconds


class Watchdog:
    """Heartbeats go in by ``heard``, passing time by ``tick``."""

    def __init__(self, timeout: float) -> None:
        """``timeout``: seconds; 0: nothing is ever wrong."""
        self.timeout = timeout
        self._scheduler = Pulse()
        self._runner = Pulse()
        self._idle = 0.0  # seconds since the runner was last heard to be busy

    def heard(self, beat: Heartbeat) -> None:
        (self._scheduler if beat.role == "scheduler" else self._runner).heard(beat)
        if beat.role == "runner" and beat.busy:
            self._idle = 0.0

    def tick(self, seconds: float) -> str | None:
        """``seconds`` have passed. Gives what is wrong, for the log and for clients; None if the
        engine works."""
        self._scheduler.tick(seconds)
        self._runner.tick(seconds)
        self._idle += seconds
        return self._problem() if self.timeout else None

    def _problem(self) -> str | None:
        limit = self.timeout
        for role, pulse in (("scheduler", self._scheduler), ("runner", self._runner)):
            if pulse.silence >= limit:
                return f"the {role} process has not answered for {limit:g} s"
        runner = self._runner
        if runner.last is not None and runner.last.stuck_seconds >= limit:
            return f"the runner process has made no progress in a step for {limit:g} s"
        if runner.same_step >= MAX_TIMEOUTS_PER_STEP * limit:
            seconds = MAX_TIMEOUTS_PER_STEP * limit
            return f"the runner process has worked on a single step for {seconds:g} s"
        # The runner may be heard between two steps each time: then the scheduler's number changes.
        if min(self._idle, self._scheduler.same_step) >= limit:
            return f"requests have waited for {limit:g} s although the runner process is idle"
        return None
