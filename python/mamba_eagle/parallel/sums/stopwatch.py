"""Repeating work and timing it, as a decode step does it: in a CUDA graph."""

import statistics
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch

ROUNDS, REPEATS = 5, 10  # medians of rounds of this many repeats


class Recorded(ABC):
    """Work that can be repeated. All ranks repeat the same works in the same order."""

    @abstractmethod
    def repeat(self) -> None: ...

    @abstractmethod
    def seconds(self) -> float:
        """Of one repeat; the median of several rounds."""

    @abstractmethod
    def forget(self) -> None:
        """Before the ranks leave each other: a communicator waits for graphs that use it."""


class Captured(Recorded):
    """A CUDA graph on the current device."""

    def __init__(self, work: Callable[[], None]) -> None:
        stream = torch.cuda.Stream()
        self.graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            work()  # compiles kernels
            stream.synchronize()
            # the watchdogs of other ranks' communicators use the device meanwhile
            self.graph.capture_begin(capture_error_mode="thread_local")
            try:
                work()
            finally:
                self.graph.capture_end()

    def repeat(self) -> None:
        self.graph.replay()

    def seconds(self) -> float:
        took = []
        for _ in range(ROUNDS):
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self.repeat()  # ranks meet
            began.record()
            for _ in range(REPEATS):
                self.repeat()
            ended.record()
            ended.synchronize()
            took.append(began.elapsed_time(ended) / 1e3 / REPEATS)
        return statistics.median(took)

    def forget(self) -> None:
        self.graph.reset()
