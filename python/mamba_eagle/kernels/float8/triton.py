"""Float8 products on a GPU, with scales per row and token or per block, and rounding to float8.

A program multiplies some rows of the weight with all columns and 16 to 64 tokens. The weight is
the first factor: it has enough rows for the tensor cores' widest instruction however few tokens
there are. Scales of rows and tokens are applied to the finished sums; scales of blocks to the sum
of each 128 columns, for which more than a few tokens are better the first factor: then a thread
needs the scales of two of them.
"""

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mamba_eagle.kernels.float8.torch import E4M3, LARGEST, SMALLEST_SCALE, Rounded, Rounding
from mamba_eagle.kernels.gpu import (
    PROCESSORS,
    cdiv,
    launches_overlap,
    next_power_of_2,
    overlapping,
)
from mamba_eagle.kernels.staged import Staged
from mamba_eagle.kernels.triton_math import INTERPRETED, fetch_ahead, previous_done

MOST_GROUPS = 8  # that a program rounds
_LARGEST = tl.constexpr(LARGEST)
_SMALLEST = tl.constexpr(SMALLEST_SCALE)


# ── rounding ──


@triton.jit
def to_e4m3(x):
    """x (float32) as E4M3; what is larger than 448 becomes 448."""
    x = tl.minimum(tl.maximum(x, -_LARGEST), _LARGEST)
    if INTERPRETED:
        # the interpreter's own conversion truncates: round to the spacing of the neighbours first
        size = tl.abs(x)
        exponent = tl.maximum(tl.floor(tl.log2(tl.maximum(size, 1e-30))), -6.0)
        step = tl.exp2(exponent - 3.0)
        x = _half_to_even(x / step) * step
    return x.to(tl.float8e4nv)


@triton.jit
def _half_to_even(x):
    """The nearest whole number, for |x| below 2^22: adding 1.5 · 2^23 leaves no fraction."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def token_scale(x, axis: tl.constexpr):
    """The scale that makes the largest of some numbers (float32) 448."""
    return tl.maximum(tl.max(tl.abs(x), axis) / _LARGEST, _SMALLEST)


@triton.jit(do_not_specialize=["group_stride"])
def _round_kernel(
    x,  # [n, size], rows x_stride apart
    static,  # [1, 1], or None: scales are found
    out,  # [n, size] float8
    scales,  # [n, groups], written if there is no static one
    x_stride,
    group_stride,
    size,
    BLOCK: tl.constexpr,  # a row or a group, padded
    GROUPS: tl.constexpr,  # of a program; 0: the whole row
    OVERLAP: tl.constexpr,
):
    previous_done(OVERLAP)
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    if GROUPS > 0:
        group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
        column = group[:, None] * BLOCK + column[None, :]
    inside = column < size
    numbers = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if static is None:
        scale = token_scale(numbers, 1 if GROUPS > 0 else 0)
        if GROUPS > 0:
            tl.store(scales + group * group_stride + row, scale, mask=group * BLOCK < size)
            scale = scale[:, None]
        else:
            tl.store(scales + row, scale)
    else:
        scale = tl.load(static)
    tl.store(out + row * size + column, to_e4m3(numbers / scale), mask=inside)


def empty_rounded(n: int, size: int, rounding: Rounding, device: torch.device) -> Rounded:
    """Room for n tokens; a static scale is already there. Scales of a group are neighbours, with
    room for a multiple of four tokens, as cuBLASLt wants it: see ``with_room``."""
    room = n + -n % 4 if rounding.group else n
    values = _first(torch.empty(room, size, dtype=E4M3, device=device), n)
    if rounding.scale is not None:
        return Rounded(values, rounding.scale)
    groups = cdiv(size, rounding.group) if rounding.group else 1
    scale = torch.empty(groups, room, dtype=torch.float32, device=device)
    if not rounding.group:
        return Rounded(values, scale.view(n, 1))
    return Rounded(values, _first(scale.t(), n), rounding.group)


def _first(x: Tensor, n: int) -> Tensor:
    """x[:n], which takes the host 2 µs even if that is all."""
    return x if len(x) == n else x[:n]


def with_room(x: Rounded) -> Rounded:
    """In groups: with the tokens there was room for, whose numbers are arbitrary."""
    (n, groups), (_, room) = x.scale.shape, x.scale.stride()
    if room == n:
        return x
    scale = x.scale.as_strided((room, groups), (1, room))
    size = x.values.shape[1]
    return Rounded(x.values.as_strided((room, size), (size, 1)), scale, x.group)


def rounded(x: Tensor | Rounded, rounding: Rounding) -> Rounded:
    """As torch.py's, unless that is done. x [n, size], last dimension contiguous."""
    if isinstance(x, Rounded):
        return x
    n, size = x.shape
    out = empty_rounded(n, size, rounding, x.device)
    groups = cdiv(size, rounding.group) if rounding.group else 0
    together = min(MOST_GROUPS, next_power_of_2(groups)) if groups else 0
    block = next_power_of_2(rounding.group or size)
    _round_kernel[(n, cdiv(groups, together) if groups else 1)](
        *(x, rounding.scale, out.values, out.scale, x.stride(0), out.scale.stride(-1), size),
        BLOCK=block,
        GROUPS=together,
        num_warps=warps_of_row(block * max(1, together)),
        **overlapping(x.device),
    )
    return out._replace(exact=x) if rounding.kept else out


