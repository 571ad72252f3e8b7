"""Products with weights of four bits on a GPU, for few tokens; and such weights dequantized.

A program multiplies some rows of the weight with all tokens. Four neighbouring columns of a row,
two bytes, are one unit, an integer of 16 bits; and so are, in 64 bits, four neighbouring columns of
the inputs. Tiles of units are loaded and laid out as any matrix; only then a unit becomes four
numbers in four tiles, each of which is multiplied with a quarter of the inputs' columns. So no
number moves between threads.

What limits the speed is the number of instructions per weight. Two units share a register: shifts
and masks place the bits of two codes where a 16-bit float has them, which gives E2M1 floats times a
power of two, or integers plus a power of two. The groups' scales are multiplied to both at once. A
unit's bits are put in another order beforehand, so that few shifts do (``Places``). E2M1 times E4M3
has six significant bits at most, so that NVFP4's weights are exact in 16 bits; of integers the
scale and the weight are rounded.

With slices, each warp multiplies all of the program's rows with columns of its own, and the warps'
sums are added at the end: programs have few rows, and there are enough of them to fill a GPU.
Without, all warps need all inputs, which a launch of its own takes apart beforehand.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mamba_eagle.kernels.float8.triton import join
from mamba_eagle.kernels.gpu import PROCESSORS, cdiv, launches_overlap, overlapping
from mamba_eagle.kernels.staged import Staged
from mamba_eagle.kernels.triton_math import INTERPRETED, exact_dot, fetch_ahead, previous_done

UNIT = 4  # columns of a unit
AHEAD = 8  # of a row, 128 bytes each, fetched while the previous kernel drains


class Config(NamedTuple):
    """How a product is divided; the result depends on it by rounding only."""

    rows: int  # of the weight, per program: a power of two
    tokens: int  # per program: a power of two, at least 8
    units: int  # of a row, per slice and iteration: a power of two, at least 32
    slices: int  # of the columns, a warp each; 1: warps share the rows
    splits: int  # shares of the columns, a program each
    warps: int
    stages: int  # iterations in flight, one of which is multiplied
    registers: int | None = None  # per thread, at most; None: the compiler's choice


# ── numbers ──────────────────────────────────────────────────────────────────────────────────


class Places(NamedTuple):
    """Where a unit's 16 bits have the numbers 0 to 3, if these are E2M1 floats."""

    signs: tuple[int, int, int, int]
    sizes: tuple[int, int, int, int]  # the lowest of three bits, exponent and mantissa
    size: int  # the lowest of them in a 16-bit float


# Number 0 is where the float has it, number 1 three bits below: one shift and one mask find both
# parts of it.
PLACES = {
    torch.bfloat16: Places((15, 12, 14, 13), (6, 3, 0, 9), 6),
    torch.float16: Places((15, 12, 14, 13), (9, 6, 3, 0), 9),
}


def _shifted(register: str, source: str, left: int) -> str:
    """PTX: register = source, shifted to the left, or to the right if that is less than 0."""
    if left == 0:
        return f"mov.b32 {register}, {source};"
    return f"{'shl' if left > 0 else 'shr'}.b32 {register}, {source}, {abs(left)};"


def _placed_floats(kind: str, places: Places) -> str:
    """PTX: $0 to $3 = the numbers 0 to 3 of two units, $4, times two scales, $5."""
    sign, size = 0x8000_8000, (7 << places.size) * 0x1_0001
    lines = [".reg .b32 sign, size, zero;", f"mov.b32 zero, {sign:#x};"]  # two times -0
    for number in range(4):
        up = 15 - places.signs[number]
        left = places.size - places.sizes[number]
        lines.append(_shifted("size", "$4", left))
        if up == left:
            lines.append(f"and.b32 size, size, {sign | size:#x};")
        else:
            lines.append(_shifted("sign", "$4", up))
            lines.append(f"and.b32 sign, sign, {sign:#x};")
            lines.append(f"lop3.b32 size, size, {size:#x}, sign, 0xEA;")  # (size & mask) | sign
        lines.append(f"fma.rn.{kind} ${number}, size, $5, zero;")
    return "{" + " ".join(lines) + "}"


