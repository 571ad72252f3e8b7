"""triton.py's product with scales of blocks for up to 8 tokens, with weights in registers from load
to product.

A program multiplies some rows of the weight with all tokens; each warp has columns of its own, and
their sums are added at the end. As in four_bit/gluon.py a thread loads 16 consecutive bytes of a
row to where ``mma.sync`` wants its left factor, and nothing but the sums of warps goes through
shared memory, so no warp waits for another one before that. Several blocks are under way at a time.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from mamba_eagle.kernels.float8 import triton as by_compiler
from mamba_eagle.kernels.float8.torch import Rounded
from mamba_eagle.kernels.gpu import PROCESSORS, capability, cdiv, overlapping

MAX_TOKENS = 8
HOPPER = (9, 0)  # earlier ones were not measured
BLOCK = 128  # columns that share a scale


class Config(NamedTuple):
    """How a product is divided; the result depends on it by rounding only."""

    rows: int  # per program
    warps: int
    blocks: int  # of columns, per warp and iteration


def choose_config(rows: int) -> Config:
    """For a weight of this many rows; the best on an H200."""
    if rows <= PROCESSORS * 16:
        return Config(16, 8, 4)
    if rows <= PROCESSORS * 64:
        return Config(16, 4, 4)
    return Config(32, 4, 1 if rows <= PROCESSORS * 128 else 2)


@gluon.jit(do_not_specialize=["n", "scale_stride", "group_stride"])
def _product_kernel(
    x,  # [n, columns] float8
    x_scale,  # [n, blocks_in]
    weight,  # [out, columns] float8
    scale,  # [out blocks, blocks_in]
    bias,  # [out], or None
    y,  # [n, out]
    n,
    out,
    columns,
    scale_stride,  # between tokens' scales
    group_stride,  # and between those of a token
    BLOCK: gl.constexpr,
    BLOCK_OUT: gl.constexpr,
    ROWS: gl.constexpr,
    TOKENS: gl.constexpr,
    WARPS: gl.constexpr,
    BLOCKS: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    sums: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, sums, 16)
    right: gl.constexpr = gl.DotOperandLayout(1, sums, 16)
    if OVERLAP:  # so the next kernel may begin while the one before this is still running
        gdc_launch_dependents()
    first, blocks_in = gl.program_id(0) * ROWS, columns // BLOCK
    share = gl.cdiv(blocks_in, WARPS)  # blocks of a warp, but for the last ones
    row = gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(2, left)))
    column = gl.arange(0, BLOCK, gl.SliceLayout(0, gl.SliceLayout(1, left)))
    rows = gl.minimum(first + row, out - 1).to(gl.int64) * columns
    at = weight + rows[None, :, None] + column[None, None, :]
    begin = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, left))) * share
    last = gl.minimum(begin + share, blocks_in) - 1
    token = gl.arange(0, TOKENS, gl.SliceLayout(0, gl.SliceLayout(1, right)))
    column = gl.arange(0, BLOCK, gl.SliceLayout(0, gl.SliceLayout(2, right)))
    tokens = x + (gl.minimum(token, n - 1) * columns)[None, None, :] + column[None, :, None]
    begin_x = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, right))) * share
    last_x = gl.minimum(begin_x + share, blocks_in) - 1
    token = gl.arange(0, TOKENS, gl.SliceLayout(0, gl.SliceLayout(1, sums)))
    own = x_scale + (gl.minimum(token, n - 1) * scale_stride)[None, None, :]
    begin_s = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, sums))) * share
    last_s = gl.minimum(begin_s + share, blocks_in) - 1
    scales = scale + first // BLOCK_OUT * blocks_in
    acc = gl.zeros([WARPS, ROWS, TOKENS], gl.float32, sums)
    for step in range(0, share, BLOCKS):
        w, t, s = (), (), ()
        for i in gl.static_range(BLOCKS):  # past the last block: that one, times zero
            block = gl.minimum(begin + (step + i), last)
            place = at + (block * BLOCK)[:, None, None]
            w += (gl.load(place, eviction_policy="evict_first"),)  # so that x stays in L1
        if OVERLAP:
            gdc_wait()  # takes nothing once it has ended
        for i in gl.static_range(BLOCKS):
            block = gl.minimum(begin_x + (step + i), last_x)
            t += (gl.load(tokens + (block * BLOCK)[:, None, None]),)
            block = begin_s + (step + i)
            of_weight = gl.load(scales + block, mask=block <= last_s, other=0.0)
            of_x = gl.load(own + (gl.minimum(block, last_s) * group_stride)[:, None, None])
            s += (of_weight[:, None, None] * of_x,)
        for i in gl.static_range(BLOCKS):
            none = gl.zeros([WARPS, ROWS, TOKENS], gl.float32, sums)
            acc += mma_v2(w[i], t[i], none) * s[i]
    total = gl.sum(acc, 0)
    result: gl.constexpr = gl.SliceLayout(0, sums)
    row = first + gl.arange(0, ROWS, gl.SliceLayout(1, result))
    token = gl.arange(0, TOKENS, gl.SliceLayout(0, result))
    if bias is not None:
        total += gl.load(bias + row, mask=row < out, other=0.0).to(gl.float32)[:, None]
    keep = (row < out)[:, None] & (token < n)[None, :]
    gl.store(y + token[None, :] * out + row[:, None], total.to(y.dtype.element_ty), mask=keep)


def supports(x: Rounded, weight: Tensor) -> bool:
    """Whether this file's kernel can multiply them, and is the faster one."""
    few = 0 < len(x.values) <= MAX_TOKENS and x.group == BLOCK
    return few and weight.shape[1] % BLOCK == 0 and capability(weight.device) >= HOPPER


def product(
    x: Rounded,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    block: tuple[int, int],
    arrived: Tensor,
    config: Config | None = None,
) -> Tensor:
    """As triton.py's, to which it leaves what it does not support."""
    if not supports(x, weight) and config is None:
        return by_compiler.product(x, weight, scale, bias, dtype, block, None, arrived)
    n, (out, columns) = x.values.shape[0], weight.shape
    config = config or choose_config(out)
    y = torch.empty(n, out, dtype=dtype, device=weight.device)
    _product_kernel[(cdiv(out, config.rows),)](
        *(x.values, x.scale, weight, scale, bias, y, n, out, columns, *x.scale.stride()),
        BLOCK=BLOCK,
        BLOCK_OUT=block[0],
        ROWS=config.rows,
        TOKENS=MAX_TOKENS,
        WARPS=config.warps,
        BLOCKS=config.blocks,
        num_warps=config.warps,
        **overlapping(weight.device),
    )
    return y
