"""Small products for Numba kernels, in vector instructions that it would not find itself.

Numba gives LLVM loops over arrays that may overlap, so sums pass through memory and wait for each
other. Here a tile of 4 rows by COLUMNS sums stays in registers for the whole product.
"""

from __future__ import annotations

from typing import Any

try:
    from llvmlite import binding, ir
    from numba.core import errors, types
    from numba.extending import intrinsic
except ImportError:  # as in numba_math
    intrinsic = None

# float32 numbers per vector register
LANES = 16 if intrinsic and binding.get_host_cpu_features().get("avx512f") else 8
ROWS, VECTORS = 4, 2
COLUMNS = VECTORS * LANES


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
