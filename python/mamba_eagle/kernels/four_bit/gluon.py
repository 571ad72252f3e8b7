"""triton.py's product for up to 16 tokens, with weights in registers from load to product.

A program multiplies 16 or 32 rows of the weight with all tokens; each warp has columns of its own,
and their sums are added at the end. A thread loads 16 consecutive bytes of a row, eight units, to
where ``mma.sync`` wants its left factor: which columns are the same step of a product is free as
long as both factors agree. The units become four tiles there, as in triton.py, and nothing but the
sums of warps goes through shared memory. The next units are under way while these are multiplied,
and the first before the previous kernel has ended.

What limits it is the number of instructions: 200 for 1 KB of codes, of which a multiprocessor can
issue 220 in the time that an H200's memory takes.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from mamba_eagle.kernels.four_bit import triton as by_compiler
from mamba_eagle.kernels.four_bit.triton import Weight
from mamba_eagle.kernels.gpu import PROCESSORS, TENSOR_CORES, capability, cdiv, overlapping
from mamba_eagle.kernels.triton_math import previous_done

MAX_TOKENS = 16
FEW_PROGRAMS = 3 * PROCESSORS  # with 16 rows each: then more warps per program
LONG_ROW = 1600  # pairs, of which triton.py multiplies shares


class Config(NamedTuple):
    """How a product is divided; the result depends on it by rounding only."""

    tiles: int  # of 16 rows, per program
    warps: int
    pairs: int  # of units of a row, per warp and iteration: at least 16, a power of two


def choose_config(n: int, rows: int) -> Config:
    """For n tokens and a weight of this many rows; the best on an H200."""
    programs = cdiv(rows, 16)
    if n > 8:
        return Config(2, 4, 32) if programs <= 4 * PROCESSORS else Config(2, 2, 16)
    if programs <= FEW_PROGRAMS:
        return Config(1, 8, 16)
    # six programs of one tile, or four of two, are on a multiprocessor at the same time
    one_is_better = _busy(programs, 6) > _busy(programs / 2, 4) - 0.1
    return Config(1, 4, 16) if one_is_better else Config(2, 4, 16)


def _busy(programs: float, at_once: int) -> float:
    """Share of the places for programs that are taken, from the first to the last one's end."""
    rounds = programs / (PROCESSORS * at_once)
    return rounds / math.ceil(rounds)


@gluon.constexpr_function
def _powers(start, end, basis):
    found = []
    while start < end:
        found.append([start * number for number in basis])
        start *= 2
    return found


