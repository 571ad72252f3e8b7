"""A sum of squares whose order is written out: what LLVM makes of a loop that may be reassociated
depends on the code around it, and a norm's bits would differ between a program and a layer."""

from typing import Any

from numba.core import cgutils, errors, types
from numba.extending import intrinsic

from mamba_eagle.cpu.vectors.code import F32, FLOATS, I32, I64, LANES, Code


class _Squares(Code):
    def sum(self, x: Any, size: Any) -> Any:
        """16 sums side by side, added up in pairs; then what is left of the row, one by one."""
        b = self.builder
        sums, rest = cgutils.alloca_once(b, FLOATS), cgutils.alloca_once(b, F32)
        b.store(FLOATS([0.0] * LANES), sums)
        vectors = b.udiv(size, I64(LANES))
        with self.loop(vectors) as index:
            part = self.vector(x, b.mul(index, I64(LANES)), F32)
            b.store(self.multiply_add(part, part, b.load(sums)), sums)
        total, width = b.load(sums), LANES
        while width > 1:
            width //= 2
            total = b.fadd(*(self.lanes_of(total, range(at, at + width)) for at in (0, width)))
        b.store(b.extract_element(total, I32(0)), rest)
        first = b.mul(vectors, I64(LANES))
        with self.loop(b.sub(size, first)) as index:
            one = self.load(x, b.add(first, index), F32)
            b.store(b.fadd(b.fmul(one, one), b.load(rest)), rest)
        return b.load(rest)


def _emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    array = context.make_array(signature.args[0])(context, builder, arguments[0])
    size = cgutils.unpack_tuple(builder, array.shape, 1)[0]
    return _Squares(builder).sum(array.data, size)


@intrinsic
def sum_of_squares(context, x):  # noqa: ANN001, ANN201
    """x [size] float32, contiguous -> Σ x²."""
    if not (isinstance(x, types.Array) and x.layout == "C" and x.ndim == 1):
        raise errors.TypingError("sum_of_squares takes a contiguous row")
    return types.float32(x), _emit
