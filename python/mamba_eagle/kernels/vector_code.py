"""Machine code for products on a CPU, written as LLVM vectors.

A loop over inputs ends in a horizontal sum for each output, and for each group of weights that has
a scale; LLVM finds neither the widening loads nor the integer dot products in it. So weights are
stored in blocks of 16 outputs, in the order in which a product reads them: one vector then holds
the same input of 16 outputs, nothing is summed across it, and scales are vectors, too. The vector
code is written out here; Numba compiles it to what the processor has, and caches it.

A sum over inputs is made in the same order for each row, however many rows there are and however
they are shared out to threads. So a row's outputs do not depend on the batch it is in.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from mamba_eagle.kernels import numba_team as team
from mamba_eagle.kernels.numba_math import numba, prange
from mamba_eagle.kernels.numba_words import ask_for, call_function
from mamba_eagle.kernels.threads import num_threads, threaded

try:
    from llvmlite import binding, ir
    from numba.core import cgutils, types
    from numba.extending import intrinsic
except ImportError:  # without Numba nothing here is called
    binding = ir = cgutils = types = intrinsic = None

LANES = 16  # outputs per block
CACHE_LINE = 64  # bytes
MAX_ROWS = 8  # that share a pass over a block
# Nanoseconds on one core below which a call stays on its thread: waking another takes up to 50 µs
# where it sleeps on a virtual machine.
MIN_PARALLEL = 100_000
MIN_SHARED = 20_000  # the same where a team may be awake (numba_team.py)

if ir is None:
    F32 = HALF = I8 = I16 = I32 = I64 = FLOATS = INTS = None
else:
    F32, HALF = ir.FloatType(), ir.HalfType()
    I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
    FLOATS, INTS = ir.VectorType(F32, LANES), ir.VectorType(I32, LANES)


class Code:
    """A builder of LLVM instructions with the few that products need."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder

    def splat(self, value: Any) -> Any:
        """A vector of 16 times the same number."""
        b, vector = self.builder, ir.VectorType(value.type, LANES)
        empty = ir.Constant(vector, ir.Undefined)
        one = b.insert_element(empty, value, I32(0))
        return b.shuffle_vector(one, empty, ir.Constant(INTS, [0] * LANES))

    def at(self, pointer: Any, index: Any, kind: Any) -> Any:
        """The address of an element; pointer: of any type."""
        b = self.builder
        return b.gep(b.bitcast(pointer, kind.as_pointer()), [index])

    def load(self, pointer: Any, index: Any, kind: Any) -> Any:
        """``pointer[index]``, for elements of ``kind``."""
        return self.builder.load(self.at(pointer, index, kind), align=_bytes(kind))

    def vector(self, pointer: Any, index: Any, kind: Any) -> Any:
        """16 neighbouring elements, from ``pointer[index]`` on."""
        b, whole = self.builder, ir.VectorType(kind, LANES)
        address = b.bitcast(self.at(pointer, index, kind), whole.as_pointer())
        return b.load(address, align=_bytes(kind))

    def store(self, value: Any, pointer: Any, index: Any) -> None:
        """16 numbers from ``pointer[index]`` on."""
        kind = value.type.element
        address = self.builder.bitcast(self.at(pointer, index, kind), value.type.as_pointer())
        self.builder.store(value, address, align=_bytes(kind))

    def variables(self, count: int) -> list[Any]:
        """Places for vectors of sums; LLVM keeps them in registers."""
        return [cgutils.alloca_once(self.builder, FLOATS) for _ in range(count)]

    def multiply_add(self, x: Any, y: Any, z: Any) -> Any:
        """x · y + z, rounded once where the processor can."""
        if not has("fma", "neon"):
            return self.builder.fadd(self.builder.fmul(x, y), z)
        return self.call("llvm.fma.v16f32", FLOATS, x, y, z)

    def call(self, name: str, result: Any, *values: Any) -> Any:
        b = self.builder
        kind = ir.FunctionType(result, [value.type for value in values])
        return b.call(cgutils.get_or_insert_function(b.module, kind, name), values)

    def prefetch(self, pointer: Any, ahead: int, count: int) -> None:
        """Ask for ``count`` bytes that lie ``ahead`` of a pointer; they need not exist."""
        for first in range(ahead, ahead + count, CACHE_LINE):
            ask_for(self.builder, self.at(pointer, I64(first), I8))

    def sum(self, *parts: Any) -> Any:
        """The sum of integers."""
        total = parts[0]
        for part in parts[1:]:
            total = self.builder.add(total, part)
        return total

    def times(self, *factors: Any) -> Any:
        """The product of integers."""
        product = factors[0]
        for factor in factors[1:]:
            product = self.builder.mul(product, factor)
        return product

    def loop(self, count: Any) -> Any:
        """``with code.loop(count) as index``"""
        return _Loop(self.builder, count)

    def row_tiles(self, rows: Any, tile: Callable[[int, Any], None]) -> None:
        """Calls ``tile(how many, first row)`` until all rows are in one: eights, then one of what
        is left, so that a chain's five or six rows read the weights once."""
        b, largest = self.builder, I64(MAX_ROWS)
        whole = b.udiv(rows, largest)
        with self.loop(whole) as index:
            tile(MAX_ROWS, b.mul(index, largest))
        first = b.mul(whole, largest)
        left = b.sub(rows, first)
        for size in range(1, MAX_ROWS):
            with b.if_then(b.icmp_unsigned("==", left, I64(size))):
                tile(size, first)


