"""Threads of the CPU kernels: how many, what they do with tiny numbers, which kernels use them.

One number holds for torch's operations and for Numba's kernels. Both start their workers at the
first parallel loop. On Linux a new thread takes the floating-point mode of the one that starts it,
so the mode is set here, before.

Denormals, numbers below 1.2e-38, are flushed to zero. A decayed token's share of a state is often
that small, no output depends on it, and on some processors an operation with one takes over a
hundred cycles.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch

from mamba_eagle.cpu import team
from mamba_eagle.machine_code import kernel, numba

# Operations (multiply-adds, roughly) below which a parallel loop takes longer to start than it
# saves: waking a worker that sleeps takes 10 to 50 µs.
MIN_PARALLEL = 800_000

_threads = 1


def set_threads(count: int) -> None:
    """Compute with ``count`` threads in this process from now on, and flush denormals on this
    thread and on the workers that it starts.

    Call it before the first parallel loop. Numba takes no more threads than there are cores.
    """
    global _threads
    torch.set_flush_denormal(True)
    _threads = min(count, numba.config.NUMBA_NUM_THREADS)
    numba.set_num_threads(_threads)
    team.gather(_threads)
    # Last: where both use one OpenMP library, Numba's first call raises torch's number as well.
    torch.set_num_threads(count)


def num_threads() -> int:
    """Of Numba's kernels: 1 unless ``set_threads`` was called."""
    return _threads


@contextmanager
def parallel_forms() -> Iterator[None]:
    """Within, every kernel with a parallel form takes that one, so that it is compiled."""
    global MIN_PARALLEL
    before, MIN_PARALLEL = MIN_PARALLEL, 0
    try:
        yield
    finally:
        MIN_PARALLEL = before


class Threaded:
    """A kernel with ``numba.prange``, compiled twice: as a plain loop, and as a parallel one. Each
    is compiled only if it is used."""

    def __init__(self, function: FunctionType) -> None:
        self.serial = kernel(function)
        # Numba's cache tells functions apart by their names and not by how they are compiled
        name = f"{function.__name__}_parallel"
        outer = (function.__defaults__, function.__closure__)
        copied = FunctionType(function.__code__, function.__globals__, name, *outer)
        copied.__module__ = function.__module__
        copied.__qualname__ = f"{function.__qualname__}_parallel"
        self.parallel = kernel(copied, parallel=True)

    def __call__(self, work: int, *arguments: Any) -> Any:
        """work: an estimate of the multiply-adds in this call."""
        if _threads > 1 and work >= MIN_PARALLEL:
            return self.parallel(*arguments)
        return self.serial(*arguments)


def threaded(function: FunctionType) -> Threaded:
    """A decorator: ``f(work, *arguments)`` runs on threads where that pays."""
    return Threaded(function)
