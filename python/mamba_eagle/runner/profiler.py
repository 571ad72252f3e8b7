"""Traces of steps, as torch's profiler writes them: for chrome://tracing and Perfetto."""

from __future__ import annotations

import logging

import torch
from torch.profiler import ProfilerActivity, profile

log = logging.getLogger("mamba_eagle.runner")


class StepProfiler:
    """At most one trace at a time. It is written after so many steps, or when it is stopped."""

    def __init__(self) -> None:
        self.path = ""  # of the latest trace
        self.steps = 0  # that it holds
        self._most = 0
        self._running: profile | None = None

    @property
    def is_full(self) -> bool:
        """Every step that was asked for has been launched: finish them, and stop."""
        return self._running is not None and self.steps >= self._most

    def start(self, path: str, steps: int) -> str:
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

    def launched(self) -> None:
        """Another step was launched."""
        if self._running is not None:
            self.steps += 1

    def stop(self) -> str:
        """Writes the trace; the steps that it is to hold must be done. Why it cannot, or ""; if it
        was written already, nothing happens."""
        if not self.path:
            return "nothing is being recorded: start it first (/start_profile)"
        running, self._running = self._running, None
        if running is None:
            return ""
        running.stop()
        try:
            running.export_chrome_trace(self.path)
        except (OSError, RuntimeError) as error:
            log.warning("no trace could be written to %s: %s", self.path, error)
            return f"the trace could not be written to {self.path}: {error}"
        return ""