@gluon.constexpr_function
def _scales_layout(WARPS, ROWS, PAIRS, OWN):
    """[warps, rows, groups of OWN pairs, pairs of a group], as the left factor has pairs: four
    consecutive ones in a thread, four threads side by side."""
    each = 4 // OWN  # groups of a thread
    registers = _powers(1, OWN, [0, 0, 0, 1]) + _powers(1, each, [0, 0, 1, 0])
    registers += _powers(8, ROWS, [0, 1, 0, 0])
    registers += _powers(4 * each, PAIRS // OWN, [0, 0, 1, 0])
    lanes = _powers(each, 4 * each, [0, 0, 1, 0]) + _powers(1, 8, [0, 1, 0, 0])
    warps = _powers(1, WARPS, [1, 0, 0, 0])
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [WARPS, ROWS, PAIRS // OWN, OWN])


@gluon.jit
def _in_both_halves(number):
    """A 16-bit float in both halves of 32 bits."""
    bits = number.to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF
    return bits | (bits << 16)


@gluon.jit
def twice(scale, dtype: gl.constexpr, FLOATS: gl.constexpr):
    """What ``four`` takes of a group, for two units at once: scales; zero points of integers."""
    if FLOATS:
        scales = _in_both_halves(by_compiler.whole_scale(scale, dtype))
        return scales, scales
    else:
        power: gl.constexpr = 128.0 if dtype == gl.bfloat16 else 1024.0
        zero = (-power - (scale >> 16).to(gl.float32)).to(dtype)
        return _in_both_halves(scale.to(gl.int16).to(dtype, bitcast=True)), _in_both_halves(zero)


@gluon.jit
def _by_ptx(code: gl.constexpr, registers: gl.constexpr, given):
    return gl.inline_asm_elementwise(
        code, registers, given, dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1
    )


@gluon.jit
def four(codes, scale, zero, dtype: gl.constexpr, FLOATS: gl.constexpr):
    """Pairs of units (int32) -> their numbers 0 to 3: two of ``dtype``, one of each unit, in 32
    bits."""
    if FLOATS:
        code: gl.constexpr = (
            by_compiler.FLOATS_BF16 if dtype == gl.bfloat16 else by_compiler.FLOATS_F16
        )
        return _by_ptx(code, "=r,=r,=r,=r,r,r", [codes, scale])
    else:
        code: gl.constexpr = (
            by_compiler.INTEGERS_BF16 if dtype == gl.bfloat16 else by_compiler.INTEGERS_F16
        )
        return _by_ptx(code, "=r,=r,=r,=r,r,r,r", [codes, scale, zero])


@gluon.jit
def halves(both, dtype: gl.constexpr):
    """Two 16-bit floats in 32 bits [...] -> [..., 2]."""
    low, high = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [both], dtype=(gl.int16, gl.int16), is_pure=True, pack=1
    )
    return gl.join(low, high).to(dtype, bitcast=True)


@gluon.jit
def _of_pairs(own, PAIRS: gl.constexpr, layout: gl.constexpr):
    """A number per group -> per pair of units: [warps, rows, groups] -> [warps, rows, PAIRS]."""
    WARPS: gl.constexpr = own.shape[0]
    ROWS: gl.constexpr = own.shape[1]
    GROUPS: gl.constexpr = own.shape[2]
    whole = gl.expand_dims(own, 3).broadcast_to([WARPS, ROWS, GROUPS, PAIRS // GROUPS])
    return gl.convert_layout(gl.reshape(whole, [WARPS, ROWS, PAIRS]), layout, assert_trivial=True)


@gluon.jit
def _units(both, dtype: gl.constexpr, layout: gl.constexpr):
    """Pairs' numbers [warps, rows, pairs] -> units' [warps, rows, units]."""
    shape: gl.constexpr = both.shape
    whole = gl.reshape(halves(both, dtype), [shape[0], shape[1], 2 * shape[2]])
    return gl.convert_layout(whole, layout, assert_trivial=True)


@gluon.jit(do_not_specialize=["n", "aligned_groups", "factor_stride"])
def _product_kernel(
    x,  # [n, units] int64, rows x_stride apart
    codes,  # [out, pairs] int32
    scale,  # [out, groups] E4M3; or int32: the bits of a scale, and 2^16 times its zero point
    factor,  # [out] or one
    bias,  # [out], or None
    y,  # [n, out]
    n,
    out,
    pairs,
    aligned_groups,  # groups / ALIGN
    x_stride,
    factor_stride,  # 0: one factor for all rows
    FLOATS: gl.constexpr,
    GROUP: gl.constexpr,  # pairs
    ALIGN: gl.constexpr,  # divides the groups of a row
    TILES: gl.constexpr,
    TOKENS: gl.constexpr,  # 8 or 16
    WARPS: gl.constexpr,
    PAIRS: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    dtype: gl.constexpr = y.dtype.element_ty
    ROWS: gl.constexpr = 16 * TILES
    STEP: gl.constexpr = WARPS * PAIRS
    OWN: gl.constexpr = GROUP if GROUP < 4 else 4  # pairs of a thread that share a scale
    sums: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    loaded: gl.constexpr = gl.DotOperandLayout(0, sums, 4)
    left: gl.constexpr = gl.DotOperandLayout(0, sums, 8)
    right: gl.constexpr = gl.DotOperandLayout(1, sums, 8)
    spread: gl.constexpr = _scales_layout(WARPS, ROWS, PAIRS, OWN)
    scales: gl.constexpr = gl.SliceLayout(3, spread)
    groups = aligned_groups * ALIGN  # so that the compiler knows of it

    # Rows past the last are the last one, and what is read past the end of a row, the next one or
    # SLACK, is multiplied with zeros: so these loads need no masks.
    first = gl.program_id(0) * ROWS
    row = gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(2, loaded)))
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, loaded)))
    pair = gl.arange(0, PAIRS, gl.SliceLayout(0, gl.SliceLayout(1, loaded)))
    own = gl.minimum(first + row, out - 1).to(gl.int64)[None, :, None] * pairs
    at = codes + own + (warp[:, None, None] * PAIRS + pair[None, None, :])
    row = gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(2, scales)))
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, scales)))
    part = gl.arange(0, PAIRS // OWN, gl.SliceLayout(0, gl.SliceLayout(1, scales)))
    scale += gl.minimum(first + row, out - 1).to(gl.int64)[None, :, None] * groups
    of_warp = warp[:, None, None] * (PAIRS // OWN) + part[None, None, :]  # OWN pairs each
    w = gl.load(at)
    s = gl.load(scale + of_warp // (GROUP // OWN))
    previous_done(OVERLAP)

    warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, right)))
    unit = gl.arange(0, 2 * PAIRS, gl.SliceLayout(0, gl.SliceLayout(2, right)))
    token = gl.arange(0, TOKENS, gl.SliceLayout(0, gl.SliceLayout(1, right)))
    of_x = warp[:, None, None] * (2 * PAIRS) + unit[None, :, None]
    tokens = x + token.to(gl.int64)[None, None, :] * x_stride + of_x
    is_token = (token < n)[None, None, :]
    acc = gl.zeros([WARPS, ROWS, TOKENS], gl.float32, sums)
    for start in range(0, pairs, STEP):
        t = gl.load(tokens + 2 * start, mask=is_token & (of_x < 2 * (pairs - start)), other=0)
        w_now, s_now = w, s
        if start + STEP < pairs:  # the next ones are under way while these are multiplied
            w = gl.load(at + (start + STEP))
            s = gl.load(scale + (of_warp + (start + STEP) // OWN) // (GROUP // OWN))
        t0, t1, t2, t3 = by_compiler.quarters(t, dtype)
        s_own, z_own = twice(s_now, dtype, FLOATS)
        s_all, z_all = _of_pairs(s_own, PAIRS, loaded), _of_pairs(z_own, PAIRS, loaded)
        w0, w1, w2, w3 = four(w_now, s_all, z_all, dtype, FLOATS)
        acc = mma_v2(_units(w0, dtype, left), t0, acc)
        acc = mma_v2(_units(w1, dtype, left), t1, acc)
        acc = mma_v2(_units(w2, dtype, left), t2, acc)
        acc = mma_v2(_units(w3, dtype, left), t3, acc)
    total = gl.sum(acc, 0)
    result: gl.constexpr = gl.SliceLayout(0, sums)
    row = first + gl.arange(0, ROWS, gl.SliceLayout(1, result))
    token = gl.arange(0, TOKENS, gl.SliceLayout(0, result))
    if FLOATS:
        total *= by_compiler.rest(dtype)
    total *= gl.load(factor + row * factor_stride, mask=row < out, other=0.0)[:, None]
    if bias is not None:
        total += gl.load(bias + row, mask=row < out, other=0.0).to(gl.float32)[:, None]
    keep = (row < out)[:, None] & (token < n)[None, :]
    gl.store(y + token.to(gl.int64)[None, :] * out + row[:, None], total.to(dtype), mask=keep)


def supports(n: int, weight: Weight) -> bool:
    """Whether this file's kernel can multiply n tokens, and is faster than triton.py's."""
    rows, units = weight.units.shape
    few_long = cdiv(rows, 16) <= FEW_PROGRAMS and units > 2 * LONG_ROW
    capable = capability(weight.units.device) >= TENSOR_CORES
    return capable and n <= MAX_TOKENS and (n > 8 or not few_long)


def product(x: Tensor, weight: Weight, bias: Tensor | None, config: Config | None = None) -> Tensor:
    """As triton.py's."""
    n, (out, units) = x.shape[0], weight.units.shape
    tiles, warps, pairs = config or choose_config(n, out)
    groups = weight.scale.shape[1]
    align = math.gcd(groups, 4) if weight.floats else 1
    tokens = by_compiler.aligned(x).view(torch.int64)
    y = torch.empty(n, out, dtype=x.dtype, device=x.device)
    _product_kernel[(cdiv(out, 16 * tiles),)](
        *(tokens, weight.units.view(torch.int32), weight.scale, weight.factor, bias, y),
        *(n, out, units // 2, groups // align, tokens.stride(0), int(weight.factor.shape[0] > 1)),
        FLOATS=weight.floats,
        GROUP=weight.group // 2,
        ALIGN=align,
        TILES=tiles,
        TOKENS=8 if n <= 8 else 16,
        WARPS=warps,
        PAIRS=pairs,
        num_warps=warps,
        **overlapping(x.device),
    )
    return y