def _placed_integers(kind: str, power: str, one: str) -> str:
    """PTX: $0 to $3 = (the numbers 0 to 3 of two units, $4, minus two zero points) times two
    scales, $5. $6: two times power + zero point, negative; power: a float whose last bit is 1."""
    lines = [".reg .b32 code, one, zero;"]
    lines += ["mov.b32 zero, 0x80008000;", f"mov.b32 one, {one};"]
    for number in range(4):
        lines.append(f"shr.u32 code, $4, {4 * number};")
        lines.append(f"lop3.b32 code, code, 0x000F000F, {power}, 0xEA;")  # power + code
        lines.append(f"fma.rn.{kind} code, code, one, $6;")  # exact
        lines.append(f"fma.rn.{kind} ${number}, code, $5, zero;")
    return "{" + " ".join(lines) + "}"


FLOATS_BF16 = tl.constexpr(_placed_floats("bf16x2", PLACES[torch.bfloat16]))
FLOATS_F16 = tl.constexpr(_placed_floats("f16x2", PLACES[torch.float16]))
INTEGERS_BF16 = tl.constexpr(_placed_integers("bf16x2", "0x43004300", "0x3F803F80"))
INTEGERS_F16 = tl.constexpr(_placed_integers("f16x2", "0x64006400", "0x3C003C00"))
_QUARTERS = tl.constexpr(
    "{.reg .b32 a, b, c, d; mov.b64 {a, b}, $4; mov.b64 {c, d}, $5; "
    "prmt.b32 $0, a, c, 0x5410; prmt.b32 $1, a, c, 0x7632; "
    "prmt.b32 $2, b, d, 0x5410; prmt.b32 $3, b, d, 0x7632;}"
)


@triton.jit
def _e2m1(unit, SIGN: tl.constexpr, SIZE: tl.constexpr):
    """One E2M1 float of each unit (int32), its bits at SIGN and from SIZE on -> float32. They are
    those of a float16 that is 2^14 times smaller; subnormal ones come out right."""
    bits = ((unit >> SIGN & 1) << 15) | ((unit >> SIZE & 7) << 9)
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 16384.0


@triton.jit
def _plain(unit, zero, dtype: tl.constexpr, FLOATS: tl.constexpr):
    """Four tiles of float32: E2M1 floats, or integers less zero points, without scales."""
    u = unit.to(tl.int32)
    if not FLOATS:
        return (
            (u & 15).to(tl.float32) - zero,
            (u >> 4 & 15).to(tl.float32) - zero,
            (u >> 8 & 15).to(tl.float32) - zero,
            (u >> 12 & 15).to(tl.float32) - zero,
        )
    elif dtype == tl.bfloat16:
        return _e2m1(u, 15, 6), _e2m1(u, 12, 3), _e2m1(u, 14, 0), _e2m1(u, 13, 9)
    else:
        return _e2m1(u, 15, 9), _e2m1(u, 12, 6), _e2m1(u, 14, 3), _e2m1(u, 13, 0)


# What E2M1's bits stand for in a 16-bit float is too small by 2^126 or 2^14. Most of it is
# multiplied to the scale, where 448 leaves room for it, and the rest to the finished sum.
@triton.jit
def whole_scale(scale, dtype: tl.constexpr):
    """E4M3 -> dtype."""
    if INTERPRETED:
        return scale.to(tl.float32)
    elif dtype == tl.bfloat16:
        return (scale.to(tl.float32) * 3.3230699894622897e35).to(dtype)  # 2^118
    else:
        return (scale.to(tl.float32) * 128.0).to(dtype)


@triton.jit
def rest(dtype: tl.constexpr):
    if INTERPRETED:
        return 1.0
    else:
        return 256.0 if dtype == tl.bfloat16 else 128.0


