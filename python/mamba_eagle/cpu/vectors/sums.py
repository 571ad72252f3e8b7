"""Sums of products for Numba kernels, in vector instructions that it would not find itself.

Numba gives LLVM loops over arrays that may overlap, and one sum at a time. Here LANES sums of
products are made side by side and summed across their vectors together, and sums over rows stay in
registers. A sum is added up in the same order whatever is beside it.
"""

from typing import Any

from numba.core import cgutils, errors, types
from numba.extending import intrinsic

from mamba_eagle.cpu.vectors.code import F32, I32, I64, Code, has, ir
from mamba_eagle.machine_code import CHECKED

# float32 numbers per vector register, and sums that leave room for their factors in 32 or 16
LANES, SUMS = (16, 16) if has("avx512f") else (8, 8)
ROWS = 4  # of the left of ``add_products_of_four``
COLUMNS = LANES // ROWS  # and of the right
WIDTH = 4 * LANES  # of ``add_four_rows``


class _Code(Code):
    """What the functions here are written in: vectors fill a register, indices are of elements."""

    def __init__(self, context: Any, builder: Any, signature: Any, arguments: Any) -> None:
        super().__init__(builder, LANES)
        self.context, self.signature, self.arguments = context, signature, arguments
        self.sizes: dict[int, tuple[Any, Any]] = {}  # of arguments: data and number of elements

    def data(self, place: int) -> Any:
        """Where an argument's elements begin."""
        kind, value = self.signature.args[place], self.arguments[place]
        array = self.context.make_array(kind)(self.context, self.builder, value)
        data = array.data
        self.sizes[id(data)] = (data, array.nitems)
        return data

    def check(self, base: Any, at: Any, count: int) -> None:
        """Where kernels are CHECKED, end the process if elements [at, at + count) are not all of
        the argument's."""
        if not CHECKED:
            return
        b, (_, size) = self.builder, self.sizes[id(base)]
        before = b.icmp_signed("<", at, I64(0))
        behind = b.icmp_signed(">", self.add(at, count), size)
        with b.if_then(b.or_(before, behind), likely=False):
            self.call("llvm.trap", ir.VoidType())

    def add(self, at: Any, steps: int) -> Any:
        return self.builder.add(at, I64(steps))

    def element(self, base: Any, at: Any) -> Any:
        self.check(base, at, 1)
        return self.builder.load(self.builder.gep(base, [at]))

    def floats(self, base: Any, at: Any) -> Any:
        """A vector."""
        self.check(base, at, LANES)
        return self.vector(base, at, F32)

    def store(self, value: Any, pointer: Any, index: Any) -> None:
        self.check(pointer, index, LANES)
        super().store(value, pointer, index)

    def multiply_add(self, x: Any, y: Any, z: Any) -> Any:
        product = self.builder.fmul(x, y, flags=("contract",))
        return self.builder.fadd(z, product, flags=("contract",))


def sums_across(builder: Any, vectors: list[Any]) -> Any:
    """A vector with the sum of each of as many vectors as one has numbers, all in one order:
    halves, quarters, …"""
    lanes = width = len(vectors)
    while len(vectors) > 1:
        half = width // 2
        low, high = (_halves(lanes, width, first) for first in (0, half))
        vectors = [
            builder.fadd(builder.shuffle_vector(x, y, low), builder.shuffle_vector(x, y, high))
            for x, y in zip(vectors[::2], vectors[1::2], strict=True)
        ]
        width = half
    return vectors[0]


