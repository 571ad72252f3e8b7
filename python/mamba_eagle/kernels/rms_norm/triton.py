"""RMSNorm in one pass, in the model's dtype or as float8, of a sum where there is one."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mamba_eagle.kernels.float8.torch import Operand, Rounded, Rounding
from mamba_eagle.kernels.float8.triton import (
    empty_rounded,
    rounded,
    to_e4m3,
    token_scale,
    warps_of_row,
)
from mamba_eagle.kernels.gpu import cdiv, overlapping
from mamba_eagle.kernels.triton_math import (
    blocks_of,
    inside_row,
    inverse_rms,
    load_blocks,
    previous_done,
)

ROW_NUMBERS = 1024  # of a program's rows together, where one has fewer


@triton.jit
def _widened(numbers, BLOCKS: tl.constexpr):
    wide = ()
    for block in tl.static_range(BLOCKS):
        wide += (numbers[block].to(tl.float32),)
    return wide


@triton.jit
def _sums(
    numbers,
    others,
    at,
    lines,
    column,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """The sums of two rows' blocks, rounded as they are written where the first ones stand, so that
    a reader of these has the same numbers."""
    sums = ()
    for block in tl.static_range(BLOCKS):
        total = numbers[block].to(tl.float32) + others[block].to(tl.float32)
        total = total.to(numbers[block].dtype)
        tl.store(at + block * BLOCK, total, mask=inside_row(lines, column, block, SIZE, BLOCK))
        sums += (total.to(tl.float32),)
    return sums


@triton.jit(do_not_specialize=["n", "scale_stride"])
def _norm_kernel(
    x,  # [n, SIZE], rows x_stride apart; changed if there is added
    added,  # [n, SIZE], rows added_stride apart; or None
    weight,  # [SIZE]
    static,  # [1, 1], of float8, or None
    out,  # [n, SIZE], rows out_stride apart; may be added. Float8 if ROUNDED, rows side by side
    scales,  # [n, 1] or, if GROUP, [n, groups]: written, where float8 has no static; or None
    exact,  # [n, SIZE], rows out_stride apart, written beside float8; may be added. None: is not
    n,
    x_stride,
    added_stride,
    out_stride,
    scale_stride,  # from group to group
    eps,
    ROUNDED: tl.constexpr,  # one row per program
    GROUP: tl.constexpr,  # channels that have a scale together; 0: all
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,  # channels of a block
    BLOCKS: tl.constexpr,  # of a row; they stay in registers
    ROWS: tl.constexpr,  # per program
    OVERLAP: tl.constexpr,
):
    column = tl.arange(0, BLOCK)[None, :]
    if ROUNDED:
        row, weights = tl.program_id(0).to(tl.int64), weight + column
    else:
        row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        # each row reads the weights, so that they stand where its numbers do; they need not wait
        weights = weight + tl.zeros([ROWS, 1], tl.int32) + column
    w = load_blocks(weights, None, column, SIZE, BLOCK, BLOCKS)
    previous_done(OVERLAP)
    exists = None if ROUNDED else row < n
    at = x + row * x_stride + column
    numbers = load_blocks(at, exists, column, SIZE, BLOCK, BLOCKS)
    if added is not None:
        beside = added + row * added_stride + column
        others = load_blocks(beside, exists, column, SIZE, BLOCK, BLOCKS)
        numbers = _sums(numbers, others, at, exists, column, SIZE, BLOCK, BLOCKS)
    else:
        numbers = _widened(numbers, BLOCKS)
    inverse = inverse_rms(numbers, eps, SIZE, BLOCKS)
    normed = ()
    for block in tl.static_range(BLOCKS):
        value = numbers[block] * inverse * w[block].to(tl.float32)
        if exact is not None:
            kept = value.to(exact.dtype.element_ty)
            to = exact + row * out_stride + column + block * BLOCK
            tl.store(to, kept, mask=inside_row(exists, column, block, SIZE, BLOCK))
            value = kept.to(tl.float32)  # float8 of what other readers have
        normed += (value,)
    if scales is not None and GROUP == 0:
        largest = tl.abs(normed[0])
        for block in tl.static_range(1, BLOCKS):
            largest = tl.maximum(largest, tl.abs(normed[block]))
        scale = token_scale(tl.max(largest, 1), 0)
        tl.store(scales + row, scale)
    elif ROUNDED and GROUP == 0:
        scale = tl.load(static)
    for block in tl.static_range(BLOCKS):
        value = normed[block]
        if GROUP > 0:
            parts = tl.reshape(value, [BLOCK // GROUP, GROUP])
            group = block * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
            own = token_scale(parts, 1)
            tl.store(scales + group * scale_stride + row, own, mask=group * GROUP < SIZE)
            value = tl.reshape(to_e4m3(parts / own[:, None]), [1, BLOCK])
        elif ROUNDED:
            value = to_e4m3(value / scale)
        to = out + row * (SIZE if ROUNDED else out_stride) + column + block * BLOCK
        tl.store(to, value, mask=inside_row(exists, column, block, SIZE, BLOCK))


def _launch_norm(
    x: Tensor,
    added: Tensor | None,
    weight: Tensor,
    out: Tensor | Rounded,
    eps: float,
    static: Tensor | None = None,
) -> None:
    """static: the scale of ``out``; None: each token or group gets one, which is written."""
    n, size = x.shape
    block, blocks = blocks_of(size)
    rows, own = max(1, ROW_NUMBERS // (block * blocks)), (None, out, None, None)
    group, group_stride, written = 0, 0, out
    if rounds := isinstance(out, Rounded):
        scales = out.scale if static is None else None
        rows, own = 1, (static, out.values, scales, out.exact)
        group, group_stride, written = out.group, out.scale.stride(1), out.exact
    _norm_kernel[(cdiv(n, rows),)](
        *(x, added, weight, *own, None if rounds else n),
        *(x.stride(0), 0 if added is None else added.stride(0)),
        *(None if written is None else written.stride(0), group_stride, eps),
        ROUNDED=rounds,
        GROUP=group,
        SIZE=size,
        BLOCK=block,
        BLOCKS=blocks,
        ROWS=rows,
        num_warps=warps_of_row(rows * block * blocks),
        **overlapping(x.device),
    )


def rms_norm(x: Tensor, weight: Tensor, eps: float, rounding: Rounding | None = None) -> Operand:
    """As ``LayerOps``': x [n, size], last dimension contiguous -> [n, size], contiguous."""
    return _norm(x, None, weight, eps, rounding)


def add_rms_norm_(
    stream: Tensor, added: Tensor, weight: Tensor, eps: float, rounding: Rounding | None = None
) -> Operand:
    """``stream`` becomes ``stream + added``; the norm of that sum is returned, in ``added`` unless
    it is float8 alone. Both [n, size], last dimension contiguous."""
    return _norm(stream, added, weight, eps, rounding)


def _norm(
    x: Tensor, added: Tensor | None, weight: Tensor, eps: float, rounding: Rounding | None
) -> Operand:
    """If groups do not divide the norm's blocks, another launch rounds."""
    if rounding is None or (rounding.group and blocks_of(x.shape[1])[0] % rounding.group):
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if added is None else added
        _launch_norm(x, added, weight, out, eps)
        return out if rounding is None else rounded(out, rounding)
    made = empty_rounded(*x.shape, rounding, x.device)
    if rounding.kept:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if added is None else added
        made = made._replace(exact=out)
    _launch_norm(x, added, weight, made, eps, rounding.scale)
    return made
