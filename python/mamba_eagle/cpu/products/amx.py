"""Matrix products on a CPU with tile registers (Intel AMX), as exact as float32.

A tile register holds 16 rows of 64 bytes, and one instruction adds up 16 × 16 × 32 products of
bfloat16 numbers in float32: 16 times what vectors of float32 multiply in the same time. Weights are
bfloat16 as they were published. An input of float32 is the sum of three bfloat16 numbers with no
error, its upper, middle and lower 8 bits,

    x = high + mid + low,    y = Σ W·low + Σ W·mid + Σ W·high,

so three rows of a tile stand for one row of inputs. Products of two bfloat16 numbers are exact in
float32, and what is left are the roundings of sums, of which a product has fewer than one by
vectors (docs/design/kernels.md).

One tile has the parts of ``TILE_ROWS`` rows. A pass over a panel takes two of them at once, so each
tile of weights that is read is used for ten rows; up to five rows take as long as one. Outputs of a
row are added up in the same order however many rows there are: they do not depend on the batch, on
the row's place in it or on threads.

Intel, "Intel 64 and IA-32 Architectures Software Developer's Manual", volume 1, chapter 18: the
registers and their configuration. Linux, Documentation/arch/x86/xstate.rst: the permission.
"""

import ctypes
import platform
import sys
from functools import cache
from typing import Any

import torch
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic
from torch import Tensor

from mamba_eagle.cpu import abi
from mamba_eagle.cpu.memory import generated
from mamba_eagle.cpu.products.panels import BLOCKS, PANEL, panels
from mamba_eagle.cpu.products.panels import rows_of as rows_of_panels
from mamba_eagle.cpu.span_kernels import SpanKernel, vector_kernel
from mamba_eagle.cpu.vectors.code import F32, FLOATS, I8, I16, I64, INTS, LANES, Code, has

PARTS = 3  # of an input
TILE_ROWS = 5  # rows of inputs whose parts fit into the 16 rows of a tile
TILE_INPUTS = 32
TILE_BYTES = 1024  # 16 rows of 64 bytes
LINE = 64  # bytes of a tile's row
PART_BYTES = 2
AHEAD = 8192  # bytes, between what is asked for and what is read
PRODUCTS_PER_NS, SPLIT_PER_NS = 150, 4  # what a core multiplies and splits, at best
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18


@cache
def permitted() -> bool:
    """Whether the processor has tile registers for bfloat16, and the system lets this process use
    them, which it has to be asked for once."""
    if not has("amx-bf16") or sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    request = (_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA)
    return ctypes.CDLL(None).syscall(*map(ctypes.c_long, request)) == 0


def fits(weight: Tensor) -> bool:
    """Whether a weight [out, in] can be multiplied so."""
    return weight.dtype == torch.bfloat16 and weight.shape[1] % TILE_INPUTS == 0


def paired_panels(weight: Tensor) -> Tensor:
    """[out, in] bfloat16 -> [panels, in / 2, 64] int32: each has two neighbouring inputs of one
    output, as a tile does; outputs that are not there are zero."""
    return panels(weight.contiguous().view(torch.int32))


def rows_of(weight: Tensor, ids: Tensor) -> Tensor:
    """Outputs ``ids`` [n] of such panels: [n, in] bfloat16."""
    return rows_of_panels(weight, ids).contiguous().view(torch.bfloat16)