def _halves(lanes: int, width: int, first: int) -> Any:
    """Of each run of ``width`` lanes the half from lane ``first`` on: those of one vector, then
    those of another one."""
    own = [run + first + lane for run in range(0, lanes, width) for lane in range(width // 2)]
    mask = own + [lanes + lane for lane in own]
    return ir.Constant(ir.VectorType(I32, lanes), mask)


def _products(rows: int) -> Any:
    """``add_products_of_…`` in LLVM's language, with ``rows`` rows on the left."""
    columns = LANES // rows

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        code = _Code(context, builder, signature, arguments)
        out, factors, left, right, ids = (code.data(place) for place in (0, 3, 5, 8, 11))
        _, out_at, out_row, _, factor_at, _, left_at, left_row = arguments[:8]
        _, right_at, right_row, _, first, count = arguments[8:]
        zero = ir.Constant(code.of(F32), [0.0] * LANES)
        sums = code.holding([zero] * LANES)
        lefts = [builder.add(left_at, code.times(left_row, I64(r))) for r in range(rows)]
        rights = []
        for column in range(columns):
            row = code.element(ids, code.add(first, column))
            rights.append(builder.add(right_at, builder.mul(row, right_row)))
        with cgutils.for_range(builder, builder.udiv(count, I64(LANES))) as loop:
            at = code.times(loop.index, I64(LANES))
            own = [code.floats(left, builder.add(place, at)) for place in lefts]
            others = [code.floats(right, builder.add(place, at)) for place in rights]
            for i, place in enumerate(sums):
                x, y = own[i // columns], others[i % columns]
                builder.store(code.multiply_add(x, y, builder.load(place)), place)
        total = sums_across(builder, [builder.load(place) for place in sums])
        part = ir.VectorType(F32, columns)
        for r in range(rows):
            own_sums = code.lanes_of(total, range(r * columns, (r + 1) * columns))
            factor = code.element(factors, code.add(factor_at, r))
            factor = code.lanes_of(code.splat(factor), range(columns))
            at = builder.add(out_at, code.times(out_row, I64(r)))
            code.check(out, at, columns)
            place = builder.bitcast(builder.gep(out, [at]), part.as_pointer())
            before = builder.load(place, align=4)
            builder.store(code.multiply_add(factor, own_sums, before), place, align=4)
        return context.get_dummy_value()

    return emit


def _sums(rows: int, vectors: int) -> Any:
    """``add_…`` in LLVM's language, for ``rows`` rows of sums of ``vectors`` vectors."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        code = _Code(context, builder, signature, arguments)
        out, weights, right, ids = (code.data(place) for place in (0, 3, 7, 10))
        _, out_at, out_row, _, weight_at, weight_row, weight_step = arguments[:7]
        _, at, right_row, _, count = arguments[7:]
        share = min(vectors, SUMS // rows)
        for begin in range(0, vectors, share):
            columns = [v * LANES for v in range(begin, begin + share)]
            places = [
                code.add(builder.add(out_at, code.times(out_row, I64(r))), column)
                for r in range(rows)
                for column in columns
            ]
            sums = code.holding([code.floats(out, place) for place in places])
            with cgutils.for_range(builder, count) as loop:
                own = builder.mul(code.element(ids, loop.index), right_row)
                own = builder.add(at, own)
                values = [code.floats(right, code.add(own, column)) for column in columns]
                weight = builder.add(weight_at, builder.mul(loop.index, weight_step))
                for r in range(rows):
                    place = builder.add(weight, code.times(weight_row, I64(r)))
                    factor = code.splat(code.element(weights, place))
                    for value, total in zip(values, sums[r * share : (r + 1) * share]):
                        grown = code.multiply_add(factor, value, builder.load(total))
                        builder.store(grown, total)
            for place, total in zip(places, sums, strict=True):
                code.store(builder.load(total), out, place)
        return context.get_dummy_value()

    return emit


def _convolution(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    """``add_taps`` in LLVM's language."""
    code = _Code(context, builder, signature, arguments)
    out, taps, right, ids = (code.data(place) for place in (0, 1, 3, 4))
    _, _, size, _, _, count = arguments
    begin = I64(0)
    for vectors in (4, 1):  # that share a look at which rows there are
        width = vectors * LANES
        runs = builder.udiv(builder.sub(size, begin), I64(width))
        with cgutils.for_range(builder, runs) as loop:
            at = builder.add(begin, code.times(loop.index, I64(width)))
            places = [code.add(at, v * LANES) for v in range(vectors)]
            bias = builder.mul(count, size)
            totals = code.holding([code.floats(taps, builder.add(p, bias)) for p in places])
            with cgutils.for_range(builder, count) as inner:
                tap = builder.mul(builder.sub(code.add(count, -1), inner.index), size)
                row = code.element(ids, inner.index)
                for place, total in zip(places, totals, strict=True):
                    weight = code.floats(taps, builder.add(place, tap))
                    value = code.floats(right, builder.add(place, row))
                    builder.store(code.multiply_add(weight, value, builder.load(total)), total)
            for place, total in zip(places, totals, strict=True):
                code.store(builder.load(total), out, place)
        begin = builder.add(begin, code.times(runs, I64(width)))
    return context.get_dummy_value()


def _lanes(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    """``add_up_lanes`` in LLVM's language."""
    code = _Code(context, builder, signature, arguments)
    out, numbers, count = code.data(0), code.data(1), arguments[2]
    (total,) = code.holding([ir.Constant(code.of(F32), [0.0] * LANES)])
    with cgutils.for_range(builder, builder.udiv(count, I64(LANES))) as loop:
        value = code.floats(numbers, code.times(loop.index, I64(LANES)))
        builder.store(builder.fadd(builder.load(total), value), total)
    code.store(builder.load(total), out, I64(0))
    return context.get_dummy_value()


def _largest(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    """``largest_of`` in LLVM's language."""
    code = _Code(context, builder, signature, arguments)
    numbers, (_, count) = code.data(0), arguments
    (best,) = code.holding([ir.Constant(code.of(F32), [float("-inf")] * LANES)])
    with cgutils.for_range(builder, builder.udiv(count, I64(LANES))) as loop:
        value, before = code.floats(numbers, code.times(loop.index, I64(LANES))), builder.load(best)
        above = builder.fcmp_ordered(">", value, before)
        builder.store(builder.select(above, value, before), best)
    found = builder.load(best)
    lanes = [builder.extract_element(found, I32(lane)) for lane in range(LANES)]
    while len(lanes) > 1:
        pairs = zip(lanes[::2], lanes[1::2], strict=True)
        lanes = [builder.select(builder.fcmp_ordered(">", x, y), x, y) for x, y in pairs]
    return lanes[0]


def _checked(*arrays: Any) -> None:
    if not all(isinstance(each, types.Array) and each.layout == "C" for each in arrays):
        raise errors.TypingError("sums of products take contiguous arrays")


def _of_products(rows: int) -> Any:
    """out[r, c] += factors[r] · Σ_n left[r, n] · right[ids[first + c], n], for r < rows,
    c < LANES / rows and n < count, a multiple of LANES. For fewer rows the same, bit by bit.

    out, factors, left, right: contiguous float32 arrays, read from element ``…_at`` on, with
    ``…_row`` elements from one row to the next; ids int64. out must not overlap the others.
    """

    def typed(  # noqa: PLR0913
        context, out, out_at, out_row, factors, factor_at, left, left_at, left_row, right, right_at,
        right_row, ids, first, count,
    ):  # fmt: skip
        _checked(out, factors, left, right, ids)
        n = types.int64
        kinds = (out, n, n, factors, n, left, n, n, right, n, n, ids, n, n)
        return types.void(*kinds), _products(rows)

    return intrinsic(typed)


def _of_sums(rows: int, vectors: int) -> Any:
    """out[r, c] += Σ_k weights[r, k] · right[ids[k], c] for r < rows, c < vectors · LANES,
    k < count, added up in this order.

    out, weights, right: contiguous float32 arrays, read from element ``…_at`` on, with ``…_row``
    elements from one row to the next, and ``weight_step`` from one weight of a row to the next; ids
    int64. out must not overlap the others.
    """

    def typed(  # noqa: PLR0913
        context, out, out_at, out_row, weights, weight_at, weight_row, weight_step, right, right_at,
        right_row, ids, count,
    ):  # fmt: skip
        _checked(out, weights, right, ids)
        n = types.int64
        kinds = (out, n, n, weights, n, n, n, right, n, n, ids, n)
        return types.void(*kinds), _sums(rows, vectors)

    return intrinsic(typed)


add_products_of_four, add_products_of_two = _of_products(ROWS), _of_products(2)
add_products_of_one = _of_products(1)
add_four_rows, add_two_rows, add_one_row = _of_sums(ROWS, 4), _of_sums(2, 4), _of_sums(1, 4)
add_narrow_row = _of_sums(1, 1)


@intrinsic
def add_taps(context, out, taps, size, right, ids, count):
    """out[c] = taps[count, c] + Σ_k taps[count - 1 - k, c] · right[ids[k] + c], for k < count,
    added up in this order, and c < size, of which only whole vectors are written.

    out [size], taps [count + 1, size], right contiguous float32, of which elements are counted; ids
    int64.
    """
    _checked(out, taps, right, ids)
    n = types.int64
    return types.void(out, taps, n, right, ids, n), _convolution


@intrinsic
def add_up_lanes(context, out, numbers, count):
    """out[l] = numbers[l] + numbers[LANES + l] + …, of the whole vectors among the first ``count``
    numbers, added up in this order.

    out [LANES], numbers: contiguous float32 arrays.
    """
    _checked(out, numbers)
    return types.void(out, numbers, types.int64), _lanes


@intrinsic
def largest_of(context, numbers, count):
    """The largest of the first ``count``, a multiple of LANES; NaN is passed over.

    numbers: a contiguous float32 array.
    """
    _checked(numbers)
    return types.float32(numbers, types.int64), _largest
