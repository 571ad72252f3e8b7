"""Matrix products on a CPU in float32, with weights of 16 or 32 bits in panels.

A panel is the weight of 64 outputs, [4, in, 16]: a vector is one input of 16 outputs. Checkpoints
are published in bfloat16, so keeping their 16 bits and widening them in registers changes no value
and halves what few rows read. Many rows share what is widened; measurements are in
docs/design/kernels.md.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mamba_eagle.kernels.vector_code import (
    F32,
    FLOATS,
    HALF,
    I8,
    I16,
    I64,
    INTS,
    LANES,
    Call,
    Code,
    SpanKernel,
    vector_code,
)
from mamba_eagle.kernels.vector_transpose import transpose

BLOCKS = 4  # of outputs, per panel
PANEL = BLOCKS * LANES
# Inputs that are added up one after the other; then these sums are. That keeps rounding errors of
# long rows as small as those of short ones.
SPAN = 512
SHARED = {8: 2, 4: 4, 2: 4, 1: 4}  # blocks that share a pass over the inputs, by rows
BYTES_PER_NS, PRODUCTS_PER_NS = 12, 70  # what a core reads, and multiplies, at best


def panels(weight: Tensor) -> Tensor:
    """[out, in] -> [panels, 4, in, 16], of the same dtype; outputs that are not there are zero."""
    outputs, inputs = weight.shape
    count = -(-outputs // PANEL)
    made = torch.empty(count, BLOCKS, inputs, LANES, dtype=weight.dtype)
    blocks, whole = made.flatten(0, 1), outputs // LANES
    transpose(weight[: whole * LANES], blocks[:whole])
    if whole < len(blocks):
        rest = weight.new_zeros((len(blocks) - whole) * LANES, inputs)
        rest[: outputs - whole * LANES] = weight[whole * LANES :]
        transpose(rest, blocks[whole:])
    return made


def rows_of(weight: Tensor, ids: Tensor) -> Tensor:
    """Outputs ``ids`` [n] of panels: [n, in]."""
    flat = weight.flatten(0, 1)  # blocks
    return flat[ids // LANES, :, ids % LANES]


def _product(kind: str) -> Any:
    """Products with weights of an LLVM type: "bfloat", "half" or "float".

    Arguments: x [n, in], panels, y [n, 64 * panels], all aligned to their numbers; n, in, columns
    of y.
    """

    def write(code: Code, arguments: Any, first: Any, last: Any) -> None:
        b = code.builder
        given = [code.load(arguments, I64(i), I64) for i in range(6)]
        x, weight, y = (b.inttoptr(address, I8.as_pointer()) for address in given[:3])
        rows, inputs, width = given[3:]
        with code.loop(b.sub(last, first)) as index:
            panel = b.add(first, index)

            def tile(count: int, row: Any) -> None:
                for block in range(0, BLOCKS, SHARED[count]):
                    at = b.add(b.mul(panel, I64(BLOCKS)), I64(block))
                    _Tile(code, kind, count, SHARED[count]).write(
                        (x, weight, y), (inputs, width), row, at
                    )

            code.row_tiles(rows, tile)

    return vector_code(write)


class _Tile:
    """The products of some rows with some neighbouring blocks of outputs."""

    def __init__(self, code: Code, kind: str, rows: int, blocks: int) -> None:
        self.code, self.kind = code, kind
        self.rows, self.blocks = range(rows), range(blocks)

    def write(
        self, pointers: tuple[Any, ...], sizes: tuple[Any, ...], row: Any, block: Any
    ) -> None:
        """row, block: the first ones."""
        code, b = self.code, self.code.builder
        (x, weight, y), (inputs, width) = pointers, sizes
        count = len(self.rows) * len(self.blocks)
        whole, part = code.variables(count), code.variables(count)
        zero = FLOATS([0.0] * LANES)
        for sums in whole:
            b.store(zero, sums)
        given = [code.at(x, b.mul(b.add(row, I64(r)), inputs), F32) for r in self.rows]
        step = b.mul(inputs, I64(LANES))
        weights = [
            code.at(weight, b.mul(b.add(block, I64(v)), step), self.stored) for v in self.blocks
        ]
        with code.loop(b.udiv(b.add(inputs, I64(SPAN - 1)), I64(SPAN))) as span:
            begin = b.mul(span, I64(SPAN))
            left = b.sub(inputs, begin)
            length = b.select(b.icmp_signed("<", left, I64(SPAN)), left, I64(SPAN))
            for sums in part:
                b.store(zero, sums)
            with code.loop(length) as index:
                self._multiply(given, weights, b.add(begin, index), part)
            for sums, more in zip(whole, part, strict=True):
                b.store(b.fadd(b.load(sums), b.load(more)), sums)
        for i, sums in enumerate(whole):
            r, v = divmod(i, len(self.blocks))
            at = b.mul(b.add(row, I64(r)), width)
            code.store(b.load(sums), y, b.add(at, b.mul(b.add(block, I64(v)), I64(LANES))))

    def _multiply(self, given: list[Any], weights: list[Any], i: Any, sums: list[Any]) -> None:
        """Add the products of input i."""
        code, b = self.code, self.code.builder
        wide = [self._widened(pointer, b.mul(i, I64(LANES))) for pointer in weights]
        for r, pointer in enumerate(given):
            factor = code.splat(code.load(pointer, i, F32))
            for v, numbers in enumerate(wide):
                place = sums[r * len(wide) + v]
                b.store(code.multiply_add(numbers, factor, b.load(place)), place)

    @property
    def stored(self) -> Any:
        """The type of a weight."""
        return {"bfloat": I16, "half": HALF, "float": F32}[self.kind]

    def _widened(self, pointer: Any, index: Any) -> Any:
        """16 weights as float32. A bfloat16 is the upper half of one."""
        b, numbers = self.code.builder, self.code.vector(pointer, index, self.stored)
        if self.kind == "float":
            return numbers
        if self.kind == "half":
            return b.fpext(numbers, FLOATS)
        bits = b.shl(b.zext(numbers, INTS), INTS([16] * LANES))
        return b.bitcast(bits, FLOATS)


_bfloat, _half, _float = _product("bfloat"), _product("half"), _product("float")


def _bfloat_weights(arguments, first, last):  # noqa: ANN001, ANN202
    _bfloat(arguments, first, last)


def _half_weights(arguments, first, last):  # noqa: ANN001, ANN202
    _half(arguments, first, last)


def _float_weights(arguments, first, last):  # noqa: ANN001, ANN202
    _float(arguments, first, last)


PRODUCTS = {
    torch.bfloat16: SpanKernel(_bfloat_weights),
    torch.float16: SpanKernel(_half_weights),
    torch.float32: SpanKernel(_float_weights),
}


class Product:
    """y = x Wᵀ with panels of ``outputs`` outputs."""

    def __init__(self, weight: Tensor, outputs: int) -> None:
        self.weight, self.outputs, self.count = weight, outputs, weight.shape[0]
        self.inputs, self.width = weight.shape[2], weight.shape[0] * PANEL
        self.read_ns = weight.nbytes // BYTES_PER_NS
        sizes = (0, self.inputs, self.width)
        self.call = Call(PRODUCTS[weight.dtype], 0, weight.data_ptr(), 0, *sizes)

    def __call__(self, x: Tensor) -> Tensor:
        """x [n, in] float32 -> [n, outputs]."""
        if not x.is_contiguous():
            x = x.contiguous()
        n, call = x.shape[0], self.call
        y = torch.empty(n, self.width)
        given = call.arguments
        given[0], given[2], given[3] = x.data_ptr(), y.data_ptr(), n
        call.run(self.count, max(self.read_ns, n * self.inputs * self.width // PRODUCTS_PER_NS))
        return y if self.outputs == self.width else y[:, : self.outputs].contiguous()


def product(x: Tensor, weight: Tensor, outputs: int) -> Tensor:
    """One such product."""
    return Product(weight, outputs)(x)
