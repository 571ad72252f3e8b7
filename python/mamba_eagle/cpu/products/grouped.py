"""Products on a CPU with weights of int8 or int4 groups: integers within groups of 32.

    y_ro = Σ_g scale_og s_rg Σ_i number_oi q_ri (+ minimum_og s_rg Σ_i q_ri)

Inputs are rounded to int8 (naive.py), four of them are multiplied with 16 outputs' weights in one
instruction where the processor has it, and integer sums are exact: a row's outputs do not depend on
the instructions, the batch or the threads. A block holds 16 outputs: codes [in / 32, 512 bytes, or
256 of four bits], scales [in / 32, 16]. Codes are unsigned; what is added to them is subtracted
once per group, since Σ (number + offset) q = Σ number q + offset Σ q.
"""

from collections.abc import Callable
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
import torch
from llvmlite import ir
from torch import Tensor

from mamba_eagle.cpu import abi
from mamba_eagle.cpu.memory import pointer_to
from mamba_eagle.cpu.products.transpose import transpose
from mamba_eagle.cpu.span_kernels import SpanKernel, vector_kernel
from mamba_eagle.cpu.vectors.code import F32, FLOATS, HALF, I8, I32, I64, INTS, LANES, Code, has
from mamba_eagle.cpu.vectors.rounding import GROUP, round_groups
from mamba_eagle.machine_code import exactly, numba
from mamba_eagle.quantization.group_rounding import order_nibbles

