"""Machine code for products on a CPU, written as LLVM vectors.

A loop over inputs ends in a horizontal sum for each output, and for each group of weights that has
a scale; LLVM finds neither the widening loads nor the integer dot products in it. So weights are
stored in blocks of 16 outputs, in the order in which a product reads them: one vector then holds
the same input of 16 outputs, nothing is summed across it, and scales are vectors, too. The vector
code is written out here; Numba compiles it to what the processor has, and caches it.

A sum over inputs is made in the same order for each row, however many rows there are and however
they are shared out to threads. So a row's outputs do not depend on the batch it is in.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import Structure
from functools import reduce
from types import SimpleNamespace
from typing import Any

from llvmlite import binding, ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from mamba_eagle.cpu.memory import ask_for, generated
from mamba_eagle.machine_code import numba

LANES = 16  # outputs per block
CACHE_LINE = 64  # bytes
MAX_ROWS = 8  # that share a pass over a block

F32, HALF = ir.FloatType(), ir.HalfType()
I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
FLOATS, INTS = ir.VectorType(F32, LANES), ir.VectorType(I32, LANES)


class Code:
    """A builder of LLVM instructions with the few that products need. Vectors have ``lanes``
    numbers: 16, unless what is loaded is to fill one register of a processor with shorter ones."""

    def __init__(self, builder: Any, lanes: int = LANES) -> None:
        self.builder, self.lanes = builder, lanes

    def of(self, kind: Any) -> Any:
        """The type of a vector."""
        return ir.VectorType(kind, self.lanes)

    def splat(self, value: Any) -> Any:
        """A vector of the same number."""
        b, empty = self.builder, ir.Constant(self.of(value.type), ir.Undefined)
        one = b.insert_element(empty, value, I32(0))
        return b.shuffle_vector(one, empty, ir.Constant(self.of(I32), [0] * self.lanes))

    def lanes_of(self, vector: Any, wanted: range) -> Any:
        """Some lanes of a vector as a shorter one."""
        mask = ir.Constant(ir.VectorType(I32, len(wanted)), list(wanted))
        return self.builder.shuffle_vector(vector, vector, mask)

    def at(self, pointer: Any, index: Any, kind: Any) -> Any:
        """The address of an element; pointer: of any type, or its number."""
        b = self.builder
        as_pointer = b.inttoptr if pointer.type == I64 else b.bitcast
        return b.gep(as_pointer(pointer, kind.as_pointer()), [index])

    def load(self, pointer: Any, index: Any, kind: Any) -> Any:
        """``pointer[index]``, for elements of ``kind``."""
        return self.builder.load(self.at(pointer, index, kind), align=_bytes(kind))

    def fields(self, address: Any, block: type[Structure]) -> SimpleNamespace:
        """The fields of a block of words (abi.py), by their names."""
        places = {name: getattr(block, name).offset // 8 for name, _ in block._fields_}
        loaded = {name: self.load(address, I64(at), I64) for name, at in places.items()}
        return SimpleNamespace(**loaded)

    def vector(self, pointer: Any, index: Any, kind: Any) -> Any:
        """Neighbouring elements, from ``pointer[index]`` on."""
        b, whole = self.builder, self.of(kind)
        address = b.bitcast(self.at(pointer, index, kind), whole.as_pointer())
        return b.load(address, align=_bytes(kind))

    def store(self, value: Any, pointer: Any, index: Any) -> None:
        """Numbers from ``pointer[index]`` on."""
        kind = value.type.element
        address = self.builder.bitcast(self.at(pointer, index, kind), value.type.as_pointer())
        self.builder.store(value, address, align=_bytes(kind))

    def variables(self, count: int) -> list[Any]:
        """Places for vectors of sums; LLVM keeps them in registers."""
        return [cgutils.alloca_once(self.builder, self.of(F32)) for _ in range(count)]

    def holding(self, values: list[Any]) -> list[Any]:
        """The same with these vectors in them."""
        made = self.variables(len(values))
        for place, value in zip(made, values, strict=True):
            self.builder.store(value, place)
        return made

    def multiply_add(self, x: Any, y: Any, z: Any) -> Any:
        """x · y + z, rounded once where the processor can."""
        if not has("fma", "neon"):
            return self.builder.fadd(self.builder.fmul(x, y), z)
        return self.call(f"llvm.fma.v{x.type.count}f32", x.type, x, y, z)

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
        return reduce(self.builder.add, parts)

    def times(self, *factors: Any) -> Any:
        """The product of integers."""
        return reduce(self.builder.mul, factors)

    @contextmanager
    def loop(self, count: Any) -> Iterator[Any]:
        """``with code.loop(count) as index``"""
        with cgutils.for_range(self.builder, count, intp=I64) as own:
            yield own.index

    def row_tiles(
        self, rows: Any, tile: Callable[[int, Any], None], largest: int = MAX_ROWS
    ) -> None:
        """Calls ``tile(how many, first row)`` until all rows are in one: as many as are
        ``largest``, then one of what is left, so that a chain's five or six rows read the weights
        once."""
        b, most = self.builder, I64(largest)
        whole = b.udiv(rows, most)
        with self.loop(whole) as index:
            tile(largest, b.mul(index, most))
        first = b.mul(whole, most)
        left = b.sub(rows, first)
        for size in range(1, largest):
            with b.if_then(b.icmp_unsigned("==", left, I64(size))):
                tile(size, first)


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
    arguments, first, last)`` writes. arguments: the address of a block."""

    @intrinsic
    def written(typing: Any, arguments: Any, first: Any, last: Any) -> Any:
        body = generated(lambda builder, *given: write(Code(builder), *given))
        return types.void(types.int64, types.int64, types.int64), body

    return written
