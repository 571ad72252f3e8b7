"""Matrix products on a CPU in float32, with weights of 16 or 32 bits in panels.

A panel is the weight of 64 outputs, [in, 64]: a vector is one input of 16 outputs, and few rows
read a weight from its first byte to its last, as fast as the memory gives it. Checkpoints are
published in bfloat16, so keeping their 16 bits and widening them in registers changes no value and
halves what few rows read. Many rows share what is widened; measurements are in
benchmark/cpu.md. An output in bfloat16 lies beside the one that is a register further on
(``PAIR``), so that a vector of such pairs becomes two registers by one shift and one mask.
"""

from typing import Any

import torch
from torch import Tensor

from mamba_eagle.cpu import abi
from mamba_eagle.cpu.products.transpose import PAIR, place_in_pairs, transpose
from mamba_eagle.cpu.span_kernels import vector_kernel
from mamba_eagle.cpu.vectors.code import F32, HALF, I16, I32, I64, LANES, Code, has

BLOCKS = 4  # of outputs, per panel
PANEL = BLOCKS * LANES
# Inputs that are added up one after the other; then these sums are. That keeps rounding errors of
# long rows as small as those of short ones.
SPAN = 512
# Outputs that share a pass over the inputs, by rows: their sums, their weights and a factor fill up
# to 32 registers of 16 numbers, or 16 of eight.
SHARED = (
    dict.fromkeys(range(1, 7), 64) | {7: 32, 8: 32}
    if has("avx512f")
    else {1: 64, 2: 32} | dict.fromkeys(range(3, 7), 16)
)
AHEAD = 4096  # bytes, between what is asked for and what is read: about 100 ns
BYTES_PER_NS, PRODUCTS_PER_NS = 12, 70  # what a core reads, and multiplies, at best


def panels(weight: Tensor) -> Tensor:
    """[out, in] -> [panels, in, 64], of the same dtype; outputs that are not there are zero."""
    outputs, inputs = weight.shape
    count, whole = -(-outputs // PANEL), outputs // PANEL
    made = torch.empty(count, inputs, PANEL, dtype=weight.dtype)
    transpose(weight[: whole * PANEL], made[:whole])
    if whole < count:
        rest = weight.new_zeros(PANEL, inputs)
        rest[: outputs - whole * PANEL] = weight[whole * PANEL :]
        transpose(rest, made[whole:])
    return made


def rows_of(weight: Tensor, ids: Tensor) -> Tensor:
    """Outputs ``ids`` [n] of panels: [n, in]."""
    place = ids % PANEL
    if weight.dtype == torch.bfloat16:
        place = place_in_pairs.py_func(place, PAIR)
    return weight[ids // PANEL, :, place]


def _product(kind: str) -> Any:
    """Products with weights of an LLVM type: "bfloat", "half" or "float".

    x [n, in], panels and y [n, 64 * panels] are aligned to their numbers.
    """

    def write(code: Code, arguments: Any, first: Any, last: Any) -> None:
        b = code.builder
        given = code.fields(arguments, abi.Product)
        with code.loop(b.sub(last, first)) as index:
            panel = b.add(first, index)

            def tile(count: int, row: Any) -> None:
                for output in range(0, PANEL, SHARED[count]):
                    own = _Tile(code, kind, count, SHARED[count], asks=output == 0)
                    own.write(given, row, panel, output)

            code.row_tiles(given.rows, tile, max(SHARED))

    return write


class _Tile:
    """The products of some rows with some neighbouring outputs."""

    def __init__(self, code: Code, kind: str, rows: int, outputs: int, asks: bool) -> None:
        """asks: for what is read later; the first pass over a panel does, for all."""
        self.code = Code(code.builder, PAIR)
        self.kind, self.asks = kind, asks
        # of a weight: its type and size
        self.stored, self.bytes = {"bfloat": (I16, 2), "half": (HALF, 2), "float": (F32, 4)}[kind]
        self.rows, self.vectors = range(rows), range(0, outputs, self.code.lanes)

    def write(self, given: Any, row: Any, panel: Any, output: int) -> None:
        """given: the fields of an ``abi.Product``; row: the first one; output: the panel's first
        one."""
        code, b, inputs = self.code, self.code.builder, given.inputs
        count = len(self.rows) * len(self.vectors)
        whole, part = code.variables(count), code.variables(count)
        zero = code.of(F32)([0.0] * code.lanes)
        for sums in whole:
            b.store(zero, sums)
        rows = [code.at(given.x, b.mul(b.add(row, I64(r)), inputs), F32) for r in self.rows]
        first = b.add(b.mul(panel, I64(PANEL)), I64(output))
        begin_weights = b.add(code.times(panel, inputs, I64(PANEL)), I64(output))
        weights = code.at(given.weight, begin_weights, self.stored)
        with code.loop(b.udiv(b.add(inputs, I64(SPAN - 1)), I64(SPAN))) as span:
            begin = b.mul(span, I64(SPAN))
            left = b.sub(inputs, begin)
            length = b.select(b.icmp_signed("<", left, I64(SPAN)), left, I64(SPAN))
            for sums in part:
                b.store(zero, sums)
            with code.loop(length) as index:
                self._multiply(rows, weights, b.add(begin, index), part)
            for sums, more in zip(whole, part, strict=True):
                b.store(b.fadd(b.load(sums), b.load(more)), sums)
        for i, sums in enumerate(whole):
            r, v = divmod(i, len(self.vectors))
            at = b.mul(b.add(row, I64(r)), given.width)
            code.store(b.load(sums), given.y, code.sum(at, first, I64(self.vectors[v])))

    def _multiply(self, rows: list[Any], weights: Any, i: Any, sums: list[Any]) -> None:
        """Add the products of input i."""
        code, b = self.code, self.code.builder
        row = code.at(weights, b.mul(i, I64(PANEL)), self.stored)
        if self.asks:
            code.prefetch(row, AHEAD, PANEL * self.bytes)
        wide = self._pairs(row) if self.kind == "bfloat" else self._numbers(row)
        for r, pointer in enumerate(rows):
            factor = code.splat(code.load(pointer, i, F32))
            for v, numbers in enumerate(wide):
                place = sums[r * len(wide) + v]
                b.store(code.multiply_add(numbers, factor, b.load(place)), place)

    def _numbers(self, row: Any) -> list[Any]:
        """The weights of an input, as float32."""
        code = self.code
        stored = [code.vector(row, I64(at), self.stored) for at in self.vectors]
        if self.kind == "float":
            return stored
        return [code.builder.fpext(numbers, code.of(F32)) for numbers in stored]

    def _pairs(self, row: Any) -> list[Any]:
        """The same of bfloat16, each of which is the upper half of a float32."""
        code, b, ints, found = self.code, self.code.builder, self.code.of(I32), []
        for pair in range(len(self.vectors) // 2):
            both = code.vector(row, I64(pair * PAIR), I32)
            lower = b.shl(both, ints([16] * PAIR))
            upper = b.and_(both, ints([-(1 << 16)] * PAIR))
            found += [b.bitcast(bits, code.of(F32)) for bits in (lower, upper)]
        return found


PRODUCTS = {
    torch.bfloat16: vector_kernel("bfloat_weights", _product("bfloat")),
    torch.float16: vector_kernel("half_weights", _product("half")),
    torch.float32: vector_kernel("float_weights", _product("float")),
}