def warps_of_row(block: int) -> int:
    """Warps of a program that keeps ``block`` numbers in registers."""
    return 1 if block <= 512 else 4 if block <= 4096 else 8 if block <= 8192 else 16


# ── products ──


class Config(NamedTuple):
    """How a product is divided; but for ``splits`` the result does not depend on it."""

    rows: int  # of the weight, per program: a power of two
    tokens: int  # per program: a power of two, at least 16
    warps: int
    stages: int  # iterations in flight
    ahead: int = 0  # as in kernels/linear
    tokens_first: bool = False  # with scales of blocks: the factor with at least 64 numbers
    blocks: int = 2  # of columns per iteration, with scales of blocks
    splits: int = 1  # programs that share the columns then, which decides the result's bits


# columns of an iteration, which are summed up in the tensor cores before they are added
PRECISE = tl.constexpr(128)


@triton.jit
def product_of_tiles(w, x, acc):
    """acc [rows, tokens] + w [rows, columns] · xᵀ [tokens, columns]."""
    if INTERPRETED:
        return tl.dot(w.to(tl.float32), tl.trans(x.to(tl.float32)), acc)
    else:
        # sums inside of the tensor cores have fewer bits than float32: carry them over in time
        return tl.dot(w, tl.trans(x), acc, max_num_imprecise_acc=PRECISE)


@triton.jit
def with_scales(
    acc, x_scale, scale, bias, token, row, is_token, is_row, x_scale_stride, scale_stride,
    OF_TOKENS: tl.constexpr,  # whether x_scale is yet to be multiplied
    OF_ROWS: tl.constexpr,
):  # fmt: skip
    """A product's sums [rows, tokens] become its result, in an order that fixes its bits."""
    if OF_TOKENS:
        acc *= tl.load(x_scale + token * x_scale_stride, mask=is_token, other=0.0)[None, :]
    if OF_ROWS:
        acc *= tl.load(scale + row * scale_stride, mask=is_row, other=0.0)[:, None]
    if bias is not None:
        acc += tl.load(bias + row, mask=is_row, other=0.0).to(tl.float32)[:, None]
    return acc


