"""Traces of steps, as torch's profiler writes them: for chrome://tracing and Perfetto."""

import logging
from collections.abc import Callable

# torch.profiler's own imports torch's compiler first, which takes seconds beside running requests.
from torch.autograd.profiler import profile

from mamba_eagle.backend.place import Place
from mamba_eagle.message import Profile, ProfileReply

log = logging.getLogger("mamba_eagle.runner")


class StepProfiler:
    """At most one trace at a time. It is written after the last step asked for, or when stopped."""

    def __init__(self, place: Place, finish: Callable[[], None]) -> None:
        """place: where steps run. finish: waits until the steps that were launched are done."""
        self.path = ""  # of the latest trace
        self.steps = 0  # that it holds
        self._place, self._finish = place, finish
        self._most = 0
        self._running: profile | None = None

    def answer(self, asked: Profile) -> ProfileReply:
        """Begins a trace, or with 0 steps ends it."""
        problem = self._start(asked.path, asked.steps) if asked.steps else self._stop()
        return ProfileReply(
            call_id=asked.call_id, path=self.path, steps=self.steps, problem=problem
        )

    def launched(self) -> None:
        """Another step was launched; after the last one that was asked for the trace is written."""
        if self._running is not None:
            self.steps += 1
            if self.steps >= self._most:
                self._stop()

    def _start(self, path: str, steps: int) -> str:
        """Why it cannot, or ""."""
        if self._running is not None:
            return f"a trace is being recorded ({self.path}): stop it first (/stop_profile)"
        self.path, self.steps, self._most = path, 0, steps
        self._running = profile(use_device=None if self._place.on_host else "cuda")
        self._running.__enter__()
        return ""

    def _stop(self) -> str:
        """Writes the trace. Why it cannot, or ""; if it was written already, nothing happens."""
        if not self.path:
            return "nothing is being recorded: start it first (/start_profile)"
        running, self._running = self._running, None
        if running is None:
            return ""
        self._finish()
        running.__exit__(None, None, None)
        try:
            running.export_chrome_trace(self.path)
        except (OSError, RuntimeError) as error:
            log.warning("no trace could be written to %s: %s", self.path, error)
            return f"the trace could not be written to {self.path}: {error}"
        return ""
