"""triton.py's product for many tokens, with the bits of any other number of them.

What fixes the bits is as there: the tensor cores' steps of 32 columns, a sum of 128 columns by
itself, these sums in order, then scales and bias. What differs is how operands come: the copy
engine brings them, without addresses and masks in registers; and programs that run at the same time
share rows and tokens. With scales of rows a program has two tiles of tokens, so that the second is
multiplied while the first is carried over, and a tile of the weight serves both. With scales of
blocks, tokens are the first factor: then a thread needs the scales of two tokens, not of sixteen.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from mamba_eagle.kernels.float8.torch import Rounded
from mamba_eagle.kernels.float8.triton import (
    PRECISE,
    product_of_tiles,
    scales_of,
    with_blocks,
    with_scales,
)
from mamba_eagle.kernels.gpu import PROCESSORS, cdiv, overlapping
from mamba_eagle.kernels.staged import Staged
from mamba_eagle.kernels.triton_math import previous_done


class Tiles(NamedTuple):
    """How a product is divided; the result does not depend on it."""

    rows: int  # of the weight, per program: a power of two, with scales of blocks at most 128
    tokens: int  # in each tile of a program: a power of two, at least 16
    warps: int
    stages: int  # iterations in flight
    blocks: int = 1  # of columns per iteration, with scales of blocks


SIZES = (65, 257, 4097)  # numbers of tokens that between them need every kernel
GROUP = tl.constexpr(8)  # programs side by side along the tokens


def choose_tiles(n: int, rows: int, blocks: bool) -> Tiles:
    """For Hopper: of five forms the one that takes least for the products of a dense 9B. That of up
    to 4,096 tokens is faster at 8,192, too, if it runs alone, but a whole pass is bound by power:
    123 ms, here 119. With scales of ``blocks``: of 56 forms, for the products of Qwen3.6-27B.
    rows: of the weight."""
    if blocks:
        if n > 256:
            return Tiles(128, 128, 8, 3, 2)
        return Tiles(64, 128, 4, 3 if rows > PROCESSORS * 128 else 4)
    if n > 4096:
        return Tiles(128, 128, 8, 4)
    return Tiles(128, 64, 8, 3) if n > 256 else Tiles(64, 64, 4, 4)


@triton.jit
def _place(n, out, ROWS: tl.constexpr, TOKENS: tl.constexpr):
    """A program's first row and token: GROUP tiles of tokens, all rows, the next GROUP, so that
    what runs at a time fits into the L2 cache."""
    program, tall = tl.program_id(0), tl.cdiv(out, ROWS)
    group = program // (GROUP * tall)
    wide = tl.minimum(tl.cdiv(n, TOKENS) - group * GROUP, GROUP)
    within = program - group * GROUP * tall
    return within // wide * ROWS, (group * GROUP + within % wide) * TOKENS


# not specialized, so that all weights of a model and all numbers of tokens share machine code
@Staged
@triton.jit(do_not_specialize=["n", "x_scale_stride", "scale_stride"])
def _prompt_kernel(
    x,  # [n, columns] float8, in tiles [TOKENS, PRECISE]
    x_scale,  # [n, 1] or one
    weight,  # [out, columns] float8, in tiles [ROWS, PRECISE]
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
    OVERLAP: tl.constexpr,
):
    first_row, first = _place(n, out, ROWS, 2 * TOKENS)
    left = tl.zeros([ROWS, TOKENS], tl.float32)
    right = tl.zeros([ROWS, TOKENS], tl.float32)
    previous_done(OVERLAP)
    for at in tl.range(0, columns, PRECISE, num_stages=STAGES):
        w = weight.load([first_row, at])  # zeros outside
        t = x.load([first, at])
        more = x.load([first + TOKENS, at])  # here, so that one barrier serves all three
        left = product_of_tiles(w, t, left)
        right = product_of_tiles(w, more, right)
    row = first_row + tl.arange(0, ROWS)
    is_row = row < out
    for half in tl.static_range(2):
        token = first + half * TOKENS + tl.arange(0, TOKENS)
        is_token = token < n
        sums = with_scales(
            left if half == 0 else right,
            x_scale, scale, bias, token, row, is_token, is_row, x_scale_stride, scale_stride,
            True, True,
        )  # fmt: skip
        at = token.to(tl.int64)[None, :] * out + row[:, None]
        tl.store(y + at, sums, mask=is_row[:, None] & is_token[None, :])


@Staged
@triton.jit(do_not_specialize=["n", "x_scale_stride", "x_group_stride", "blocks_in"])
def _block_prompt_kernel(
    x,  # [n, columns] float8, in tiles [TOKENS, PRECISE]
    x_scale,  # [n, blocks_in] if GROUPED, else [n, 1] or one
    weight,  # [out, columns] float8, in tiles [ROWS, PRECISE]
    scale,  # [out blocks, blocks_in]
    bias,  # [out], or None
    y,  # [n, out]
    n,
    out,
    columns,
    blocks_in,  # blocks of columns that share a scale
    x_scale_stride,  # 0: one scale for all tokens
    x_group_stride,
    BLOCK_OUT: tl.constexpr,  # rows of a block, a multiple of ROWS
    GROUPED: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCKS: tl.constexpr,  # of columns, an iteration
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    first_row, first = _place(n, out, ROWS, TOKENS)
    row, token = first_row + tl.arange(0, ROWS), first + tl.arange(0, TOKENS)
    is_row, is_token = row < out, token < n
    acc = tl.zeros([TOKENS, ROWS], tl.float32)
    scales = scale + first_row // BLOCK_OUT * blocks_in
    own = x_scale + tl.minimum(token, n - 1) * x_scale_stride
    group_stride = x_group_stride if GROUPED else None
    previous_done(OVERLAP)
    given = scales_of(scales, own, group_stride, 0, blocks_in, BLOCKS)
    for at in tl.range(0, columns, BLOCKS * PRECISE, num_stages=STAGES):
        read = ()
        for i in tl.static_range(BLOCKS):  # zeros outside
            column = at + i * PRECISE
            read += ((weight.load([first_row, column]), x.load([first, column])),)
        following = at // PRECISE + BLOCKS
        later = scales_of(scales, own, group_stride, following, blocks_in, BLOCKS)
        acc = with_blocks(acc, read, given, GROUPED, True, BLOCKS)
        given = later
    if not GROUPED:
        acc *= tl.load(own)[:, None]
    if bias is not None:
        acc += tl.load(bias + row, mask=is_row, other=0.0).to(tl.float32)[None, :]
    at = token.to(tl.int64)[:, None] * out + row[None, :]
    tl.store(y + at, acc, mask=is_token[:, None] & is_row[None, :])


def product(
    x: Rounded,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    block: tuple[int, int] | None = None,
    tiles: Tiles | None = None,
) -> Tensor:
    """As triton.py's; ``in`` is a multiple of 16."""
    n, (out, columns) = x.values.shape[0], weight.shape
    tiles = tiles or choose_tiles(n, out, block is not None)
    y = torch.empty(n, out, dtype=dtype, device=weight.device)
    operands = (
        TensorDescriptor.from_tensor(x.values, [tiles.tokens, PRECISE.value]),
        x.scale,
        TensorDescriptor.from_tensor(weight, [tiles.rows, PRECISE.value]),
        *(scale, bias, y, n, out, columns),
    )
    shape = {"ROWS": tiles.rows, "TOKENS": tiles.tokens, "STAGES": tiles.stages}
    shape |= {"num_warps": tiles.warps, **overlapping(y.device)}
    tall, x_stride = cdiv(out, tiles.rows), int(x.scale.shape[0] > 1)
    if block is not None:
        blocks = {"BLOCK_OUT": block[0], "GROUPED": x.group > 0}
        blocks |= {"BLOCKS": tiles.blocks}
        strides = x.scale.stride() if x.group else (x_stride, 0)
        grid = (tall * cdiv(n, tiles.tokens),)
        _block_prompt_kernel[grid](*operands, scale.shape[1], *strides, **blocks, **shape)
    else:
        grid = (tall * cdiv(n, 2 * tiles.tokens),)
        _prompt_kernel[grid](*operands, x_stride, int(scale.shape[0] > 1), **shape)
    return y
