"""Products with weights of four bits on a GPU, for few tokens; and such weights dequantized.

Byte j of a row holds columns 2j and 2j + 1. They are not put side by side: the low halves are
multiplied with the even columns of the inputs, the high halves with the odd ones.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mamba_eagle.kernels.float8.triton import join
from mamba_eagle.kernels.gpu import launches_overlap
from mamba_eagle.kernels.triton_math import exact_dot, previous_done


class Config(NamedTuple):
    """How a product is divided; the result depends on it by rounding only."""

    rows: int  # of the weight, per program: a power of two
    tokens: int  # per program: a power of two, at least 16
    columns: int  # per iteration: a power of two, a multiple of the group or a part of it
    splits: int  # shares of the columns
    warps: int
    stages: int


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


@triton.jit
def _of_groups(base, rows, is_row, first, groups, COUNT: tl.constexpr, WIDTH: tl.constexpr):
    """A number per row and group, for the bytes of an iteration: [rows, COUNT * WIDTH] float32."""
    group = first + tl.arange(0, COUNT)
    keep = is_row[:, None] & (group < groups)[None, :]
    at = base + rows.to(tl.int64)[:, None] * groups + group[None, :]
    own = tl.load(at, mask=keep, other=0.0).to(tl.float32)
    whole = tl.broadcast_to(own[:, :, None], [own.shape[0], COUNT, WIDTH])
    return tl.reshape(whole, [own.shape[0], COUNT * WIDTH])


# not specialized, so that all weights of a model and all numbers of tokens share machine code
@triton.jit(do_not_specialize=["n", "share", "factor_stride"])
def _product_kernel(
    x,  # [n, columns], rows x_stride apart
    codes,  # [out, columns / 2] uint8
    scale,  # [out, columns / GROUP]
    zero,  # [out, columns / GROUP] uint8, read if not FLOATS
    factor,  # [out] or one
    bias,  # [out], read if HAS_BIAS
    y,  # [n, out], or parts [splits, n, out] float32 if SPLIT
    n,
    out,
    columns,
    share,  # iterations of a program
    x_stride,
    factor_stride,  # 0: one factor for all rows
    FLOATS: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    BYTES: tl.constexpr = COLUMNS // 2
    COUNT: tl.constexpr = COLUMNS // GROUP if COLUMNS > GROUP else 1  # groups of an iteration
    WIDTH: tl.constexpr = BYTES // COUNT
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    split = tl.program_id(2)
    is_row, is_token = row < out, token < n
    acc = tl.zeros([ROWS, TOKENS], tl.float32)
    previous_done(OVERLAP)
    for step in tl.range(0, share, num_stages=STAGES):
        first = (split * share + step) * COLUMNS
        byte = first // 2 + tl.arange(0, BYTES)
        inside = (2 * byte < columns)[None, :]
        at = codes + row.to(tl.int64)[:, None] * (columns // 2) + byte[None, :]
        both = tl.load(at, mask=is_row[:, None] & inside, other=0).to(tl.int32)
        s = _of_groups(scale, row, is_row, first // GROUP, columns // GROUP, COUNT, WIDTH)
        z = s
        if not FLOATS:
            z = _of_groups(zero, row, is_row, first // GROUP, columns // GROUP, COUNT, WIDTH)
        even = x + token.to(tl.int64)[:, None] * x_stride + 2 * byte[None, :]
        keep = is_token[:, None] & inside
        a = tl.load(even, mask=keep, other=0.0)
        b = tl.load(even + 1, mask=keep, other=0.0)
        low = (_numbers(both & 15, z, FLOATS) * s).to(a.dtype)
        high = (_numbers(both >> 4, z, FLOATS) * s).to(a.dtype)
        acc = exact_dot(low, tl.trans(a), acc, PRECISION)
        acc = exact_dot(high, tl.trans(b), acc, PRECISION)
    keep = is_row[:, None] & is_token[None, :]
    at = token.to(tl.int64)[None, :] * out + row[:, None]
    if SPLIT:
        tl.store(y + split.to(tl.int64) * n * out + at, acc, mask=keep)
    else:
        acc *= tl.load(factor + row * factor_stride, mask=is_row, other=0.0)[:, None]
        if HAS_BIAS:
            acc += tl.load(bias + row, mask=is_row, other=0.0).to(tl.float32)[:, None]
        tl.store(y + at, acc, mask=keep)


PROGRAMS = 264  # two for each of a Hopper GPU's 132 multiprocessors


def choose_config(n: int, rows: int, columns: int) -> Config:
    """For a weight [rows, columns] and n tokens: as float8's, with half as many bytes per row."""
    tokens = min(64, max(16, triton.next_power_of_2(n)))
    programs, steps, splits = triton.cdiv(rows, 64), triton.cdiv(columns, 128), 1
    while programs * splits * 2 <= 2 * PROGRAMS and steps >= splits * 8:
        splits *= 2
    return Config(64, tokens, 128, splits, 4, 4)


def product(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    factor: Tensor,
    one: Tensor,
    bias: Tensor | None,
    config: Config | None = None,
) -> Tensor:
    """As torch.py's, plus the bias; the weight is rounded to x's dtype before the factor.

    Args:
        x: [n, in], last dimension contiguous.
        codes, scale, zero: contiguous; groups are powers of two, at least 16.
        one: [1, 1] float32, a one.
    Returns: [n, out], x's dtype.
    """
    n, out, device = x.shape[0], codes.shape[0], x.device
    columns = 2 * codes.shape[1]
    config = config or choose_config(n, out, columns)
    splits, overlap = config.splits, launches_overlap(device)
    y = torch.empty(n, out, dtype=x.dtype, device=device)
    parts = torch.empty(splits, n, out, dtype=torch.float32, device=device) if splits > 1 else y
    grid = (triton.cdiv(out, config.rows), triton.cdiv(n, config.tokens), splits)
    _product_kernel[grid](
        x,
        codes,
        scale,
        codes if zero is None else zero,
        factor,
        y if bias is None else bias,
        parts,
        n,
        out,
        columns,
        triton.cdiv(triton.cdiv(columns, config.columns), splits),
        x.stride(0),
        int(factor.shape[0] > 1),
        FLOATS=zero is None,
        GROUP=columns // scale.shape[1],
        HAS_BIAS=bias is not None,
        ROWS=config.rows,
        TOKENS=config.tokens,
        COLUMNS=config.columns,
        SPLIT=splits > 1,
        STAGES=config.stages,
        PRECISION="tf32" if x.dtype != torch.float32 else "tf32x3",
        OVERLAP=overlap,
        num_warps=config.warps,
        launch_pdl=overlap,
    )
    if splits > 1:
        join(parts, one, factor, bias, y)
    return y


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
