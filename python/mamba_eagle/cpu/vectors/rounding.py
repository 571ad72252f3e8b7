"""Inputs as integers in groups, in vector instructions that Numba would not find itself.

What a group's largest number is, and the sum of its integers, LLVM looks for one number after the
other; here they are found across two vectors.
"""

from typing import Any

from numba.core import cgutils, errors, types
from numba.extending import intrinsic

from mamba_eagle.cpu.vectors.code import F32, FLOATS, I8, I32, I64, INTS, LANES, Code, ir
from mamba_eagle.machine_code import INFINITE, SIZE

GROUP = 2 * LANES  # inputs per scale
QUIET = 0x7FC00000  # bits of NaN


class _Rounding(Code):
    """Writes the rounding of one group."""

    def largest(self, halves: list[Any]) -> Any:
        """The bits of the largest size among two vectors."""
        b = self.builder
        sizes = [b.and_(half, INTS([int(SIZE)] * LANES)) for half in halves]
        both = b.select(b.icmp_signed(">", *sizes), *sizes)
        return self.call("llvm.vector.reduce.smax.v16i32", I32, both)

    def group(self, x: Any, numbers: Any, at: Any) -> tuple[Any, Any]:
        """Returns scale and total."""
        b = self.builder
        places = [at, b.add(at, I64(LANES))]
        bits = self.largest([self.vector(x, place, I32) for place in places])
        largest = b.bitcast(bits, F32)
        some = b.fcmp_ordered(">", largest, F32(0.0))
        inverse = self.splat(b.select(some, b.fdiv(F32(127.0), largest), F32(0.0)))
        sums = []
        for place in places:
            scaled = b.fmul(self.vector(x, place, F32), inverse)
            whole = b.fptosi(self.call("llvm.rint.v16f32", FLOATS, scaled), INTS)
            self.store(b.trunc(whole, ir.VectorType(I8, LANES)), numbers, place)
            sums.append(whole)
        total = self.call("llvm.vector.reduce.add.v16i32", I32, b.add(*sums))
        finite = b.icmp_signed("<", bits, I32(int(INFINITE)))
        scale = b.select(finite, b.fdiv(largest, F32(127.0)), b.bitcast(I32(QUIET), F32))
        return scale, total


def _emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    """``round_groups`` in LLVM's language."""
    made = [context.make_array(k)(context, builder, v) for k, v in zip(signature.args, arguments)]
    x, numbers, scale, total = (array.data for array in made)
    groups = cgutils.unpack_tuple(builder, made[2].shape, 1)[0]
    code = _Rounding(builder)
    with cgutils.for_range(builder, groups) as loop:
        at = builder.mul(loop.index, I64(GROUP))
        own, count = code.group(x, numbers, at)
        builder.store(own, builder.gep(scale, [loop.index]))
        builder.store(count, builder.gep(total, [loop.index]))
    return context.get_dummy_value()


@intrinsic
def round_groups(context, x, numbers, scale, total):  # noqa: ANN001, ANN201
    """x [G * 32] float32 -> numbers [G * 32] int8, scale [G] float32, total [G] int32: the largest
    of a group becomes ±127, and ``total`` is the sum of its numbers. A scale of what is not finite
    is NaN. All are contiguous."""
    given = (x, numbers, scale, total)
    if not all(isinstance(each, types.Array) and each.layout == "C" for each in given):
        raise errors.TypingError("round_groups takes contiguous arrays")
    return types.void(*given), _emit
