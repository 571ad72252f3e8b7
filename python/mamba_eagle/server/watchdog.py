"""Decides from the engine's heartbeats whether it has stopped working. No processes, no clock."""

from __future__ import annotations

from dataclasses import dataclass

from mamba_eagle.message import Heartbeat

ROLES = ("scheduler", "runner")
# A step that shows progress may still be an endless loop: it has this many time-outs to end.
MAX_TIMEOUTS_PER_STEP = 10


@dataclass
class Pulse:
    """What is known of one process; times are seconds."""

    silence: float = 0.0  # since its last heartbeat
    last: Heartbeat | None = None
    same_step: float = 0.0  # while it was busy and its number of steps stayed the same


class Watchdog:
    """Heartbeats go in by ``heard``, passing time by ``tick``."""

    def __init__(self, timeout: float) -> None:
        """``timeout``: seconds; 0: nothing is ever wrong."""
        self.timeout = timeout
        self._pulses = {role: Pulse() for role in ROLES}
        self._stalled = 0.0  # while requests waited, no step was planned and none ran

    def heard(self, beat: Heartbeat) -> None:
        pulse = self._pulses[beat.role]
        if pulse.last is None or beat.steps != pulse.last.steps or not beat.busy:
            pulse.same_step = 0.0
        pulse.silence, pulse.last = 0.0, beat

    def tick(self, seconds: float) -> str | None:
        """``seconds`` have passed. Gives what is wrong, for the log and for clients; None if the
        engine works."""
        if not self.timeout:
            return None
        for pulse in self._pulses.values():
            pulse.silence += seconds
            if pulse.last is not None and pulse.last.busy:
                pulse.same_step += seconds
        self._stalled = self._stalled + seconds if self._stalls() else 0.0
        return self._problem()

    def _stalls(self) -> bool:
        """Whether requests wait for steps that nobody plans or runs."""
        scheduler, runner = (self._pulses[role] for role in ROLES)
        idle = runner.last is not None and not runner.last.busy
        return idle and scheduler.same_step > 0

    def _problem(self) -> str | None:
        limit = self.timeout
        for role, pulse in self._pulses.items():
            if pulse.silence >= limit:
                return f"the {role} process has not answered for {limit:g} s"
        runner = self._pulses["runner"]
        if runner.last is not None and runner.last.stuck_seconds >= limit:
            return f"the runner process has made no progress in a step for {limit:g} s"
        if runner.same_step >= MAX_TIMEOUTS_PER_STEP * limit:
            seconds = MAX_TIMEOUTS_PER_STEP * limit
            return f"the runner process has worked on a single step for {seconds:g} s"
        if self._stalled >= limit:
            return f"requests have waited for {limit:g} s although the runner process is idle"
        return None
