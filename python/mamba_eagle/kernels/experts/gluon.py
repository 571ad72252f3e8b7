"""Gated experts of prompts on Hopper, in float8 with scales of blocks, with the bits of triton.py's
tiles: products by warp groups.

Pairs are the left factor, so that a thread needs the scales of two of them. Outputs of the first
product stand in the order of experts; its programs have the rows of a group of the second one's
inputs, so they round what they make.

A program takes one tile of an expert's pairs after the other, with two blocks of 128 rows of its
matrix. One warp group copies: rows of inputs, wherever they are, and by the copy engine weights.
Two others multiply half of the pairs each. Between a product and the next one a group scales what
it has, which the other one's products hide.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from mamba_eagle.kernels.experts.triton import BLOCK, GROUPED, Stack
from mamba_eagle.kernels.experts.triton_routes import Sorted
from mamba_eagle.kernels.float8.torch import Operand, Rounded
from mamba_eagle.kernels.float8.triton import empty_rounded, rounded, to_e4m3, token_scale
from mamba_eagle.kernels.gpu import PROCESSORS, capability, cdiv, next_power_of_2
from mamba_eagle.kernels.triton_math import silu

HOPPER = 9
HALF = 64  # pairs of a warp group
TILE = 2 * HALF  # and of a program
STAGES = 4  # steps in shared memory
FROM = 513  # tokens from which these kernels are faster than tiles
# Triton 3.7 gave them other names
_copy = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
_gather = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared


@gluon.jit
def _tiles_kernel(
    ends,  # [EXPERTS] int32, where each expert's pairs end
    tiles,  # int32: how many there are; of each its expert, its first pair, the expert's end
    EXPERTS: gl.constexpr,
    PADDED: gl.constexpr,  # a power of two, at least EXPERTS
    TILE: gl.constexpr,
):
    own = gl.program_id(0)
    each = gl.arange(0, PADDED, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    end = gl.load(ends + each, mask=each < EXPERTS, other=0)
    begin = gl.load(ends + each - 1, mask=(each > 0) & (each < EXPERTS), other=0)
    number = gl.where(each < EXPERTS, (end - begin + TILE - 1) // TILE, 0)
    before = gl.sum(gl.where(each < own, number, 0), 0)
    first, last = gl.sum(gl.where(each == own, begin, 0), 0), gl.load(ends + own)
    if own == 0:
        gl.store(tiles, gl.sum(number, 0))
    for i in range(gl.cdiv(last - first, TILE)):
        entry = tiles + 1 + 3 * (before + i)
        gl.store(entry, own)
        gl.store(entry + 1, first + i * TILE)
        gl.store(entry + 2, last)


@gluon.jit
def _tile(tiles, tile, count, COLUMNS: gl.constexpr):
    """A program's tile, or the last one: its expert, its first pair, the expert's end."""
    entry = tiles + 1 + gl.minimum(tile, count - 1) // COLUMNS * 3
    return gl.load(entry), gl.load(entry + 1), gl.load(entry + 2)


@gluon.jit
def _produce(
    x, x_scale, x_group_stride, weight, order, tiles, tokens, groups, weights, ready, free,
    STEPS: gl.constexpr, COLUMNS: gl.constexpr, ROWS: gl.constexpr, TOP_K: gl.constexpr,
    GATED: gl.constexpr,
):  # fmt: skip
    STAGES: gl.constexpr = tokens.shape[0]
    TILE: gl.constexpr = tokens.shape[1]
    BLOCK: gl.constexpr = tokens.shape[2]
    SECOND: gl.constexpr = ROWS // 2 if GATED else BLOCK
    layout: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [gl.num_warps(), 1], [1, 0])
    flat: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    filled, count = 0, gl.load(tiles) * COLUMNS
    for tile in range(gl.program_id(0), count, gl.num_programs(0)):
        expert, first, end = _tile(tiles, tile, count, COLUMNS)
        given = first + gl.arange(0, TILE, gl.SliceLayout(1, layout))
        is_pair = given < end  # other rows stay as they are: their products are not stored
        if GATED:
            given = gl.load(order + given, mask=is_pair, other=0) // TOP_K
        column = gl.arange(0, BLOCK, gl.SliceLayout(0, layout))
        rows = x + given.to(gl.int64)[:, None] * (STEPS * BLOCK) + column[None, :]
        has_group = first + gl.arange(0, TILE, flat) < end
        of_group = x_scale + gl.convert_layout(given, flat)
        row = expert * ROWS + tile % COLUMNS * (BLOCK if GATED else 2 * BLOCK)
        for step in range(STEPS):
            at = filled % STAGES
            # the first wait for a stage is over at once
            mbarrier.wait(free.index(at), 1 - (filled // STAGES & 1))
            mbarrier.expect(ready.index(at), 2 * BLOCK * BLOCK)
            for i in gl.static_range(2):
                to = weights.index(2 * at + i)
                _copy(weight, [row + i * SECOND, step * BLOCK], ready.index(at), to)
            _gather(tokens.index(at), rows + step * BLOCK, mask=is_pair[:, None])
            _gather(groups.index(at), of_group + step * x_group_stride, mask=has_group)
            async_copy.mbarrier_arrive(ready.index(at), increment_count=False)
            filled += 1


@gluon.jit
def _add(sums, tokens, weights, factor, scale):
    """A block of columns: the product in the tensor cores, then times both scales."""
    product = warpgroup_mma(tokens, weights.permute((1, 0)), sums, use_acc=False, is_async=True)
    factor = gl.load(scale) * factor
    product = warpgroup_mma_wait(0, deps=[product])
    return product, factor


@gluon.jit
def _consume(
    scale, order, tiles, y, y_scale, y_group_stride, tokens, groups, weights, ready, free,
    PART: gl.constexpr, STEPS: gl.constexpr, COLUMNS: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """The products of the first or the last pairs of tiles."""
    STAGES: gl.constexpr = tokens.shape[0]
    HALF: gl.constexpr = tokens.shape[1] // 2
    BLOCK: gl.constexpr = tokens.shape[2]
    SECOND: gl.constexpr = COLUMNS * STEPS if GATED else STEPS
    OUT: gl.constexpr = COLUMNS * (BLOCK if GATED else 2 * BLOCK)
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BLOCK, 32])
    of_row: gl.constexpr = gl.SliceLayout(1, layout)
    # as products are, but for eight neighbours of a row in a thread
    stored: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [8, 0], [0, 32], [0, 64]],
        [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [HALF, BLOCK],
    )
    filled, count = 0, gl.load(tiles) * COLUMNS
    expert, first, end = _tile(tiles, gl.program_id(0), count, COLUMNS)
    for tile in range(gl.program_id(0), count, gl.num_programs(0)):
        following = _tile(tiles, tile + gl.num_programs(0), count, COLUMNS)
        first += PART * HALF
        block = tile % COLUMNS
        if first < end:
            scales = scale + (expert * 2 * COLUMNS + block * (1 if GATED else 2)) * STEPS
            to = first + gl.arange(0, HALF, gl.SliceLayout(1, stored))
            is_pair = to < end
            if not GATED:
                to = gl.load(order + to, mask=is_pair, other=0)
            a = gl.zeros([HALF, BLOCK], gl.float32, layout)
            b = gl.zeros([HALF, BLOCK], gl.float32, layout)
            for step in range(STEPS):
                at = filled % STAGES
                mbarrier.wait(ready.index(at), filled // STAGES & 1)
                fence_async_shared()  # rows were not written by the copy engine
                own = tokens.index(at).slice(PART * HALF, HALF)
                group = groups.index(at).slice(PART * HALF, HALF).load(of_row)
                product, factor = _add(a, own, weights.index(2 * at), group, scales + step)
                a += product * factor[:, None]
                product, factor = _add(
                    b, own, weights.index(2 * at + 1), group, scales + (SECOND + step)
                )
                mbarrier.arrive(free.index(at))
                b += product * factor[:, None]
                filled += 1
            column = gl.arange(0, BLOCK, gl.SliceLayout(0, stored))
            out = y + to.to(gl.int64)[:, None] * OUT + column[None, :]
            if GATED:
                made = (silu(a) * b).to(gl.bfloat16).to(gl.float32)  # as if written in between
                size = token_scale(made, 1)
                pair = first + gl.arange(0, HALF, of_row)
                gl.store(y_scale + block * y_group_stride + pair, size, mask=pair < end)
                a = gl.convert_layout(to_e4m3(made / size[:, None]), stored)
                gl.store(out + block * BLOCK, a, mask=is_pair[:, None])
            else:
                out += block * (2 * BLOCK)
                a = gl.convert_layout(a.to(y.dtype.element_ty), stored)
                gl.store(out, a, mask=is_pair[:, None])
                b = gl.convert_layout(b.to(y.dtype.element_ty), stored)
                gl.store(out + BLOCK, b, mask=is_pair[:, None])
        else:
            for _ in range(STEPS):
                at = filled % STAGES
                mbarrier.wait(ready.index(at), filled // STAGES & 1)
                mbarrier.arrive(free.index(at))
                filled += 1
        expert, first, end = following


@gluon.jit(do_not_specialize=["x_group_stride", "y_group_stride"])
def _prompt_kernel(
    x,  # float8: [n, SIZE] if GATED, else [pairs, SIZE], those of an expert side by side
    x_scale,  # of each row and group
    weight,  # [E * ROWS, SIZE] float8, in tiles [BLOCK, BLOCK]
    scale,  # [E, ROWS / BLOCK, SIZE / BLOCK]
    order,  # [pairs] int32, those of an expert side by side
    tiles,  # as _tiles_kernel
    y,  # [pairs, OUT]: float8 in that order if GATED, else by number
    y_scale,  # written if GATED
    x_group_stride,
    y_group_stride,
    SIZE: gl.constexpr,
    ROWS: gl.constexpr,  # 2 OUT if GATED, else OUT
    TOP_K: gl.constexpr,
    GATED: gl.constexpr,
    STAGES: gl.constexpr,
    TILE: gl.constexpr,
):
    """Raw products if not GATED; else ``silu(gate) * up``, rounded in groups of BLOCK."""
    BLOCK: gl.constexpr = weight.block_type.shape[0]
    STEPS: gl.constexpr = SIZE // BLOCK
    COLUMNS: gl.constexpr = ROWS // (2 * BLOCK)
    linear: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    tokens = gl.allocate_shared_memory(weight.dtype, [STAGES, TILE, BLOCK], weight.layout)
    weights = gl.allocate_shared_memory(weight.dtype, [2 * STAGES, BLOCK, BLOCK], weight.layout)
    groups = gl.allocate_shared_memory(gl.float32, [STAGES, TILE], linear)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1 + 128)  # the copy engine; threads that copy
        mbarrier.init(free.index(i), count=2)
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    scale, order, tiles, y, y_scale, y_group_stride, tokens, groups, weights,
                    ready, free, 0, STEPS, COLUMNS, GATED,
                ),
            ),
            (
                _consume,
                (
                    scale, order, tiles, y, y_scale, y_group_stride, tokens, groups, weights,
                    ready, free, 1, STEPS, COLUMNS, GATED,
                ),
            ),
            (
                _produce,
                (
                    x, x_scale, x_group_stride, weight, order, tiles, tokens, groups, weights,
                    ready, free, STEPS, COLUMNS, ROWS, TOP_K, GATED,
                ),
            ),
        ],
        [4, 4],
        [216, 72],
    )  # fmt: skip


@cache
def _layout() -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([BLOCK, BLOCK], gl.float8e4nv)


def supports(up: Stack, down: Stack) -> bool:
    """Whether this file's kernel can be used: matrices must be cut into whole blocks."""
    stacks, (_, size, width) = (up, down), down.weight.shape
    blocks = all(each.block == BLOCK and each.inputs == GROUPED for each in stacks)
    whole = size % (2 * BLOCK) == 0 and width % BLOCK == 0
    return blocks and whole and capability(down.weight.device)[0] == HOPPER


