"""Small products for Numba kernels, in vector instructions that it would not find itself.

Numba gives LLVM loops over arrays that may overlap, so sums pass through memory and wait for each
other. Here a tile of 4 rows by COLUMNS sums stays in registers for the whole product. And a product
of rows with one vector, which are read from the memory once, asks for them ahead.
"""

from __future__ import annotations

from typing import Any

from mamba_eagle.kernels.numba_words import ask_for

try:
    from llvmlite import binding, ir
    from numba.core import cgutils, errors, types
    from numba.extending import intrinsic
except ImportError:  # as in numba_math
    intrinsic = None

# float32 numbers per vector register
LANES = 16 if intrinsic and binding.get_host_cpu_features().get("avx512f") else 8
ROWS, VECTORS = 4, 2
COLUMNS = VECTORS * LANES
AHEAD = 4096  # bytes, between what is asked for and what is read: about 100 ns


def _emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    """``add_tile`` in LLVM's language."""

    def data(place: int) -> Any:
        kind, value = signature.args[place], arguments[place]
        return context.make_array(kind)(context, builder, value).data

    out, weights, rows = data(0), data(3), data(7)
    _, out_at, out_row, _, weight_at, weight_row, weight_k, _, row_at, row_stride, K = arguments
    index, number = K.type, ir.FloatType()
    vector = ir.VectorType(number, LANES)
    zero, one = ir.Constant(index, 0), ir.Constant(index, 1)

    def times(value: Any, factor: int) -> Any:
        return builder.mul(value, ir.Constant(index, factor))

    def vectors_at(base: Any, at: Any) -> list[Any]:
        steps = [builder.add(at, ir.Constant(index, v * LANES)) for v in range(VECTORS)]
        return [builder.bitcast(builder.gep(base, [s]), vector.as_pointer()) for s in steps]

    places = [
        place
        for r in range(ROWS)
        for place in vectors_at(out, builder.add(out_at, times(out_row, r)))
    ]
    begun = [builder.load(place, align=4) for place in places]
    before = builder.block
    loop = builder.append_basic_block("tile")
    after = builder.append_basic_block("tile.end")
    builder.branch(loop)
    builder.position_at_end(loop)
    k = builder.phi(index)
    k.add_incoming(zero, before)
    sums = [builder.phi(vector) for _ in places]
    for total, start in zip(sums, begun):
        total.add_incoming(start, before)
    row = vectors_at(rows, builder.add(row_at, builder.mul(k, row_stride)))
    values = [builder.load(place, align=4) for place in row]
    weight = builder.add(weight_at, builder.mul(k, weight_k))
    splat = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
    grown = []
    for r in range(ROWS):
        at = builder.add(weight, times(weight_row, r))
        scalar = builder.load(builder.gep(weights, [at]), align=4)
        undefined = ir.Constant(vector, ir.Undefined)
        single = builder.insert_element(undefined, scalar, ir.Constant(ir.IntType(32), 0))
        factor = builder.shuffle_vector(single, undefined, splat)
        for v, value in enumerate(values):
            product = builder.fmul(factor, value, flags=("contract",))
            grown.append(builder.fadd(sums[r * VECTORS + v], product, flags=("contract",)))
    for total, new in zip(sums, grown):
        total.add_incoming(new, loop)
    following = builder.add(k, one)
    k.add_incoming(following, loop)
    builder.cbranch(builder.icmp_signed("<", following, K), loop, after)
    builder.position_at_end(after)
    for place, new in zip(places, grown):
        builder.store(new, place, align=4)
    return context.get_dummy_value()


def add_tile(  # noqa: PLR0913
    out, out_at, out_row, weights, weight_at, weight_row, weight_k, rows, row_at, row_stride, K
):
    """out[r, c] += Σ_k weights[r, k] · rows[k, c] for r < ROWS, c < COLUMNS, k < K, K at least 1.

    out, weights, rows: contiguous float32 arrays; each is read from element ``…_at`` on, with so
    many elements from one r or one k to the next. out must not overlap the others.
    """
    raise NotImplementedError


def _emit_dots(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    """``add_dots`` in LLVM's language."""

    def data(place: int) -> Any:
        return context.make_array(signature.args[place])(context, builder, arguments[place]).data

    out, rows, factors = data(0), data(2), data(3)
    out_at, scale, count, size = arguments[1], *arguments[4:]
    number = ir.FloatType()
    vector = ir.VectorType(number, LANES)

    def vector_at(base: Any, at: Any) -> Any:
        return builder.bitcast(builder.gep(base, [at]), vector.as_pointer())

    total = cgutils.alloca_once(builder, vector)
    with cgutils.for_range(builder, count) as row:
        builder.store(ir.Constant(vector, [0.0] * LANES), total)
        begin = builder.mul(row.index, size)
        steps = builder.udiv(size, ir.Constant(size.type, LANES))
        with cgutils.for_range(builder, steps) as step:
            column = builder.mul(step.index, ir.Constant(size.type, LANES))
            place = vector_at(rows, builder.add(begin, column))
            far = builder.add(builder.ptrtoint(place, size.type), ir.Constant(size.type, AHEAD))
            ask_for(builder, builder.inttoptr(far, ir.IntType(8).as_pointer()))
            read = builder.load(place, align=4)
            factor = builder.load(vector_at(factors, column), align=4)
            product = builder.fmul(read, factor, flags=("contract",))
            builder.store(builder.fadd(builder.load(total), product, flags=("contract",)), total)
        place = builder.gep(out, [builder.add(out_at, row.index)])
        scaled = builder.fmul(scale, _sum(builder, builder.load(total)), flags=("contract",))
        builder.store(builder.fadd(builder.load(place), scaled, flags=("contract",)), place)
    return context.get_dummy_value()


def _sum(builder: Any, vector: Any) -> Any:
    """Of a vector's numbers: halves are added until one is left."""
    size = LANES
    while size > 1:
        size //= 2
        halves = [
            ir.Constant(ir.VectorType(ir.IntType(32), size), list(range(first, first + size)))
            for first in (0, size)
        ]
        low, high = (builder.shuffle_vector(vector, vector, half) for half in halves)
        vector = builder.fadd(low, high)
    return builder.extract_element(vector, ir.IntType(32)(0))


def add_dots(out, out_at, rows, factors, scale, P, N):  # noqa: PLR0913
    """out[out_at + p] += scale · Σ_n rows[p, n] · factors[n] for p < P, N a multiple of LANES.

    out, rows, factors: contiguous float32 arrays that do not overlap.
    """
    raise NotImplementedError


if intrinsic is not None:

    @intrinsic  # type: ignore[no-redef]
    def add_tile(  # noqa: F811, PLR0913
        context, out, out_at, out_row, weights, weight_at, weight_row, weight_k, rows, row_at,
        row_stride, K,
    ):  # fmt: skip
        given = (out, weights, rows)
        if not all(isinstance(each, types.Array) and each.layout == "C" for each in given):
            raise errors.TypingError("add_tile takes contiguous arrays")
        n = types.intp
        return types.void(out, n, n, weights, n, n, n, rows, n, n, n), _emit

    @intrinsic  # type: ignore[no-redef]
    def add_dots(context, out, out_at, rows, factors, scale, P, N):  # noqa: F811, PLR0913
        if not all(isinstance(each, types.Array) and each.layout == "C" for each in (out, rows)):
            raise errors.TypingError("add_dots takes contiguous arrays")
        n = types.intp
        return types.void(out, n, rows, factors, types.float32, n, n), _emit_dots
