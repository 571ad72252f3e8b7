"""Decides from the engine's heartbeats whether it has stopped working. No processes, no clock."""

from dataclasses import dataclass

from mamba_eagle.message import Heartbeat
from mamba_eagle.message.lifetime import role_name

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
        """``seconds`` have passed. Gives what is wrong, for the log and for clients; None if the
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
