"""Kernels that are called for spans of units, on as many threads as there are."""

from collections.abc import Callable
from types import FunctionType
from typing import Any

from mamba_eagle.cpu import team
from mamba_eagle.cpu.abi import Block
from mamba_eagle.cpu.memory import call_function
from mamba_eagle.cpu.threads import num_threads, threaded
from mamba_eagle.cpu.vectors.code import vector_code
from mamba_eagle.machine_code import prange

# Nanoseconds on one core below which a call stays on its thread: waking another takes up to 50 µs
# where it sleeps on a virtual machine.
MIN_PARALLEL = 100_000
MIN_SHARED = 20_000  # the same where a team may be awake (team.py)


@threaded
def _spread(function, arguments, units, parts):  # noqa: ANN001, ANN202
    for part in prange(parts):
        call_function(function, arguments, units * part // parts, units * (part + 1) // parts)


class SpanKernel:
    """A function ``f(arguments, first, last)`` in Numba's code, which is called for spans of units,
    on as many threads as there are. ``prepare`` compiles it, or loads it from Numba's cache."""

    address: int  # of the function, after ``prepare``

    def __init__(self, function: Callable[[int, int, int], None]) -> None:
        self.function = function
        self._compiled: Any = None

    def prepare(self) -> None:
        if self._compiled is None:
            self._compiled = team.compiled(self.function)
            self._call, self.address = self._compiled.ctypes, self._compiled.address
            if num_threads() > 1:
                _spread.parallel(self.address, 0, 0, 0)  # compiles it, and calls nothing

    def __call__(self, units: int, work: int, arguments: Block) -> None:
        """units: what is shared out to threads; work: nanoseconds that it would take one core,
        roughly."""
        self.prepare()
        self.run(units, work, arguments.address)

    def run(self, units: int, work: int, arguments: int) -> None:
        """The same with the address of the arguments, after ``prepare``."""
        threads = num_threads()
        if threads > 1 and work >= MIN_SHARED and team.share(self.address, arguments, units):
            return
        if threads > 1 and work >= MIN_PARALLEL:
            _spread.parallel(self.address, arguments, units, threads)
        else:
            self._call(arguments, 0, units)


_code: Any = None  # in the globals of each kernel that ``vector_kernel`` makes


def _vector_code_alone(arguments, first, last):  # noqa: ANN001, ANN202
    _code(arguments, first, last)


def vector_kernel(name: str, write: Callable[..., None]) -> SpanKernel:
    """A kernel that is ``vector_code(write)`` and nothing else. name: Numba's cache tells kernels
    apart by it."""
    own = {**globals(), "_code": vector_code(write)}
    function = FunctionType(_vector_code_alone.__code__, own, name)
    function.__qualname__ = name
    return SpanKernel(function)