# not specialized, so that all weights of a model and all numbers of tokens share machine code
@Staged
@triton.jit(do_not_specialize=["n", "x_scale_stride", "scale_stride"])
def _product_kernel(
    x,  # [n, columns] float8
    x_scale,  # [n, 1] or one
    weight,  # [out, columns] float8
    scale,  # [out] or one
    bias,  # [out], or None
    y,  # [n, out]
    n,
    out,
    columns,
    x_scale_stride,  # 0: one scale for all tokens
    scale_stride,  # 0: one scale for all rows
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    STAGES: tl.constexpr,
    AHEAD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    is_row, is_token = row < out, token < n
    rows = weight + row.to(tl.int64)[:, None] * columns
    tokens = x + token.to(tl.int64)[:, None] * columns
    acc = tl.zeros([ROWS, TOKENS], tl.float32)
    known = weight + tl.minimum(row, out - 1).to(tl.int64)[:, None] * columns
    fetch_ahead(known, 0, columns, AHEAD)
    previous_done(OVERLAP)
    for at in tl.range(0, columns, PRECISE, num_stages=STAGES):
        w, t = _tiles(rows, tokens, is_row, is_token, at, columns)
        acc = product_of_tiles(w, t, acc)
    acc = with_scales(
        acc, x_scale, scale, bias, token, row, is_token, is_row, x_scale_stride, scale_stride,
        True, True,
    )  # fmt: skip
    at = token.to(tl.int64)[None, :] * out + row[:, None]
    tl.store(y + at, acc, mask=is_row[:, None] & is_token[None, :])


@triton.jit
def _tiles(rows, tokens, is_row, is_token, at, columns):
    """PRECISE columns of a weight's rows and of tokens, with zeros outside."""
    column = at + tl.arange(0, PRECISE)
    inside = (column < columns)[None, :]
    w = tl.load(rows + column[None, :], mask=is_row[:, None] & inside, other=0.0)
    t = tl.load(tokens + column[None, :], mask=is_token[:, None] & inside, other=0.0)
    return w, t


@triton.jit
def _block_sums(w, t, TOKENS_FIRST: tl.constexpr):
    """Products of a block of columns: [rows, tokens] or, if TOKENS_FIRST, [tokens, rows]."""
    if TOKENS_FIRST:
        return product_of_tiles(t, w, tl.zeros([t.shape[0], w.shape[0]], tl.float32))
    else:
        return product_of_tiles(w, t, tl.zeros([w.shape[0], t.shape[0]], tl.float32))


@triton.jit
def scales_of(scales, own, group_stride, block, blocks_in, BLOCKS: tl.constexpr):
    """Scales of BLOCKS sums: the weight's from ``block`` on (beyond the end the last one again) and
    those of the inputs' groups, [tokens] each; group_stride None: inputs have no groups."""
    found = ()
    for i in tl.static_range(BLOCKS):
        at = tl.minimum(block + i, blocks_in - 1)
        if group_stride is None:
            found += ((tl.load(scales + at),),)
        else:
            found += ((tl.load(scales + at), tl.load(own + at * group_stride)),)
    return found


@triton.jit
def with_blocks(
    acc, read, scales, GROUPED: tl.constexpr, TOKENS_FIRST: tl.constexpr, BLOCKS: tl.constexpr
):
    """acc plus the products of blocks of columns, in order. All are begun before one is waited for.
    read: rows' and tokens' numbers of each block; scales: as ``scales_of``."""
    sums = ()
    for i in tl.static_range(BLOCKS):
        sums += (_block_sums(read[i][0], read[i][1], TOKENS_FIRST),)
    for i in tl.static_range(BLOCKS):
        factor = scales[i][0]
        if GROUPED:
            factor *= tl.expand_dims(scales[i][1], 1 if TOKENS_FIRST else 0)
        acc += sums[i] * factor
    return acc


@Staged
@triton.jit(do_not_specialize=["n", "x_scale_stride", "x_group_stride", "blocks_in"])
def _block_kernel(
    x,  # [n, columns] float8
    x_scale,  # [n, blocks_in] if GROUPED, else [n, 1] or one
    weight,  # [out, columns] float8
    scale,  # [out blocks, blocks_in]
    bias,  # [out], or None
    y,  # [n, out]
    parts,  # [SPLITS, n, out] float32, written if there is more than one
    arrived,  # [programs of a split] int32: zeros before and after
    n,
    out,
    columns,
    blocks_in,  # blocks of columns that share a scale
    x_scale_stride,  # 0: one scale for all tokens
    x_group_stride,
    BLOCK_OUT: tl.constexpr,  # rows of a block, a multiple of ROWS
    GROUPED: tl.constexpr,
    TOKENS_FIRST: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCKS: tl.constexpr,  # of columns, an iteration
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Some blocks an iteration, whose scales were loaded in the one before: a sum of 128 columns is
    short, and everything between two iterations is waited for. Of the programs that share columns
    the last one that comes adds up their parts, in order."""
    first = tl.program_id(0) * ROWS
    row = first + tl.arange(0, ROWS)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    is_row, is_token = row < out, token < n
    rows = weight + row.to(tl.int64)[:, None] * columns
    tokens = x + token.to(tl.int64)[:, None] * columns
    if TOKENS_FIRST:
        acc = tl.zeros([TOKENS, ROWS], tl.float32)
    else:
        acc = tl.zeros([ROWS, TOKENS], tl.float32)
    scales = scale + first // BLOCK_OUT * blocks_in
    own = x_scale + tl.minimum(token, n - 1) * x_scale_stride
    group_stride = x_group_stride if GROUPED else None
    share = tl.cdiv(tl.cdiv(blocks_in, BLOCKS), SPLITS) * BLOCKS
    begin = tl.program_id(2) * share
    end = tl.minimum((begin + share) * PRECISE, columns)
    previous_done(OVERLAP)
    given = scales_of(scales, own, group_stride, begin, blocks_in, BLOCKS)
    for at in tl.range(begin * PRECISE, end, BLOCKS * PRECISE, num_stages=STAGES):
        read = ()
        for i in tl.static_range(BLOCKS):
            read += (_tiles(rows, tokens, is_row, is_token, at + i * PRECISE, end),)
        following = at // PRECISE + BLOCKS
        later = scales_of(scales, own, group_stride, following, blocks_in, BLOCKS)
        acc = with_blocks(acc, read, given, GROUPED, TOKENS_FIRST, BLOCKS)
        given = later
    if TOKENS_FIRST:
        acc = tl.trans(acc)
    at = token.to(tl.int64)[None, :] * out + row[:, None]
    inside = is_row[:, None] & is_token[None, :]
    is_last = True
    if SPLITS > 1:
        tl.store(parts + tl.program_id(2) * n * out + at, acc, mask=inside)
        tl.debug_barrier()  # one thread says that all have stored
        place = arrived + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        is_last = tl.atomic_add(place, 1, sem="acq_rel") == SPLITS - 1
        if is_last:
            tl.store(place, 0)
            acc = tl.zeros([ROWS, TOKENS], tl.float32)
            for split in tl.static_range(SPLITS):
                part = parts + split * n * out + at
                acc += tl.load(part, mask=inside, other=0.0, cache_modifier=".cg")
    if is_last:
        acc = with_scales(
            acc, x_scale, scale, bias, token, row, is_token, is_row, x_scale_stride, 0,
            not GROUPED, False,
        )  # fmt: skip
        tl.store(y + at, acc, mask=inside)


@triton.jit(do_not_specialize=["n", "x_scale_stride", "scale_stride"])
def _join_kernel(
    parts,  # [SPLITS, n, out] float32
    x_scale,  # [n, 1] or one
    scale,  # [out] or one
    bias,  # [out], or None
    y,  # [n, out]
    n,
    out,
    x_scale_stride,
    scale_stride,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """y = the sum of the parts, times both scales, plus the bias."""
    previous_done(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_row = row < out
    total = tl.zeros([BLOCK], tl.float32)
    for split in tl.static_range(SPLITS):
        at = (split * n + token) * out + row
        total += tl.load(parts + at, mask=is_row, other=0.0)
    total *= tl.load(x_scale + token * x_scale_stride)
    total *= tl.load(scale + row * scale_stride, mask=is_row, other=0.0)
    if bias is not None:
        total += tl.load(bias + row, mask=is_row, other=0.0).to(tl.float32)
    tl.store(y + token * out + row, total, mask=is_row)


ALONE = PROCESSORS * 64  # rows up to which each program has a multiprocessor
LONG = 4096  # columns from which more in flight, or sharing them, is worth its end


def choose_config(
    n: int, rows: int, blocks: bool, columns: int = 0, shared: bool = False
) -> Config:
    """For a weight of as many rows and columns and n tokens; blocks: whether scales are of blocks;
    shared: whether programs may share columns.

    A program is bound by how much of the weight it has in flight, so one that is alone on its
    multiprocessor has ten iterations of it. That is as fast as sharing columns among more programs.
    With scales of blocks what it waits for is the end of each sum, so it makes four at a time; if
    rows are long, programs that share them wait less, as do two on a multiprocessor with a stage
    more.
    """
    alone = rows <= ALONE and n <= 64
    if not blocks:
        tokens = min(64, max(16, next_power_of_2(n)))
        return Config(64, tokens, 4, 10 if alone else 5, 4 if alone else 0)
    if alone and rows <= PROCESSORS * 16:
        return Config(16, 64, 4, 3, tokens_first=True, blocks=4)
    few, long = n <= 16, columns >= LONG
    tokens = 16 if few else 64
    if alone and not (shared and long):
        return Config(64, tokens, 4, 3, tokens_first=not few, blocks=4)
    stages = 4 if few and long and rows <= 2 * ALONE else 3
    return Config(64, tokens, 4, stages, tokens_first=not few, splits=3 if alone else 1)


@cache
def arrivals(device: torch.device) -> Tensor:
    """Zeros with which programs of a product count each other, and which they leave as they were.

    For all products of a device, which run one after the other, on one stream. To be made before
    any is captured.
    """
    return torch.zeros(PROCESSORS, dtype=torch.int32, device=device)


def product(
    x: Rounded,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    block: tuple[int, int] | None = None,
    config: Config | None = None,
    arrived: Tensor | None = None,
) -> Tensor:
    """``y_ro = Σ_i (s_r q_ri) (t_o w_oi) + b_o``, sums in float32.

    Args:
        x: values [n, in] contiguous; scale [1, 1], [n, 1], or with ``block`` [n, in blocks].
        weight: [out, in] E4M3, contiguous.
        scale: [1, 1] or [out, 1] float32, contiguous; with ``block`` [out blocks, in blocks].
        block: rows and columns that share a scale: a multiple of 128, and 128.
        arrived: ``arrivals``, if programs may share columns of blocks; None: one sum goes over all,
            so that its bits do not depend on n.
    Returns: [n, out] of ``dtype``.
    """
    n, (out, columns) = x.values.shape[0], weight.shape
    config = config or choose_config(n, out, block is not None, columns, arrived is not None)
    y = torch.empty(n, out, dtype=dtype, device=weight.device)
    grid = (cdiv(out, config.rows), cdiv(n, config.tokens))
    operands = (x.values, x.scale, weight, scale, bias, y)
    shape = {"ROWS": config.rows, "TOKENS": config.tokens, "STAGES": config.stages}
    shape |= {"num_warps": config.warps, **overlapping(y.device)}
    x_stride = int(x.scale.shape[0] > 1)
    if block is not None:
        blocks = {"BLOCK_OUT": block[0], "GROUPED": x.group > 0}
        blocks |= {"TOKENS_FIRST": config.tokens_first, "BLOCKS": config.blocks}
        blocks |= {"SPLITS": config.splits}
        strides = x.scale.stride() if x.group else (x_stride, 0)
        parts = (None, None)
        if config.splits > 1:
            assert arrived is not None and grid[0] * grid[1] <= len(arrived)
            parts = (torch.empty(config.splits, n, out, device=weight.device), arrived)
        sizes = (n, out, columns, scale.shape[1], *strides)
        _block_kernel[(*grid, config.splits)](*operands, *parts, *sizes, **blocks, **shape)
    else:
        ahead = config.ahead if launches_overlap(y.device) else 0
        sizes = (n, out, columns, x_stride, int(scale.shape[0] > 1))
        _product_kernel[grid](*operands, *sizes, AHEAD=ahead, **shape)
    return y


def join(parts: Tensor, x_scale: Tensor, scale: Tensor, bias: Tensor | None, y: Tensor) -> None:
    """y [n, out] = the sum of ``parts`` [splits, n, out] float32, times the scales of tokens
    ([n, 1] or [1, 1]) and rows ([out, 1] or [1, 1]), plus the bias [out]."""
    splits, n, out = parts.shape
    block = min(1024, next_power_of_2(out))
    _join_kernel[(n, cdiv(out, block))](
        *(parts, x_scale, scale, bias, y, n, out),
        *(int(x_scale.shape[0] > 1), int(scale.shape[0] > 1)),
        SPLITS=splits,
        BLOCK=block,
        num_warps=4,
        **overlapping(y.device),
    )