QUAD = 4  # inputs per instruction
# what a core reads, multiplies and rounds, at best
BYTES_PER_NS, PRODUCTS_PER_NS, ROUNDED_PER_NS = 12, 200, 3
# Bytes between the codes that are asked for and those that are read, about 100 ns. Four bits only:
# eight are read as fast as the memory gives them without that.
AHEAD = 4096
FEW = 4  # rows up to which it is the memory that a product waits for
OFFSET = {8: 128, 4: 8}  # of codes, by bits; 0 where there is a minimum
# A half of a vector, as AVX2 reads it
SIGNS = -0x7F7F7F80  # of four bytes
BYTES, SHORTS, HALF_INTS = (ir.VectorType(ir.IntType(32 * 8 // n), n) for n in (32, 16, 8))


class Blocks(NamedTuple):
    """A weight [out, in] in the order of products."""

    codes: Tensor  # [blocks, in / 32, 512 or 256] uint8
    scale: Tensor  # [blocks, in / 32, 16] float16 or float32
    minimum: Tensor | None  # as scale

    @property
    def bits(self) -> int:
        return self.codes.shape[-1] * 8 // (GROUP * LANES)

    @property
    def inputs(self) -> int:
        return self.codes.shape[1] * GROUP

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self if part is not None)


def offset_of(weight: Blocks) -> int:
    """What zero is stored as."""
    return 0 if weight.minimum is not None else OFFSET[weight.bits]


def blocks(codes: Tensor, scale: Tensor, minimum: Tensor | None) -> Blocks:
    """codes [out, in] int8 or [out, in / 2] uint8, of which the low bits are the even columns;
    scale, minimum [out, in / group], group a multiple of 32."""
    bits = 8 if codes.dtype == torch.int8 else 4
    inputs = codes.shape[1] * 8 // bits
    repeat = inputs // GROUP // scale.shape[1]
    scale, minimum = (
        part if part is None else _scales(part.repeat_interleave(repeat, 1))
        for part in (scale, minimum)
    )
    codes = _whole_blocks(codes)
    # words of four neighbouring inputs; of four bits, of eight
    words = codes.view(torch.int32) if bits == 8 else order_nibbles(codes)
    made = torch.empty(len(words) // LANES, words.shape[1], LANES, dtype=torch.int32)
    transpose(words, made)
    packed = made.view(torch.uint8)
    if bits == 8:
        packed.bitwise_xor_(128)
    return Blocks(packed.view(len(made), inputs // GROUP, -1), scale, minimum)


def _whole_blocks(part: Tensor) -> Tensor:
    """With rows of zeros, to a multiple of 16."""
    missing = -len(part) % LANES
    return torch.cat([part, part.new_zeros(missing, part.shape[1])]) if missing else part


def _scales(part: Tensor) -> Tensor:
    """[out, groups] -> [blocks, groups, 16]"""
    return _whole_blocks(part).unflatten(0, (-1, LANES)).transpose(1, 2).contiguous()


def rows_of(weight: Blocks, ids: Tensor) -> Tensor:
    """Outputs ``ids`` [n], dequantized: [n, in] float32."""
    block, lane = ids // LANES, ids % LANES
    quads = weight.codes.view(len(weight.codes), -1, LANES, QUAD)[block, :, lane]
    if weight.bits == 4:
        quads = torch.stack([quads & 15, quads >> 4], dim=-2)
    numbers = quads.reshape(len(ids), -1, GROUP).float() - offset_of(weight)
    rows = numbers * weight.scale[block, :, lane].float()[..., None]
    if weight.minimum is not None:
        rows += weight.minimum[block, :, lane].float()[..., None]
    return rows.flatten(1)


@exactly
def round_rows(x, numbers, scale, total):  # noqa: ANN001, ANN201
    """x [n, in] -> numbers [n, in] int8, scale and total [n, in / 32]. A scale of what is not
    finite is not finite either."""
    for r in range(x.shape[0]):
        round_groups(x[r], numbers[r], scale[r], total[r])


def dot_by_bytes(code: Code, sums: Any, weights: Any, inputs: Any) -> Any:
    """sums + the products of four unsigned with four signed bytes, in each of 16 lanes. weights and
    inputs are 16 integers of four bytes each."""
    b = code.builder
    for byte in range(QUAD):
        left = INTS([8 * (QUAD - 1 - byte)] * LANES)
        down = INTS([24] * LANES)
        weight, given = b.lshr(b.shl(weights, left), down), b.ashr(b.shl(inputs, left), down)
        sums = b.add(sums, b.mul(weight, given))
    return sums


def dot_at_once(code: Code, sums: Any, weights: Any, inputs: Any) -> Any:
    """The same as one instruction of AVX-512."""
    return code.call("llvm.x86.avx512.vpdpbusd.512", INTS, sums, weights, inputs)


class Dots:
    """A group's products with one row, four inputs at a time."""

    def __init__(self, code: Code, bits: int, dot: Callable[..., Any]) -> None:
        self.code, self.dot = code, dot
        self.offset = OFFSET[bits]  # of the numbers that are multiplied

    def prepared(self, weights: Any) -> Any:
        """What rows share: from 16 outputs' codes of four inputs."""
        return weights

    def add(self, sums: Any, weights: list[Any], inputs: list[Any]) -> Any:
        """sums + Σ weights · inputs, of the quads of a group, in each of 16 lanes."""
        for weight, given in zip(weights, inputs, strict=True):
            sums = self.dot(self.code, sums, weight, given)
        return sums


class PairDots(Dots):
    """The same with AVX2, which multiplies unsigned with signed bytes and adds up pairs of products
    in 16 bits. Those have room for all pairs of a group of four bits, and for one pair of a byte
    below 129 with one below 128: so there it is the size of a weight by the input with the weight's
    sign."""

    def __init__(self, code: Code, bits: int) -> None:
        super().__init__(code, bits, dot_by_bytes)
        self.bits = bits
        self.offset = OFFSET[bits] if bits == 4 else 0

    def prepared(self, weights: Any) -> Any:
        if self.bits == 4:
            return self._halves(weights)
        signed = self._halves(self.code.builder.xor(weights, INTS([SIGNS] * LANES)))
        return [(self._call("psign.b", BYTES, half, half), half) for half in signed]

    def add(self, sums: Any, weights: list[Any], inputs: list[Any]) -> Any:
        given = [self._halves(quad) for quad in inputs]
        halves = [
            self._added_up([(weight[i], quad[i]) for weight, quad in zip(weights, given)])
            for i in range(2)
        ]
        b = self.code.builder
        return b.add(sums, b.shuffle_vector(*halves, INTS(list(range(LANES)))))

    def _added_up(self, products: list[Any]) -> Any:
        add, ones = self.code.builder.add, SHORTS([1] * 16)
        if self.bits == 4:
            pairs = [self._call("pmadd.ub.sw", SHORTS, *each) for each in products]
            return self._call("pmadd.wd", HALF_INTS, reduce(add, pairs), ones)
        quads = []
        for (size, sign), given in products:
            signed = self._call("psign.b", BYTES, given, sign)
            pairs = self._call("pmadd.ub.sw", SHORTS, size, signed)
            quads.append(self._call("pmadd.wd", HALF_INTS, pairs, ones))
        return reduce(add, quads)

    def _halves(self, vector: Any) -> list[Any]:
        """Of 16 integers, as bytes."""
        halves = (range(LANES // 2), range(LANES // 2, LANES))
        return [self.code.builder.bitcast(self.code.lanes_of(vector, own), BYTES) for own in halves]

    def _call(self, name: str, result: Any, *values: Any) -> Any:
        return self.code.call(f"llvm.x86.avx2.{name}", result, *values)


def byte_dots(code: Code, bits: int) -> Dots:
    return Dots(code, bits, dot_by_bytes)


def dots_of_this_processor(code: Code, bits: int) -> Dots:
    if has("avx512vnni"):
        return Dots(code, bits, dot_at_once)
    return PairDots(code, bits) if has("avx2") else byte_dots(code, bits)


class Form(NamedTuple):
    """What products depend on."""

    bits: int
    wide: bool  # whether scales are float32
    minimum: bool


def grouped_product(form: Form, dots: Callable[[Code, int], Dots] = dots_of_this_processor) -> Any:
    """Products with weights of one form."""

    def write(code: Code, arguments: Any, first: Any, last: Any) -> None:
        b = code.builder
        given = code.fields(arguments, abi.GroupedProduct)
        with code.loop(b.sub(last, first)) as index:
            block = b.add(first, index)
            code.row_tiles(
                given.rows,
                lambda count, row: _Tile(code, form, dots(code, form.bits), count).write(
                    given, row, block
                ),
            )

    return write


class _Tile:
    """The products of some rows with one block of outputs."""

    def __init__(self, code: Code, form: Form, dots: Dots, rows: int) -> None:
        self.code, self.form, self.dots, self.rows = code, form, dots, range(rows)
        self.offset = 0 if form.minimum else dots.offset
        self.bytes = GROUP * LANES * form.bits // 8  # of a group's codes

    def write(self, given: Any, row: Any, block: Any) -> None:
        """given: the fields of an ``abi.GroupedProduct``."""
        code, b, groups = self.code, self.code.builder, given.groups
        sums = code.holding([FLOATS([0.0] * LANES)] * len(self.rows))
        rows = [b.add(row, I64(r)) for r in self.rows]
        inputs = [
            (
                code.at(given.numbers, code.times(one, groups, I64(GROUP)), I8),
                code.at(given.scale, b.mul(one, groups), F32),
                code.at(given.total, b.mul(one, groups), I32),
            )
            for one in rows
        ]
        before = b.mul(block, groups)
        with code.loop(groups) as group:
            at = b.add(before, group)
            place = code.at(given.codes, b.mul(at, I64(self.bytes)), I8)
            if self.form.bits == 4 and len(self.rows) <= FEW:
                code.prefetch(place, AHEAD, self.bytes)
            weights = [self.dots.prepared(each) for each in self._weights(place)]
            scales = self._scales(given.weight_scale, at)
            minima = self._scales(given.weight_minimum, at) if self.form.minimum else None
            for one, place in zip(inputs, sums, strict=True):
                self._add(one, group, weights, (scales, minima), place)
        for one, place in zip(rows, sums, strict=True):
            at = b.add(b.mul(one, given.width), b.mul(block, I64(LANES)))
            code.store(b.load(place), given.y, at)

    def _weights(self, pointer: Any) -> list[Any]:
        """A group's codes: eight vectors of four inputs and 16 outputs."""
        code, b = self.code, self.code.builder
        count = self.bytes // (LANES * QUAD)
        stored = [code.vector(pointer, I64(i * LANES), I32) for i in range(count)]
        if self.form.bits == 8:
            return stored
        low, four = INTS([0x0F0F0F0F] * LANES), INTS([4] * LANES)
        return [
            half for both in stored for half in (b.and_(both, low), b.and_(b.lshr(both, four), low))
        ]

    def _scales(self, pointer: Any, at: Any) -> Any:
        kind = F32 if self.form.wide else HALF
        values = self.code.vector(pointer, self.code.builder.mul(at, I64(LANES)), kind)
        return values if self.form.wide else self.code.builder.fpext(values, FLOATS)

    def _add(self, row: Any, group: Any, weights: list[Any], scales: Any, place: Any) -> None:
        """Add a group's products with one row."""
        code, b = self.code, self.code.builder
        numbers, scale, total = row
        count = code.load(total, group, I32)
        exact = code.splat(b.mul(count, I32(-self.offset))) if self.offset else INTS([0] * LANES)
        first = b.mul(group, I64(GROUP // QUAD))
        quads = [code.load(numbers, b.add(first, I64(i)), I32) for i in range(len(weights))]
        exact = self.dots.add(exact, weights, [code.splat(four) for four in quads])
        share = code.load(scale, group, F32)
        factor = b.fmul(scales[0], code.splat(share))
        sums = code.multiply_add(b.sitofp(exact, FLOATS), factor, b.load(place))
        if scales[1] is not None:
            shift = b.fmul(b.sitofp(count, F32), share)
            sums = code.multiply_add(scales[1], code.splat(shift), sums)
        b.store(sums, place)


# no product takes eight bits with a minimum (packed.py)
FORMS = [Form(8, wide, False) for wide in (False, True)] + [
    Form(4, wide, minimum) for wide in (False, True) for minimum in (False, True)
]
PRODUCTS = {
    form: vector_kernel("grouped_{}_wide_{}_minimum_{}".format(*form), grouped_product(form))
    for form in FORMS
}


def product_of(weight: Blocks) -> SpanKernel:
    wide = weight.scale.dtype == torch.float32
    return PRODUCTS[Form(weight.bits, wide, weight.minimum is not None)]


product_at = abi.reader(abi.GroupedProduct)


def _round_span(arguments, first, last):  # noqa: ANN001, ANN202
    """Rows [first, last) by round_rows, for a product."""
    given = product_at(arguments)
    n, groups = given.rows, given.groups
    x = abi.floats(given.x, (n, groups * GROUP))
    numbers = numba.carray(pointer_to(given.numbers), (n, groups * GROUP), np.int8)
    scale = abi.floats(given.scale, (n, groups))
    total = numba.carray(pointer_to(given.total), (n, groups), np.int32)
    round_rows(x[first:last], numbers[first:last], scale[first:last], total[first:last])


ROUND = SpanKernel(_round_span)
