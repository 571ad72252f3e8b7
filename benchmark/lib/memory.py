"""How the memory of a server's processes grows under load. Linux only."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

EARLY_SECONDS = 300.0  # by then each buffer has been as large as it will be
PAUSE_SECONDS = 5.0


class Sample(NamedTuple):
    seconds: float  # since the first sample
    resident_mb: dict[str, float]  # by role


class Growth(NamedTuple):
    early_s: float
    early_mb: float
    end_mb: float

    @property
    def ratio(self) -> float:
        return self.end_mb / self.early_mb


def resident_mb(pid: int) -> float:
    """Physical memory of a process, in MiB.

    Raises: OSError if there is no such process.
    """
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"^VmRSS:\s+(\d+) kB", status, re.MULTILINE)
    return int(found[1]) / 1024 if found else 0.0  # a zombie has none


class MemoryWatch:
    """Samples processes in a thread of its own while it is entered."""

    def __init__(self, pids: Mapping[str, int], pause: float = PAUSE_SECONDS) -> None:
        """pids: by role, as ``ServerProcess.pids`` gives them. pause: seconds between samples."""
        self.pids, self.pause = pids, pause
        self.samples: list[Sample] = []
        self._begin = time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def growth(self, early_seconds: float = EARLY_SECONDS) -> dict[str, Growth]:
        """By role, from the first sample after ``early_seconds`` (the last one if it did not take
        so long) to the last."""
        last = self.samples[-1]
        early = next((each for each in self.samples if each.seconds >= early_seconds), last)
        return {
            role: Growth(early.seconds, early.resident_mb[role], last.resident_mb[role])
            for role in self.pids
        }

    def _watch(self) -> None:
        while not self._stop.wait(self.pause):
            self._sample()

    def _sample(self) -> None:
        resident = {role: resident_mb(pid) for role, pid in self.pids.items()}
        self.samples.append(Sample(time.monotonic() - self._begin, resident))

    def __enter__(self) -> MemoryWatch:
        self._sample()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()
        if error is None:
            self._sample()
