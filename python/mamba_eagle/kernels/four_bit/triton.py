"""Products with weights of four bits on a GPU, for few tokens; and such weights dequantized.

A program multiplies some rows of the weight with all tokens. Four neighbouring columns of a row,
two bytes, are one unit, an integer of 16 bits; and so are, in 64 bits, four neighbouring columns of
the inputs. Tiles of units are loaded and laid out as any matrix; only then a unit becomes four
numbers in four tiles, each of which is multiplied with a quarter of the inputs' columns. So no
number moves between threads.

What limits the speed is the number of instructions per weight. Two units share a register: shifts
and masks place the bits of two codes where a 16-bit float has them, which gives E2M1 floats times a
power of two, or integers plus a power of two. The groups' scales are multiplied to both at once.
E2M1 times E4M3 has six significant bits at most, so that NVFP4's weights are exact in 16 bits; of
integers the scale and the weight are rounded.

With slices, each warp multiplies all of the program's rows with columns of its own, and the warps'
sums are added at the end: programs have few rows, and there are enough of them to fill a GPU.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mamba_eagle.kernels.float8.triton import join
from mamba_eagle.kernels.gpu import launches_overlap
from mamba_eagle.kernels.triton_math import INTERPRETED, exact_dot, previous_done

UNIT = 4  # columns of a unit


class Config(NamedTuple):
    """How a product is divided; the result depends on it by rounding only."""

    rows: int  # of the weight, per program: a power of two
    tokens: int  # per program: a power of two, at least 8
    units: int  # of a row, per slice and iteration: a power of two, at least 32
    slices: int  # of the columns, a warp each; 1: warps share the rows
    splits: int  # shares of the columns, a program each
    warps: int
    stages: int  # iterations in flight, one of which is multiplied
    ahead: int = 0  # of a row, 128 bytes each, fetched while the previous kernel drains; 2^k or 0


# ── numbers ──────────────────────────────────────────────────────────────────────────────────


def _placed_floats(kind: str, magnitude: int, mask: str) -> str:
    """PTX: $0 to $3 = the numbers 0 to 3 of two units, $4, times two scales, $5.

    kind: of 16-bit floats. magnitude: the lowest bit of E2M1's magnitude in such a float. mask: of
    the magnitudes' bits in two floats.
    """
    lines = [".reg .b32 sign, size, zero;", "mov.b32 zero, 0x80008000;"]  # two times -0
    for number in range(4):
        left = 12 - 4 * number  # from the code's sign to bit 15
        lines.append(f"shl.b32 sign, $4, {left};")
        lines.append("and.b32 sign, sign, 0x80008000;")
        left = magnitude - 4 * number
        lines.append(f"{'shl' if left > 0 else 'shr'}.b32 size, $4, {abs(left)};")
        lines.append(f"lop3.b32 size, size, {mask}, sign, 0xEA;")  # (size & mask) | sign
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


_FLOATS_BF16 = tl.constexpr(_placed_floats("bf16x2", 6, "0x01C001C0"))
_FLOATS_F16 = tl.constexpr(_placed_floats("f16x2", 9, "0x0E000E00"))
_INTEGERS_BF16 = tl.constexpr(_placed_integers("bf16x2", "0x43004300", "0x3F803F80"))
_INTEGERS_F16 = tl.constexpr(_placed_integers("f16x2", "0x64006400", "0x3C003C00"))
_QUARTERS = tl.constexpr(
    "{.reg .b32 a, b, c, d; mov.b64 {a, b}, $4; mov.b64 {c, d}, $5; "
    "prmt.b32 $0, a, c, 0x5410; prmt.b32 $1, a, c, 0x7632; "
    "prmt.b32 $2, b, d, 0x5410; prmt.b32 $3, b, d, 0x7632;}"
)


@triton.jit
def _e2m1(code):
    """E2M1 floats / 2^14: their bits as those of a float16, whose exponents are biased by 14 more;
    subnormal ones come out right. code: integers of four bits -> float32."""
    bits = ((code & 8) << 12) | ((code & 7) << 9)
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _numbers(code, zero, FLOATS: tl.constexpr):
    if FLOATS:
        return _e2m1(code) * 16384.0
    else:
        return code.to(tl.float32) - zero


# What E2M1's bits stand for in a 16-bit float is too small by 2^126 or 2^14. Most of it is
# multiplied to the scale, as far as 448 leaves room for it, and the rest to the finished sum.
@triton.jit
def _whole_scale(scale, dtype: tl.constexpr):
    """E4M3 -> dtype."""
    if INTERPRETED:
        return scale.to(tl.float32)
    elif dtype == tl.bfloat16:
        return (scale.to(tl.float32) * 3.3230699894622897e35).to(dtype)  # 2^118
    else:
        return (scale.to(tl.float32) * 128.0).to(dtype)


@triton.jit
def _rest(dtype: tl.constexpr):
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
def _floats(unit, scale, dtype: tl.constexpr):
    """E2M1 floats times scales. unit: int16; scale: per unit -> four tiles of ``dtype``."""
    if INTERPRETED:
        u = unit.to(tl.int32)
        return (
            _numbers(u & 15, 0, True) * scale,
            _numbers(u >> 4 & 15, 0, True) * scale,
            _numbers(u >> 8 & 15, 0, True) * scale,
            _numbers(u >> 12 & 15, 0, True) * scale,
        )
    else:
        code: tl.constexpr = _FLOATS_BF16 if dtype == tl.bfloat16 else _FLOATS_F16
        return _four(code, "=r,=r,=r,=r,r,r", [unit, scale], dtype)


@triton.jit
def _integers(unit, scale, zero, dtype: tl.constexpr):
    """Integers less zero points, times scales. unit: int16; scale: per unit; zero: also, less than
    0 by as much as ``_placed_integers`` needs -> four tiles of ``dtype``."""
    if INTERPRETED:
        u = unit.to(tl.int32)
        return (
            _numbers(u & 15, zero, False) * scale,
            _numbers(u >> 4 & 15, zero, False) * scale,
            _numbers(u >> 8 & 15, zero, False) * scale,
            _numbers(u >> 12 & 15, zero, False) * scale,
        )
    else:
        code: tl.constexpr = _INTEGERS_BF16 if dtype == tl.bfloat16 else _INTEGERS_F16
        return _four(code, "=r,=r,=r,=r,r,r,r", [unit, scale, zero], dtype)


@triton.jit
def _quarter(x, number: tl.constexpr, dtype: tl.constexpr):
    return (x >> 16 * number).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)


@triton.jit
def _quarters(x, dtype: tl.constexpr):
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


@triton.jit
def _fetch(row_codes, start, units, AHEAD: tl.constexpr):
    """Have some of the codes brought to the L2 cache. row_codes: [rows] pointers."""
    if not INTERPRETED:
        unit = tl.minimum(start + 64 * tl.arange(0, AHEAD), units - 1)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
            "=r,l",
            [(row_codes[:, None] + unit[None, :]).to(tl.int64)],
            tl.int32,
            False,
            1,
        )


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
@triton.jit(do_not_specialize=["n", "aligned_groups", "share", "factor_stride"])
def _product_kernel(
    x,  # [n, units] int64, rows x_stride apart
    codes,  # [out, units] int16
    scale,  # [out, groups] E4M3; or int32: the bits of a scale, and 2^16 times its zero point
    factor,  # [out] or one
    bias,  # [out], read if HAS_BIAS
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
    HAS_BIAS: tl.constexpr,
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
    is_row, is_token = (row < out)[None, :, None], (token < n)[None, :, None]
    groups = aligned_groups * ALIGN  # so that the compiler knows of it
    row_codes = codes + row.to(tl.int64)[None, :, None] * units
    row_scales = scale + row.to(tl.int64)[None, :, None] * groups
    tokens = x + token.to(tl.int64)[None, :, None] * x_stride
    if SLICES > 1:
        acc = tl.zeros([SLICES, ROWS, TOKENS], tl.float32)
    else:
        acc = tl.zeros([ROWS, TOKENS], tl.float32)
    if AHEAD > 0:
        own = codes + tl.minimum(row, out - 1).to(tl.int64) * units
        _fetch(own, split * share * SLICES * UNITS, units, AHEAD)
    previous_done(OVERLAP)
    for step in tl.range(0, share, num_stages=STAGES):
        first = ((split * share + step) * SLICES + tl.arange(0, SLICES))[:, None, None]
        unit = first * UNITS + tl.arange(0, UNITS)[None, None, :]
        if UNITS > GROUP:
            group = first * COUNT + tl.arange(0, COUNT)[None, None, :]
        else:
            group = first * UNITS // GROUP + tl.arange(0, COUNT)[None, None, :]
        inside = unit < units
        w = tl.load(row_codes + unit, mask=is_row & inside, other=0)
        s = tl.load(row_scales + group, mask=is_row & (group < groups), other=0.0)
        t = tl.load(tokens + unit, mask=is_token & inside, other=0)
        if FLOATS:
            s = _of_units(_whole_scale(s, dtype), UNITS)
            w0, w1, w2, w3 = _floats(w, s, dtype)
        else:
            z = (s >> 16).to(tl.float32)
            s = s.to(tl.int16).to(dtype, bitcast=True)
            if INTERPRETED:
                s = s.to(tl.float32)
            else:
                power: tl.constexpr = 128.0 if dtype == tl.bfloat16 else 1024.0
                z = (-power - z).to(dtype)
            w0, w1, w2, w3 = _integers(w, _of_units(s, UNITS), _of_units(z, UNITS), dtype)
        t0, t1, t2, t3 = _quarters(t, dtype)
        acc = _add_product(w0, t0, acc)
        acc = _add_product(w1, t1, acc)
        acc = _add_product(w2, t2, acc)
        acc = _add_product(w3, t3, acc)
    if SLICES > 1:
        acc = tl.sum(acc, 0)
    if FLOATS:
        acc *= _rest(dtype)
    keep = (row < out)[:, None] & (token < n)[None, :]
    at = token.to(tl.int64)[None, :] * out + row[:, None]
    if SPLIT:
        tl.store(y + split.to(tl.int64) * n * out + at, acc, mask=keep)
    else:
        acc *= tl.load(factor + row * factor_stride, mask=row < out, other=0.0)[:, None]
        if HAS_BIAS:
            acc += tl.load(bias + row, mask=row < out, other=0.0).to(tl.float32)[:, None]
        tl.store(y + at, acc, mask=keep)


class Weight(NamedTuple):
    """A weight as the products read it."""

    units: Tensor  # [out, in / 4] int16
    scale: Tensor  # [out, groups] E4M3; or int32: a scale's 16 bits, and above them its zero point
    factor: Tensor  # [out, 1] or [1, 1] float32
    one: Tensor  # [1, 1] float32, a one
    dtype: torch.dtype  # of the inputs

    @property
    def group(self) -> int:
        """Units per scale."""
        return self.units.shape[1] // self.scale.shape[1]


def weight_of(
    codes: Tensor, scale: Tensor, zero: Tensor | None, factor: Tensor, dtype: torch.dtype
) -> Weight:
    """From what torch.py describes, for inputs of 16 bits; the codes are not copied.

    Groups are powers of two, at least 16 columns; without zero points their scales are E4M3.
    """
    if zero is not None:
        bits = scale.to(dtype).view(torch.int16).int() & 0xFFFF
        scale = bits | zero.int() << 16
    one = torch.ones(1, 1, device=codes.device)
    units = codes.contiguous().view(torch.int16)
    return Weight(units, scale.contiguous(), factor.contiguous(), one, dtype)


PROGRAMS = 528  # four for each of a Hopper GPU's 132 multiprocessors


def choose_config(n: int, rows: int, columns: int) -> Config:
    """For a weight [rows, columns] and n tokens."""
    tokens = min(64, max(8, triton.next_power_of_2(n)))
    if tokens > 16:
        programs, steps, splits = triton.cdiv(rows, 128), triton.cdiv(columns, 256), 1
        while programs * splits * 2 <= PROGRAMS and steps >= splits * 8:
            splits *= 2
        return Config(128, tokens, 64, 1, splits, 8, 3)
    height = 32 if triton.cdiv(rows, 32) >= PROGRAMS // 2 else 16
    return Config(height, tokens, 32, 4, 1, 4, 4)


def _aligned(x: Tensor) -> Tensor:
    """x [n, in], whose rows begin where a unit may."""
    if x.stride(0) % UNIT or x.storage_offset() % UNIT or x.stride(1) != 1:
        x = x.clone(memory_format=torch.contiguous_format)
    return x


def product(x: Tensor, weight: Weight, bias: Tensor | None, config: Config | None = None) -> Tensor:
    """As torch.py's, plus the bias; sums in float32.

    Args:
        x: [n, in], the weight's dtype.
    Returns: [n, out], x's dtype.
    """
    n, (out, units), device = x.shape[0], weight.units.shape, x.device
    config = config or choose_config(n, out, UNIT * units)
    splits, overlap = config.splits, launches_overlap(device)
    groups = weight.scale.shape[1]
    floats = weight.scale.element_size() == 1
    align = math.gcd(groups, 4) if floats else 1  # the least that is copied has 4 bytes
    tokens = _aligned(x).view(torch.int64)
    y = torch.empty(n, out, dtype=x.dtype, device=device)
    parts = torch.empty(splits, n, out, dtype=torch.float32, device=device) if splits > 1 else y
    grid = (triton.cdiv(out, config.rows), triton.cdiv(n, config.tokens), splits)
    iterations = triton.cdiv(units, config.units * config.slices)
    _product_kernel[grid](
        tokens,
        weight.units,
        weight.scale,
        weight.factor,
        y if bias is None else bias,
        parts,
        y,
        n,
        out,
        units,
        groups // align,
        triton.cdiv(iterations, splits),
        tokens.stride(0),
        int(weight.factor.shape[0] > 1),
        FLOATS=floats,
        GROUP=weight.group,
        ALIGN=align,
        HAS_BIAS=bias is not None,
        ROWS=config.rows,
        TOKENS=config.tokens,
        UNITS=config.units,
        SLICES=config.slices,
        SPLIT=splits > 1,
        STAGES=config.stages,
        AHEAD=config.ahead if overlap else 0,
        OVERLAP=overlap,
        num_warps=config.warps,
        launch_pdl=overlap,
    )
    if splits > 1:
        join(parts, weight.one, weight.factor, bias, y)
    return y


# ── the weight alone ─────────────────────────────────────────────────────────────────────────


@triton.jit
def _dequantize_kernel(
    codes,  # [out, IN / 2] uint8
    scale,  # [out, IN / GROUP]
    zero,  # [out, IN / GROUP] uint8, read if not FLOATS
    factor,  # [out] or one
    weight,  # [out, IN]
    factor_stride,
    FLOATS: tl.constexpr,
    GROUP: tl.constexpr,
    IN: tl.constexpr,
    BYTES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    previous_done(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    byte = tl.program_id(1) * BYTES + tl.arange(0, BYTES)
    inside = 2 * byte < IN
    both = tl.load(codes + row * (IN // 2) + byte, mask=inside, other=0).to(tl.int32)
    group = row * (IN // GROUP) + 2 * byte // GROUP
    s = tl.load(scale + group, mask=inside, other=0.0).to(tl.float32)
    s *= tl.load(factor + row * factor_stride)
    z = s
    if not FLOATS:
        z = tl.load(zero + group, mask=inside, other=0).to(tl.float32)
    columns = weight + row * IN + 2 * byte
    tl.store(columns, _numbers(both & 15, z, FLOATS) * s, mask=inside)
    tl.store(columns + 1, _numbers(both >> 4, z, FLOATS) * s, mask=inside)


def dequantize(
    codes: Tensor, scale: Tensor, zero: Tensor | None, factor: Tensor, dtype: torch.dtype
) -> Tensor:
    """As torch.py's, [out, in] of ``dtype``."""
    rows, half = codes.shape
    weight = torch.empty(rows, 2 * half, dtype=dtype, device=codes.device)
    overlap, block = launches_overlap(codes.device), 1024
    _dequantize_kernel[(rows, triton.cdiv(half, block))](
        codes,
        scale,
        codes if zero is None else zero,
        factor,
        weight,
        int(factor.shape[0] > 1),
        FLOATS=zero is None,
        GROUP=2 * half // scale.shape[1],
        IN=2 * half,
        BYTES=block,
        OVERLAP=overlap,
        num_warps=4,
        launch_pdl=overlap,
    )
    return weight