@triton.jit
def _of_units(own, UNITS: tl.constexpr):
    """A number per group -> per unit: [slices, rows, groups] -> [slices, rows, UNITS]."""
    slices: tl.constexpr = own.shape[0]
    rows: tl.constexpr = own.shape[1]
    groups: tl.constexpr = own.shape[2]
    whole = tl.broadcast_to(own[:, :, :, None], [slices, rows, groups, UNITS // groups])
    return tl.reshape(whole, [slices, rows, UNITS])


@triton.jit
def _four(code: tl.constexpr, registers: tl.constexpr, given, dtype: tl.constexpr):
    """Four tiles of ``dtype``, by PTX for two places of a tile at once."""
    if dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            code, registers, given, (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), True, 2
        )
    else:
        return tl.inline_asm_elementwise(
            code, registers, given, (tl.float16, tl.float16, tl.float16, tl.float16), True, 2
        )


@triton.jit
def _numbers(unit, scale, zero, dtype: tl.constexpr, FLOATS: tl.constexpr):
    """Numbers times scales. unit: int16; scale: per unit; zero: also, if they are integers, less
    than 0 by as much as ``_placed_integers`` needs -> four tiles of ``dtype``."""
    if INTERPRETED:
        n0, n1, n2, n3 = _plain(unit, zero, dtype, FLOATS)
        return n0 * scale, n1 * scale, n2 * scale, n3 * scale
    elif FLOATS:
        code: tl.constexpr = FLOATS_BF16 if dtype == tl.bfloat16 else FLOATS_F16
        return _four(code, "=r,=r,=r,=r,r,r", [unit, scale], dtype)
    else:
        code: tl.constexpr = INTEGERS_BF16 if dtype == tl.bfloat16 else INTEGERS_F16
        return _four(code, "=r,=r,=r,=r,r,r,r", [unit, scale, zero], dtype)


@triton.jit
def _quarter(x, number: tl.constexpr, dtype: tl.constexpr):
    return (x >> 16 * number).to(tl.int16).to(dtype, bitcast=True)


@triton.jit
def quarters(x, dtype: tl.constexpr):
    """Units of the inputs, int64 -> four tiles of ``dtype``."""
    if INTERPRETED:
        return (
            _quarter(x, 0, dtype),
            _quarter(x, 1, dtype),
            _quarter(x, 2, dtype),
            _quarter(x, 3, dtype),
        )
    else:
        return _four(_QUARTERS, "=r,=r,=r,=r,l,l", [x], dtype)


# ── products ─────────────────────────────────────────────────────────────────────────────────


@triton.jit
def _add_product(w, x, acc):
    """acc + w·xᵀ for each slice: w [slices, rows, units], x [slices, tokens, units]. A single slice
    is multiplied without its dimension: warps then share the rows."""
    slices: tl.constexpr = w.shape[0]
    if slices > 1:
        return exact_dot(w, tl.permute(x, (0, 2, 1)), acc, "tf32")
    else:
        w = tl.reshape(w, [w.shape[1], w.shape[2]])
        x = tl.reshape(x, [x.shape[1], x.shape[2]])
        return exact_dot(w, tl.trans(x), acc, "tf32")


# not specialized, so that all weights of a model and all numbers of tokens share machine code
@Staged
@triton.jit(do_not_specialize=["n", "aligned_groups", "share", "factor_stride"])
def _product_kernel(
    x,  # quarters [4, n, units]; with slices [n, units] int64, rows x_stride apart
    codes,  # [out, units] int16
    scale,  # [out, groups] E4M3; or int32: the bits of a scale, and 2^16 times its zero point
    factor,  # [out] or one
    bias,  # [out], or None
    y,  # [n, out], or parts [splits, n, out] float32 if SPLIT
    like,  # of the inputs' dtype, not read
    n,
    out,
    units,
    aligned_groups,  # groups / ALIGN
    share,  # iterations of a program
    x_stride,
    factor_stride,  # 0: one factor for all rows
    FLOATS: tl.constexpr,
    GROUP: tl.constexpr,  # units
    ALIGN: tl.constexpr,  # divides the groups of a row
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    UNITS: tl.constexpr,
    SLICES: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    AHEAD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    dtype: tl.constexpr = like.dtype.element_ty
    COUNT: tl.constexpr = UNITS // GROUP if UNITS > GROUP else 1  # groups of a slice
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    split = tl.program_id(2)
    is_token = (token < n)[None, :, None]
    groups = aligned_groups * ALIGN  # so that the compiler knows of it
    # Rows past the last are the last one, and what is read past the end of a row, the next one or
    # SLACK, is multiplied with zeros: so these loads need no masks.
    own = tl.minimum(row, out - 1).to(tl.int64)
    row_codes = codes + own[None, :, None] * units
    row_scales = scale + own[None, :, None] * groups
    tokens = x + token.to(tl.int64)[None, :, None] * x_stride
    quarter = n * units
    if SLICES > 1:
        acc = tl.zeros([SLICES, ROWS, TOKENS], tl.float32)
    else:
        acc = tl.zeros([ROWS, TOKENS], tl.float32)
    fetch_ahead((codes + own * units)[:, None], split * share * SLICES * UNITS, units, AHEAD)
    previous_done(OVERLAP)
    for step in tl.range(0, share, num_stages=STAGES):
        first = ((split * share + step) * SLICES + tl.arange(0, SLICES))[:, None, None]
        unit = first * UNITS + tl.arange(0, UNITS)[None, None, :]
        if UNITS > GROUP:
            group = first * COUNT + tl.arange(0, COUNT)[None, None, :]
        else:
            group = first * UNITS // GROUP + tl.arange(0, COUNT)[None, None, :]
        w = tl.load(row_codes + unit)
        s = tl.load(row_scales + group)
        is_input = is_token & (unit < units)
        if SLICES > 1:
            t = tl.load(tokens + unit, mask=is_input, other=0)
            t0, t1, t2, t3 = quarters(t, dtype)
        else:
            t0 = tl.load(tokens + unit, mask=is_input, other=0.0)
            t1 = tl.load(tokens + (quarter + unit), mask=is_input, other=0.0)
            t2 = tl.load(tokens + (2 * quarter + unit), mask=is_input, other=0.0)
            t3 = tl.load(tokens + (3 * quarter + unit), mask=is_input, other=0.0)
        if FLOATS:
            s = whole_scale(s, dtype)
            z = s  # not read
        else:
            z = (s >> 16).to(tl.float32)
            s = s.to(tl.int16).to(dtype, bitcast=True)
            if INTERPRETED:
                s = s.to(tl.float32)
            else:
                power: tl.constexpr = 128.0 if dtype == tl.bfloat16 else 1024.0
                z = (-power - z).to(dtype)
        s, z = _of_units(s, UNITS), _of_units(z, UNITS)
        w0, w1, w2, w3 = _numbers(w, s, z, dtype, FLOATS)
        acc = _add_product(w0, t0, acc)
        acc = _add_product(w1, t1, acc)
        acc = _add_product(w2, t2, acc)
        acc = _add_product(w3, t3, acc)
    if SLICES > 1:
        acc = tl.sum(acc, 0)
    if FLOATS:
        acc *= rest(dtype)
    keep = (row < out)[:, None] & (token < n)[None, :]
    at = token.to(tl.int64)[None, :] * out + row[:, None]
    if SPLIT:
        tl.store(y + split.to(tl.int64) * n * out + at, acc, mask=keep)
    else:
        acc *= tl.load(factor + row * factor_stride, mask=row < out, other=0.0)[:, None]
        if bias is not None:
            acc += tl.load(bias + row, mask=row < out, other=0.0).to(tl.float32)[:, None]
        tl.store(y + at, acc, mask=keep)


class Weight(NamedTuple):
    """A weight as these kernels read it."""

    units: Tensor  # [out, in / 4] int16, with SLACK units behind them
    # [out, groups] E4M3; or int32, whose low bits are a scale, and the high ones its zero point;
    # with SLACK numbers behind them
    scale: Tensor
    factor: Tensor  # [out, 1] or [1, 1] float32
    one: Tensor  # [1, 1] float32, a one
    dtype: torch.dtype  # of the inputs and of integers' scales

    @property
    def floats(self) -> bool:
        """Whether codes are E2M1 floats."""
        return self.scale.element_size() == 1

    @property
    def group(self) -> int:
        """Units per scale."""
        return self.units.shape[1] // self.scale.shape[1]

    @property
    def nbytes(self) -> int:
        return self.units.nbytes + self.scale.nbytes + self.factor.nbytes

    def rows(self, ids: Tensor) -> Weight:
        """Some rows, to be dequantized."""
        factor = self.factor if len(self.factor) == 1 else self.factor[ids]
        scale = self.scale.view(torch.uint8)[ids].view(self.scale.dtype)
        return self._replace(units=self.units[ids], scale=scale, factor=factor)


SLACK = 4096  # at least what one iteration reads of a row
CHUNK = 1 << 24  # units that are put in order at a time


def weight_of(
    codes: Tensor, scale: Tensor, zero: Tensor | None, factor: Tensor, dtype: torch.dtype
) -> Weight:
    """A copy of what torch.py describes, for inputs of 16 bits.

    Groups are powers of two, at least 16 columns; without zero points their scales are E4M3.
    """
    units = _with_slack(codes.contiguous().view(torch.int16))
    if zero is None:
        flat = units.flatten()
        for first in range(0, len(flat), CHUNK):
            part = flat[first : first + CHUNK]
            part.copy_(_placed(part, PLACES[dtype]))
    else:
        bits = scale.to(dtype).view(torch.int16).int() & 0xFFFF
        scale = bits | zero.int() << 16
    one = torch.ones(1, 1, device=codes.device)
    return Weight(units, _with_slack(scale), factor.contiguous(), one, dtype)


def _with_slack(values: Tensor) -> Tensor:
    """A copy [out, n] at the beginning of something larger, whose rest is zero."""
    rows, columns = values.shape
    numbers = values.contiguous().view(torch.uint8) if values.dtype.itemsize == 1 else values
    room = numbers.new_zeros(rows * columns + SLACK)
    copy = room[: rows * columns].view(rows, columns)
    copy.copy_(numbers)
    return copy.view(values.dtype)


def _placed(units: Tensor, places: Places) -> Tensor:
    """Units of E2M1 floats, four bits each, with their bits at their places."""
    given, found = units.int(), torch.zeros_like(units, dtype=torch.int32)
    for number in range(4):
        code = given >> 4 * number
        found |= (code & 7) << places.sizes[number]
        found |= (code >> 3 & 1) << places.signs[number]
    return found.to(torch.int16)


EVEN = 0.84  # share of the multiprocessors' time that equal programs must fill


def choose_config(n: int, rows: int, columns: int) -> Config:
    """For a weight [rows, columns] and n tokens; up to 64 measured on Hopper."""
    if n <= 8:
        shape = Config(32, 8, 32, 4, 1, 4, 3, registers=96)
    elif n <= 32:
        shape = Config(64, 32, 64, 1, 1, 4, 3)
    else:
        shape = Config(128, 64, 32, 1, 1, 8, 3)
    tiles = cdiv(rows, shape.rows)
    if n > 64 or (n > 32 and tiles >= PROCESSORS):
        return shape  # what evens out programs is less than what their shares' sums cost
    splits = _splits(tiles, cdiv(columns, UNIT * shape.units * shape.slices) // 3)
    if n > 32 and tiles * splits <= PROCESSORS:
        # a program alone on a multiprocessor has more in flight
        shape = shape._replace(units=64)
    return shape._replace(splits=splits)


def _splits(tiles: int, largest: int) -> int:
    """The fewest shares of the columns with which programs are spread evenly over the GPU, or those
    with which they are most evenly."""
    best, evenest = 1, 0.0
    for splits in range(1, max(1, min(largest, 8)) + 1):
        programs = tiles * splits
        even = programs / (PROCESSORS * cdiv(programs, PROCESSORS))
        if even >= EVEN:
            return splits
        if even > evenest:
            best, evenest = splits, even
    return best


def aligned(x: Tensor, columns: int = UNIT) -> Tensor:
    """x [n, in], whose rows begin at multiples of this many columns."""
    if x.stride(0) % columns or x.storage_offset() % columns or x.stride(1) != 1:
        x = x.clone(memory_format=torch.contiguous_format)
    return x


@triton.jit
def _apart_kernel(
    x,  # [n, units] int64, rows x_stride apart
    parts,  # [4, n, units]
    units,
    x_stride,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    previous_done(OVERLAP)
    dtype: tl.constexpr = parts.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    unit = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = unit < units
    t0, t1, t2, t3 = quarters(tl.load(x + token * x_stride + unit, mask=inside, other=0), dtype)
    quarter = tl.num_programs(0).to(tl.int64) * units
    at = parts + token * units + unit
    tl.store(at, t0, mask=inside)
    tl.store(at + quarter, t1, mask=inside)
    tl.store(at + 2 * quarter, t2, mask=inside)
    tl.store(at + 3 * quarter, t3, mask=inside)


def _apart(tokens: Tensor, dtype: torch.dtype) -> Tensor:
    """Units [n, units] int64 -> their numbers 0 to 3 [4, n, units]."""
    (n, units), block = tokens.shape, 1024
    parts = torch.empty(4, n, units, dtype=dtype, device=tokens.device)
    _apart_kernel[(n, cdiv(units, block))](
        *(tokens, parts, units, tokens.stride(0)),
        BLOCK=block,
        num_warps=4,
        **overlapping(tokens.device),
    )
    return parts


def product(x: Tensor, weight: Weight, bias: Tensor | None, config: Config | None = None) -> Tensor:
    """``x Wᵀ`` plus the bias, W as ``dequantize`` gives it; sums in float32.

    Args:
        x: [n, in], the weight's dtype.
    Returns: [n, out], x's dtype.
    """
    n, (out, units), device = x.shape[0], weight.units.shape, x.device
    config = config or choose_config(n, out, UNIT * units)
    splits = config.splits
    groups = weight.scale.shape[1]
    align = math.gcd(groups, 4) if weight.floats else 1  # the least that is copied has 4 bytes
    tokens = aligned(x).view(torch.int64)
    if config.slices == 1:
        tokens = _apart(tokens, x.dtype)
    y = torch.empty(n, out, dtype=x.dtype, device=device)
    parts = torch.empty(splits, n, out, dtype=torch.float32, device=device) if splits > 1 else y
    grid = (cdiv(out, config.rows), cdiv(n, config.tokens), splits)
    iterations = cdiv(units, config.units * config.slices)
    _product_kernel[grid](
        *(tokens, weight.units, weight.scale, weight.factor, bias, parts, y, n, out, units),
        *(groups // align, cdiv(iterations, splits), tokens.stride(-2)),
        int(weight.factor.shape[0] > 1),
        FLOATS=weight.floats,
        GROUP=weight.group,
        ALIGN=align,
        ROWS=config.rows,
        TOKENS=config.tokens,
        UNITS=config.units,
        SLICES=config.slices,
        SPLIT=splits > 1,
        STAGES=config.stages,
        AHEAD=AHEAD if launches_overlap(device) else 0,
        num_warps=config.warps,
        maxnreg=config.registers,
        **overlapping(device),
    )
    if splits > 1:
        join(parts, weight.one, weight.factor, bias, y)
    return y


# ── the weight alone ─────────────────────────────────────────────────────────────────────────


@triton.jit
def _dequantize_kernel(
    codes,  # [out, UNITS] int16
    scale,  # [out, UNITS / GROUP] E4M3 or int32
    factor,  # [out] or one
    weight,  # [out, 4 * UNITS]
    factor_stride,
    FLOATS: tl.constexpr,
    GROUP: tl.constexpr,  # units
    UNITS: tl.constexpr,
    BLOCK: tl.constexpr,  # units per program
    OVERLAP: tl.constexpr,
):
    previous_done(OVERLAP)
    dtype: tl.constexpr = weight.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    unit = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = unit < UNITS
    w = tl.load(codes + row * UNITS + unit, mask=inside, other=0)
    s = tl.load(scale + row * (UNITS // GROUP) + unit // GROUP, mask=inside, other=0.0)
    if FLOATS:
        s = s.to(tl.float32)
        z = s  # not read
    else:
        z = (s >> 16).to(tl.float32)
        s = s.to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
    n0, n1, n2, n3 = _plain(w, z, dtype, FLOATS)
    s *= tl.load(factor + row * factor_stride)
    numbers = tl.join(tl.join(n0 * s, n2 * s), tl.join(n1 * s, n3 * s))  # 0 2, 1 3 -> 0 1 2 3
    column = tl.program_id(1) * BLOCK * 4 + tl.arange(0, BLOCK * 4)
    at = weight + row * (4 * UNITS) + column
    tl.store(at, tl.reshape(numbers, [BLOCK * 4]), mask=column < 4 * UNITS)


def dequantize(weight: Weight) -> Tensor:
    """As torch.py's, [out, in] of the inputs' dtype."""
    rows, units = weight.units.shape
    whole = torch.empty(rows, UNIT * units, dtype=weight.dtype, device=weight.units.device)
    block = 512
    _dequantize_kernel[(rows, cdiv(units, block))](
        *(weight.units, weight.scale, weight.factor, whole, int(weight.factor.shape[0] > 1)),
        FLOATS=weight.floats,
        GROUP=weight.group,
        UNITS=units,
        BLOCK=block,
        num_warps=4,
        **overlapping(whole.device),
    )
    return whole