class _Loop:
    def __init__(self, builder: Any, count: Any) -> None:
        self._range = cgutils.for_range(builder, count, intp=I64)

    def __enter__(self) -> Any:
        return self._range.__enter__().index

    def __exit__(self, *error: Any) -> None:
        self._range.__exit__(*error)


def _bytes(kind: Any) -> int:
    return {"float": 4, "half": 2, "i8": 1, "i16": 2, "i32": 4, "i64": 8}[str(kind)]


def has(*features: str) -> bool:
    """Whether the processor that Numba compiles for has one of ``features``, by LLVM's names."""
    given = numba.config.CPU_FEATURES
    if given is not None:
        return any(f"+{feature}" in given.split(",") for feature in features)
    if numba.config.CPU_NAME == "generic":
        return False
    host = binding.get_host_cpu_features()
    return any(host.get(feature, False) for feature in features)


def vector_code(write: Callable[..., None]) -> Any:
    """A function ``f(arguments, first, last)`` for Numba's code, whose body is what ``write(code,
    arguments, first, last)`` writes. arguments: the address of int64 numbers, which are pointers
    and sizes."""
    if intrinsic is None:
        return None

    @intrinsic
    def written(typing: Any, arguments: Any, first: Any, last: Any) -> Any:
        def generate(context: Any, builder: Any, sig: Any, given: Any) -> Any:
            address, begin, end = given
            pointer = builder.inttoptr(address, I64.as_pointer())
            write(Code(builder), pointer, begin, end)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, types.int64), generate

    return written


@threaded
def _spread(function, arguments, units, parts):  # noqa: ANN001, ANN202
    for part in prange(parts):
        call_function(function, arguments, units * part // parts, units * (part + 1) // parts)


class SpanKernel:
    """A function ``f(arguments, first, last)`` in Numba's code, which is called for spans of units,
    on as many threads as there are. ``prepare`` compiles it, or loads it from Numba's cache."""

    def __init__(self, function: Callable[[int, int, int], None]) -> None:
        self.function = function
        self._compiled: Any = None

    def prepare(self) -> None:
        if self._compiled is None:
            kind = types.void(types.int64, types.int64, types.int64)
            self._compiled = numba.cfunc(kind, cache=True)(self.function)
            self._call, self._address = self._compiled.ctypes, self._compiled.address
            if num_threads() > 1:
                _spread.parallel(self._address, 0, 0, 0)  # compiles it, and calls nothing

    @property
    def address(self) -> int:
        """Of the function, after ``prepare``."""
        address: int = self._address
        return address

    def __call__(self, units: int, work: int, *arguments: int) -> None:
        """units: what is shared out to threads; work: nanoseconds that it would take one core,
        roughly; arguments: pointers, sizes."""
        self.prepare()
        given = (ctypes.c_int64 * len(arguments))(*arguments)
        self.run(units, work, ctypes.addressof(given))

    def run(self, units: int, work: int, address: int) -> None:
        """The same with the address of the arguments, after ``prepare``."""
        threads = num_threads()
        if threads > 1 and work >= MIN_SHARED and team.share(self._address, address, units):
            return
        if threads > 1 and work >= MIN_PARALLEL:
            _spread.parallel(self._address, address, units, threads)
        else:
            self._call(address, 0, units)


class Call:
    """A kernel with its arguments, of which most stay from call to call: a decode step makes a
    hundred calls, so each microsecond counts. Not for two threads at the same time."""

    def __init__(self, kernel: SpanKernel, *arguments: int) -> None:
        kernel.prepare()
        self.kernel = kernel
        self.arguments = (ctypes.c_int64 * len(arguments))(*arguments)
        self.address = ctypes.addressof(self.arguments)

    def run(self, units: int, work: int) -> None:
        self.kernel.run(units, work, self.address)