def gated_experts(x: Operand, up: Stack, down: Stack, place: Sorted) -> Tensor:
    """x [n, size] bfloat16, or rounded -> what the experts of all pairs make, [pairs, size], by
    number."""
    assert up.rounding is not None and down.rounding is not None
    pairs, (count, size, width), device = len(place.order), down.weight.shape, down.weight.device
    tiles = torch.empty(1 + 3 * (cdiv(pairs, TILE) + count), dtype=torch.int32, device=device)
    _tiles_kernel[(count,)](
        place.ends, tiles, EXPERTS=count, PADDED=next_power_of_2(count), TILE=TILE, num_warps=4
    )
    made = empty_rounded(pairs, width, down.rounding, device)
    _launch(rounded(x, up.rounding), up, place.order, tiles, made)
    y = torch.empty(pairs, size, dtype=torch.bfloat16, device=device)
    _launch(made, down, place.order, tiles, y)
    return y


def _launch(x: Rounded, stack: Stack, order: Tensor, tiles: Tensor, y: Tensor | Rounded) -> None:
    (count, rows, size), gated = stack.weight.shape, isinstance(y, Rounded)
    out, own = (y.values, y) if gated else (y, x)
    weight = stack.weight.view(count * rows, size)
    _prompt_kernel[(PROCESSORS,)](
        *(x.values, x.scale),
        TensorDescriptor(weight, list(weight.shape), [size, 1], [BLOCK, BLOCK], _layout()),
        *(stack.scale, order, tiles, out, own.scale, x.scale.stride(1), own.scale.stride(1)),
        SIZE=size,
        ROWS=rows,
        TOP_K=len(order) // len(x.values),
        GATED=gated,
        STAGES=STAGES,
        TILE=TILE,
        num_warps=4,
    )
