"""Inputs as integers in groups, in vector instructions that Numba would not find itself.

What a group's largest number is, and the sum of its integers, LLVM looks for one number after the
other; here they are found across two vectors.
"""

from __future__ import annotations

from typing import Any

try:
    from llvmlite import ir
    from numba.core import cgutils, errors, types
    from numba.extending import intrinsic
except ImportError:  # as in numba_math
    intrinsic = None

GROUP, LANES = 32, 16  # inputs per scale, and per vector
SIZE, INFINITE, QUIET = 0x7FFFFFFF, 0x7F800000, 0x7FC00000  # bits: all but the sign, inf, NaN


def round_groups(x, numbers, scale, total):  # noqa: ANN001, ANN201
    """x [G * 32] float32 -> numbers [G * 32] int8, scale [G] float32, total [G] int32: the largest
    of a group becomes ±127, and ``total`` is the sum of its numbers. A scale of what is not finite
    is NaN. All are contiguous."""
    raise NotImplementedError


class _Rounding:
    """Writes the rounding of one group."""

    def __init__(self, builder: Any) -> None:
        self.b = builder
        self.int32, self.number = ir.IntType(32), ir.FloatType()
        self.ints = ir.VectorType(self.int32, LANES)
        self.floats = ir.VectorType(self.number, LANES)

    def vector(self, base: Any, at: Any, kind: Any) -> Any:
        place = self.b.bitcast(self.b.gep(base, [at]), kind.as_pointer())
        return self.b.load(place, align=4)

    def splat(self, scalar: Any) -> Any:
        empty = ir.Constant(ir.VectorType(scalar.type, LANES), ir.Undefined)
        one = self.b.insert_element(empty, scalar, self.int32(0))
        return self.b.shuffle_vector(one, empty, ir.Constant(self.ints, [0] * LANES))

    def call(self, name: str, result: Any, *values: Any) -> Any:
        kind = ir.FunctionType(result, [value.type for value in values])
        return self.b.call(cgutils.get_or_insert_function(self.b.module, kind, name), values)

    def largest(self, halves: list[Any]) -> Any:
        """The bits of the largest size among two vectors."""
        sizes = [self.b.and_(half, self.ints([SIZE] * LANES)) for half in halves]
        above = self.b.icmp_signed(">", *sizes)
        both = self.b.select(above, *sizes)
        return self.call("llvm.vector.reduce.smax.v16i32", self.int32, both)

    def group(self, x: Any, numbers: Any, at: Any) -> tuple[Any, Any]:
        """Returns scale and total."""
        b, f = self.b, self.number
        places = [at, b.add(at, at.type(LANES))]
        bits = self.largest([self.vector(x, place, self.ints) for place in places])
        largest = b.bitcast(bits, f)
        some = b.fcmp_ordered(">", largest, f(0.0))
        inverse = self.splat(b.select(some, b.fdiv(f(127.0), largest), f(0.0)))
        sums = []
        for place in places:
            scaled = b.fmul(self.vector(x, place, self.floats), inverse)
            whole = b.fptosi(self.call("llvm.rint.v16f32", self.floats, scaled), self.ints)
            short = b.trunc(whole, ir.VectorType(ir.IntType(8), LANES))
            b.store(short, b.bitcast(b.gep(numbers, [place]), short.type.as_pointer()), align=1)
            sums.append(whole)
        total = self.call("llvm.vector.reduce.add.v16i32", self.int32, b.add(*sums))
        finite = b.icmp_signed("<", bits, self.int32(INFINITE))
        scale = b.select(finite, b.fdiv(largest, f(127.0)), b.bitcast(self.int32(QUIET), f))
        return scale, total


def _emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    """``round_groups`` in LLVM's language."""
    made = [context.make_array(k)(context, builder, v) for k, v in zip(signature.args, arguments)]
    x, numbers, scale, total = (array.data for array in made)
    groups = cgutils.unpack_tuple(builder, made[2].shape, 1)[0]
    code = _Rounding(builder)
    with cgutils.for_range(builder, groups) as loop:
        at = builder.mul(loop.index, loop.index.type(GROUP))
        own, count = code.group(x, numbers, at)
        builder.store(own, builder.gep(scale, [loop.index]))
        builder.store(count, builder.gep(total, [loop.index]))
    return context.get_dummy_value()


if intrinsic is not None:

    @intrinsic  # type: ignore[no-redef]
    def round_groups(context, x, numbers, scale, total):  # noqa: F811, ANN001, ANN201
        given = (x, numbers, scale, total)
        if not all(isinstance(each, types.Array) and each.layout == "C" for each in given):
            raise errors.TypingError("round_groups takes contiguous arrays")
        return types.void(*given), _emit
