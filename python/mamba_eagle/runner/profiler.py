"""Traces of steps, as torch's profiler writes them: for chrome://tracing and Perfetto."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

from mamba_eagle.message import Profile, ProfileReply

log = logging.getLogger("mamba_eagle.runner")


class StepProfiler:
    """At most one trace at a time. It is written after so many steps, or when it is stopped."""

    def __init__(self, finish: Callable[[], None]) -> None:
        """finish: waits until the steps that were launched are done."""
        self.path = ""  # of the latest trace
        self.steps = 0  # that it holds
        self._finish = finish
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
        kinds = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            kinds.append(ProfilerActivity.CUDA)
        self.path, self.steps, self._most = path, 0, steps
        self._running = profile(activities=kinds)
        self._running.start()
        return ""

    def _stop(self) -> str:
        """Writes the trace. Why it cannot, or ""; if it was written already, nothing happens."""
        if not self.path:
            return "nothing is being recorded: start it first (/start_profile)"
        running, self._running = self._running, None
        if running is None:
            return ""
        self._finish()
        running.stop()
        try:
            running.export_chrome_trace(self.path)
        except (OSError, RuntimeError) as error:
            log.warning("no trace could be written to %s: %s", self.path, error)
            return f"the trace could not be written to {self.path}: {error}"
        return ""