def parts_bytes(rows: int, inputs: int) -> int:
    """Bytes that the parts of ``rows`` rows take."""
    return -(-rows // TILE_ROWS) * inputs // TILE_INPUTS * TILE_BYTES


# ── inputs in three parts ────────────────────────────────────────────────────────────────────


def _write_parts(code: Code, given: Any) -> None:
    """Of rows [first, last) of x [·, in] float32; to parts [tiles, in / 32, 16, 32]: three rows of
    a tile each."""
    b = code.builder
    x, parts, inputs, first, last = given
    upper, sixteen = INTS([-(1 << 16)] * LANES), INTS([16] * LANES)
    short = ir.VectorType(I16, LANES)
    blocks = b.udiv(inputs, I64(TILE_INPUTS))
    with code.loop(b.sub(last, first)) as index:
        row = b.add(first, index)
        tile, place = b.udiv(row, I64(TILE_ROWS)), b.urem(row, I64(TILE_ROWS))
        begin = b.mul(row, inputs)
        with code.loop(blocks) as block:
            number = b.add(b.mul(tile, blocks), block)
            at = code.at(parts, b.mul(number, I64(TILE_BYTES)), I8)
            out = code.at(at, b.mul(place, I64(PARTS * LINE)), I8)
            for half in range(0, TILE_INPUTS, LANES):
                where = code.sum(begin, b.mul(block, I64(TILE_INPUTS)), I64(half))
                left = code.vector(x, where, F32)
                for part in range(PARTS):
                    bits = b.and_(b.bitcast(left, INTS), upper)
                    number = b.trunc(b.lshr(bits, sixteen), short)
                    code.store(number, out, I64(part * TILE_INPUTS + half))
                    left = b.fsub(left, b.bitcast(bits, FLOATS))


@intrinsic
def split_rows(typing: Any, x: Any, parts: Any, inputs: Any, first: Any, last: Any) -> Any:
    """Addresses of ``x`` and ``parts``; rows [first, last)."""
    write = generated(lambda builder, *given: _write_parts(Code(builder), given))
    return types.void(*[types.int64] * 5), write


# ── products ─────────────────────────────────────────────────────────────────────────────────


def _room(code: Code, kind: Any, count: int) -> Any:
    """Memory of a call, from the beginning of a cache line on."""
    room = cgutils.alloca_once(code.builder, ir.ArrayType(kind, count))
    room.align = LINE
    return room


class _Registers:
    """The eight tile registers: two for inputs, two for weights, four for sums."""

    INPUTS, WEIGHTS, SUMS = (0, 1), (2, 3), (4, 5, 6, 7)

    def __init__(self, code: Code) -> None:
        self.code = code
        self._room = _room(code, I8, LINE)

    def do(self, name: str, *given: Any) -> None:
        self.code.call(f"llvm.x86.{name}", ir.VoidType(), *given)

    def configure(self, first: Any, second: Any) -> None:
        """first, second: rows of inputs in the two tiles of inputs; sums have as many rows."""
        code, b = self.code, self.code.builder
        room = b.bitcast(self._room, I8.as_pointer())
        for word in range(0, LINE, 8):
            b.store(I64(0), code.at(room, I64(word // 8), I64))
        b.store(I8(1), room)  # the only palette
        parts = [b.trunc(b.mul(rows, I64(PARTS)), I8) for rows in (first, second)]
        rows = [*parts, I8(LANES), I8(LANES), parts[0], parts[0], parts[1], parts[1]]
        for register, count in enumerate(rows):
            b.store(I16(LINE), code.at(room, I64(8 + register), I16))
            b.store(count, code.at(room, I64(48 + register), I8))
        self.do("ldtilecfg", room)

    def load(self, register: int, pointer: Any, stride: int) -> None:
        self.do("tileloadd64", I8(register), pointer, I64(stride))


class _Panel:
    """The products of one panel with all rows."""

    def __init__(self, code: Code, registers: _Registers, given: Any) -> None:
        """given: the fields of an ``abi.Product``."""
        self.code, self.registers = code, registers
        b = code.builder
        self.parts, self.weight, self.y = given.x, given.weight, given.y
        self.inputs, self.width, pair = given.inputs, given.width, I64(2 * TILE_ROWS)
        self.pairs, self.left = b.udiv(given.rows, pair), b.urem(given.rows, pair)
        self.room = _room(code, F32, 4 * LANES * LANES)

    def write(self, panel: Any) -> None:
        code, b, tile = self.code, self.code.builder, I64(TILE_ROWS)
        with code.loop(self.pairs) as index:
            self._two(panel, b.mul(index, I64(2 * TILE_ROWS)), tile)
        # Configuring stops the pipeline of tiles, so it is not done where all tiles are alike.
        both = b.and_(
            b.icmp_unsigned(">", self.pairs, I64(0)), b.icmp_unsigned(">", self.left, I64(0))
        )
        done = b.mul(self.pairs, I64(2 * TILE_ROWS))
        with b.if_then(both):
            self.configure_rest()
        with b.if_then(b.icmp_unsigned(">", self.left, tile)):
            self._two(panel, done, b.sub(self.left, tile))
        few = b.icmp_unsigned("<=", self.left, tile)
        with b.if_then(b.and_(few, b.icmp_unsigned(">", self.left, I64(0)))):
            self._one(panel, done, self.left)
        with b.if_then(both):
            self.registers.configure(tile, tile)

    def configure(self) -> None:
        """For the first rows."""
        b = self.code.builder
        with b.if_else(b.icmp_unsigned(">", self.pairs, I64(0))) as (some, none):
            with some:
                self.registers.configure(I64(TILE_ROWS), I64(TILE_ROWS))
            with none:
                self.configure_rest()

    def configure_rest(self) -> None:
        """For the rows that do not fill a pair of tiles."""
        b, tile = self.code.builder, I64(TILE_ROWS)
        more = b.icmp_unsigned(">", self.left, tile)
        first = b.select(more, tile, self.left)
        self.registers.configure(first, b.select(more, b.sub(self.left, tile), first))

    def _two(self, panel: Any, row: Any, rest: Any) -> None:
        """Rows from ``row`` on: five, and ``rest`` more. A pass for each half of the panel."""
        for block in range(0, BLOCKS, 2):
            left, right = (0, block), (1, block + 1)
            self._sum(panel, row, [(0, *left), (0, *right), (1, *left), (1, *right)])
            self._store(panel, row, I64(TILE_ROWS), [(0, block), (1, block + 1)])
            second = self.code.builder.add(row, I64(TILE_ROWS))
            self._store(panel, second, rest, [(2, block), (3, block + 1)])

    def _one(self, panel: Any, row: Any, rows: Any) -> None:
        self._sum(panel, row, [(0, block % 2, block) for block in range(BLOCKS)])
        self._store(panel, row, rows, [(block, block) for block in range(BLOCKS)])

    def _sum(self, panel: Any, row: Any, products: list[tuple[int, int, int]]) -> None:
        """Four sums over all inputs, to ``room``. products: for each, which tile of inputs, which
        register of weights, and which block of the panel that has."""
        code, b, own = self.code, self.code.builder, self.registers
        blocks = b.udiv(self.inputs, I64(TILE_INPUTS))
        per_tile = b.mul(blocks, I64(TILE_BYTES))
        begin = code.at(self.parts, b.mul(b.udiv(row, I64(TILE_ROWS)), per_tile), I8)
        stride = PANEL * 2 * PART_BYTES
        weights = code.at(self.weight, code.times(panel, self.inputs, I64(stride // 2)), I8)
        for register in own.SUMS:
            own.do("tilezero", I8(register))
        with code.loop(blocks) as block:
            inputs = code.at(begin, b.mul(block, I64(TILE_BYTES)), I8)
            for tile in sorted({tile for tile, _, _ in products}):
                at = b.mul(per_tile, I64(tile))
                own.load(own.INPUTS[tile], code.at(inputs, at, I8), LINE)
            at = code.at(weights, b.mul(block, I64(LANES * stride)), I8)
            loaded: dict[int, int] = {}
            for number, (tile, register, of_panel) in enumerate(products):
                if loaded.get(register) != of_panel:
                    own.load(own.WEIGHTS[register], code.at(at, I64(of_panel * LINE), I8), stride)
                    loaded[register] = of_panel
                if products[0][2] == 0:  # the first pass over a panel asks for what is read later
                    share = LANES * stride // len(products)
                    code.prefetch(at, AHEAD + number * share, share)
                operands = (own.SUMS[number], own.INPUTS[tile], own.WEIGHTS[register])
                own.do("tdpbf16ps", *map(I8, operands))
        for number, register in enumerate(own.SUMS):
            at = code.at(self.room, I64(number * LANES * LANES), F32)
            own.do("tilestored64", I8(register), b.bitcast(at, I8.as_pointer()), I64(LINE))

    def _store(self, panel: Any, row: Any, rows: Any, sums: list[tuple[int, int]]) -> None:
        """The sums of each row's parts, to y. sums: their numbers in ``room``, and the blocks."""
        code, b = self.code, self.code.builder
        with code.loop(rows) as index:
            first = b.mul(b.add(row, index), self.width)
            for number, block in sums:
                at = b.add(I64(number * LANES * LANES), b.mul(index, I64(PARTS * LANES)))
                high, mid, low = (
                    code.vector(self.room, b.add(at, I64(part * LANES)), F32)
                    for part in range(PARTS)
                )
                total = b.fadd(b.fadd(low, mid), high)
                column = b.add(b.mul(panel, I64(PANEL)), I64(block * LANES))
                code.store(total, self.y, b.add(first, column))


def _product(code: Code, arguments: Any, first: Any, last: Any) -> None:
    """x: the parts of inputs."""
    b = code.builder
    registers = _Registers(code)
    given = code.fields(arguments, abi.Product)
    panel = _Panel(code, registers, given)
    panel.configure()
    with code.loop(b.sub(last, first)) as index:
        panel.write(b.add(first, index))
    registers.do("tilerelease")


split_at = abi.reader(abi.Split)


def _split_rows(arguments, first, last):  # noqa: ANN001, ANN202
    """Rows [first, last)."""
    given = split_at(arguments)
    split_rows(given.x, given.parts, given.inputs, first, last)


SPLIT, PRODUCT = SpanKernel(_split_rows), vector_kernel("paired_weights", _product)
