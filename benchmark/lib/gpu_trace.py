"""How much of the time a GPU works, from a profiler's trace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch.autograd import DeviceType
from torch.profiler import profile

CUT = 0.2  # of the trace, at either end


class Busy(NamedTuple):
    share: float
    longest_gap: float  # microseconds
    kernels: int


def busy(intervals: Sequence[tuple[float, float]]) -> Busy:
    """intervals: work [begin, end) in microseconds, in any order. The first and the last fifth of
    the whole are left out. Busy is the time in which at least one kernel or copy runs."""
    first, last = min(begin for begin, _ in intervals), max(end for _, end in intervals)
    low, high = first + CUT * (last - first), last - CUT * (last - first)
    inner = sorted((max(begin, low), min(end, high)) for begin, end in intervals)
    inner = [(begin, end) for begin, end in inner if begin < end]
    worked, longest, until = 0.0, 0.0, low
    for begin, end in inner:
        longest = max(longest, begin - until)
        worked += max(0.0, end - max(begin, until))
        until = max(until, end)
    return Busy(worked / (high - low), max(longest, high - until), len(inner))


def device_intervals(trace: profile) -> list[tuple[float, float]]:
    """Begin and end of all that the GPU did, in microseconds."""
    events = [event for event in trace.events() or [] if event.device_type == DeviceType.CUDA]
    return [(event.time_range.start, event.time_range.end) for event in events]
