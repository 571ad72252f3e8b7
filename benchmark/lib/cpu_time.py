"""Processor time of running processes: what stays comparable on a machine that others use, too."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")  # per second


def cpu_seconds(pid: int) -> float:
    """User and system time of one process since its start, in hundredths of a second. Linux only.

    Raises: OSError if it has ended.
    """
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def family(pid: int) -> list[int]:
    """The process and all of its descendants."""
    children: Iterable[Path] = Path(f"/proc/{pid}/task").glob("*/children")
    found = [int(child) for path in children for child in path.read_text().split()]
    return [pid, *(each for child in found for each in family(child))]


def family_seconds(pid: int) -> float:
    """``cpu_seconds`` of a process and its descendants together."""
    return sum(map(cpu_seconds, family(pid)))
