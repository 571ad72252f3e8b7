"""Attention of prompts on Hopper: products by warp groups, keys and values by the copy engine.

A program has a tile of queries of one head: two warp groups with half of it each, and a warp that
copies keys and values for both. While the tensor cores multiply a tile's weights with its values,
the next tile's scores become weights (arXiv 2407.08608, section 3.2); the groups meet only where a
stage is filled again, so one's products run beside the other's exponentials.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from mamba_eagle.kernels.gpu import capability

HOPPER = 9
HEAD_DIMS = (64, 128, 256)
# Triton 3.7 gave it another name
_copy = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared


ROWS = 64  # queries of a warp group
TILE = 2 * ROWS  # and of a program
STAGES = 2  # tiles of keys, and of values, in shared memory
LARGEST_TILE = 128  # keys


def keys_of_tile(head_dim: int) -> int:
    return 64 if head_dim > 128 else LARGEST_TILE


@gluon.jit
def _fill(source, ring, ready, tile, tiles, first, column):
    """Begin to copy a tile of keys or values, if there is one of this number."""
    KEYS: gl.constexpr = ring.shape[1]
    BYTES: gl.constexpr = KEYS * ring.shape[2] * ring.dtype.primitive_bitwidth // 8
    at = tile % ring.shape[0]
    mbarrier.expect(ready.index(at), BYTES, pred=tile < tiles)
    _copy(source, [first + tile * KEYS, column], ready.index(at), ring.index(at), pred=tile < tiles)


@gluon.jit
def _filled(ring, ready, tile):
    """A tile, once it has been copied."""
    mbarrier.wait(ready.index(tile % ring.shape[0]), tile // ring.shape[0] & 1)
    return ring.index(tile % ring.shape[0])


@gluon.jit
def _scores(q, keys, layout: gl.constexpr):
    """[rows, keys], under way."""
    ROWS: gl.constexpr = q.shape[0]
    KEYS: gl.constexpr = keys.shape[0]
    zeros = gl.zeros([ROWS, KEYS], gl.float32, layout)
    return warpgroup_mma(q, keys.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def _weights(scores, largest, limit, scale, MASKED: gl.constexpr):
    """Of keys 0 … limit, relative to the largest score so far: that score, and the weights."""
    if MASKED:
        KEYS: gl.constexpr = scores.shape[1]
        layout: gl.constexpr = gl.SliceLayout(0, scores.type.layout)
        column = gl.arange(0, KEYS, layout)
        scores = gl.where(column[None, :] <= limit[:, None], scores, float("-inf"))
    largest = gl.maximum(largest, gl.max(scores, 1) * scale)
    return largest, gl.exp2(scores * scale - largest[:, None])


@gluon.jit
def _tiles(
    q, k_ring, v_ring, k_ready, v_ready, k_free, v_free,
    state, limit, begin, end, scale, MASKED: gl.constexpr,
):  # fmt: skip
    """From a tile's weights to those of the next, for tiles begin … end - 1."""
    largest, total, p, acc = state
    KEYS: gl.constexpr = k_ring.shape[1]
    STAGES: gl.constexpr = k_ring.shape[0]
    s_layout: gl.constexpr = largest.type.layout.parent
    row_layout: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    p_layout: gl.constexpr = p.type.layout
    for tile in range(begin, end):
        scores = _scores(q, _filled(k_ring, k_ready, tile + 1), s_layout)
        acc = warpgroup_mma(p, _filled(v_ring, v_ready, tile), acc, is_async=True)
        scores = warpgroup_mma_wait(1, deps=[scores])
        mbarrier.arrive(k_free.index((tile + 1) % STAGES))
        now, weights = _weights(scores, largest, limit - (tile + 1) * KEYS, scale, MASKED)
        shrink = gl.exp2(largest - now)
        total = total * shrink + gl.sum(weights, 1)
        largest = now
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(v_free.index(tile % STAGES))
        acc *= gl.convert_layout(shrink, row_layout)[:, None]
        p = gl.convert_layout(weights.to(p.dtype), p_layout)
    return largest, total, p, acc


@gluon.jit
def _consume(
    q, q_ready, k_ring, v_ring, k_ready, v_ready, k_free, v_free, out,
    row, rows, position, tiles, scale, out_stride,
):  # fmt: skip
    """Queries ``row`` … ``row + rows - 1``, the first of which sees keys 0 … position."""
    ROWS: gl.constexpr = q.shape[0]
    D: gl.constexpr = q.shape[1]
    KEYS: gl.constexpr = k_ring.shape[1]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, KEYS, 16])
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    # queries past the last one see what the last one does
    limit = position + gl.minimum(gl.arange(0, ROWS, gl.SliceLayout(1, s_layout)), rows - 1)

    mbarrier.wait(q_ready, 0)
    scores = warpgroup_mma_wait(0, deps=[_scores(q, _filled(k_ring, k_ready, 0), s_layout)])
    mbarrier.arrive(k_free.index(0))
    lowest = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, s_layout))
    largest, weights = _weights(scores, lowest, limit, scale, True)
    p = gl.convert_layout(weights.to(q.dtype), p_layout)
    state = largest, gl.sum(weights, 1), p, gl.zeros([ROWS, D], gl.float32, layout)
    # tiles after the first that all rows see whole; without queries ``position`` is past the end
    whole = gl.maximum(gl.minimum((position + 1) // KEYS, tiles) - 1, 0)
    state = _tiles(
        q, k_ring, v_ring, k_ready, v_ready, k_free, v_free,
        state, limit, 0, whole, scale, False,
    )  # fmt: skip
    state = _tiles(
        q, k_ring, v_ring, k_ready, v_ready, k_free, v_free,
        state, limit, whole, tiles - 1, scale, True,
    )  # fmt: skip
    _, total, p, acc = state
    acc = warpgroup_mma(p, _filled(v_ring, v_ready, tiles - 1), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    acc *= gl.convert_layout(1.0 / total, gl.SliceLayout(1, layout))[:, None]
    i = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    d = gl.arange(0, D, gl.SliceLayout(0, layout))
    at = (row + i).to(gl.int64)[:, None] * out_stride + d[None, :]
    gl.store(out + at, acc.to(out.dtype.element_ty), mask=(i < rows)[:, None])


@gluon.jit
def _produce(k_ring, v_ring, k_ready, v_ready, k_free, v_free, keys, values, tiles, first, column):
    STAGES: gl.constexpr = k_ring.shape[0]
    _fill(keys, k_ring, k_ready, 0, tiles, first, column)
    for tile in range(tiles):
        after = tile + 1  # keys are needed a tile ahead of values
        # the first wait for a stage is over at once
        mbarrier.wait(k_free.index(after % STAGES), 1 - (after // STAGES & 1))
        _fill(keys, k_ring, k_ready, after, tiles, first, column)
        mbarrier.wait(v_free.index(tile % STAGES), 1 - (tile // STAGES & 1))
        _fill(values, v_ring, v_ready, tile, tiles, first, column)


@gluon.jit
def _prompt_kernel(
    q,  # [n, heads * D], in tiles [ROWS, D]
    keys,  # [S, kv_heads * D], in tiles [KEYS, D]
    values,
    tiles,  # [tiles, 4]: first key of the request, first query, queries, position of the first
    out,  # [n, heads, D]
    scale,  # times log2 e
    HEADS: gl.constexpr,
    GROUP: gl.constexpr,  # query heads of a key head
    STAGES: gl.constexpr,
):
    ROWS: gl.constexpr = q.block_type.shape[0]
    KEYS: gl.constexpr = keys.block_type.shape[0]
    D: gl.constexpr = q.block_type.shape[1]
    PARTS: gl.constexpr = 2  # warp groups
    dtype: gl.constexpr = q.dtype
    head = gl.program_id(0) % HEADS
    column = head // GROUP * D
    tiles += gl.program_id(0) // HEADS * 4
    first, row = gl.load(tiles), gl.load(tiles + 1)
    rows, position = gl.load(tiles + 2), gl.load(tiles + 3)
    count = gl.cdiv(position + rows, KEYS)

    q_tiles = gl.allocate_shared_memory(dtype, [PARTS, ROWS, D], q.layout)
    k_ring = gl.allocate_shared_memory(dtype, [STAGES, KEYS, D], keys.layout)
    v_ring = gl.allocate_shared_memory(dtype, [STAGES, KEYS, D], values.layout)
    q_ready = gl.allocate_shared_memory(gl.int64, [PARTS, 1], mbarrier.MBarrierLayout())
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(PARTS):
        mbarrier.init(q_ready.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(i), count=1)
        mbarrier.init(v_ready.index(i), count=1)
        mbarrier.init(k_free.index(i), count=PARTS)
        mbarrier.init(v_free.index(i), count=PARTS)
    for i in gl.static_range(PARTS):
        mbarrier.expect(q_ready.index(i), q.block_type.nbytes)
        _copy(q, [row + i * ROWS, head * D], q_ready.index(i), q_tiles.index(i))
    out += head * D
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    q_tiles.index(0), q_ready.index(0), k_ring, v_ring, k_ready, v_ready,
                    k_free, v_free, out, row, rows, position, count, scale, HEADS * D,
                ),
            ),
            (
                _consume,
                (
                    q_tiles.index(1), q_ready.index(1), k_ring, v_ring, k_ready, v_ready,
                    k_free, v_free, out, row + ROWS, rows - ROWS, position + ROWS, count, scale,
                    HEADS * D,
                ),
            ),
            (
                _produce,
                (
                    k_ring, v_ring, k_ready, v_ready, k_free, v_free, keys, values,
                    count, first, column,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


@cache
def _layout(rows: int, head_dim: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    kind = gl.bfloat16 if dtype == torch.bfloat16 else gl.float16
    return gl.NVMMASharedLayout.get_default_for([rows, head_dim], kind)


def _described(x: Tensor, rows: int) -> TensorDescriptor:
    """[n, heads, D] as a matrix [n, heads * D], read in tiles [rows, D]."""
    n, heads, D = x.shape
    layout = _layout(rows, D, x.dtype)
    return TensorDescriptor(x, [n, heads * D], [x.stride(0), 1], [rows, D], layout)


def supports(head_dim: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this file's kernel can be used for such queries and keys."""
    sixteen_bits = dtype in (torch.bfloat16, torch.float16)
    return capability(device)[0] == HOPPER and sixteen_bits and head_dim in HEAD_DIMS


def prompt_attention(
    q: Tensor, keys: Tensor, values: Tensor, tiles: Tensor, scale: float
) -> Tensor:
    """Tokens of prompt chunks attend to themselves and to all before them in their requests.

    Args:
        q: [n, heads, D], the chunks concatenated; heads contiguous, rows any stride of 16 bytes.
        keys, values: [S, kv_heads, D], contiguous: those of each request, one after the other. Up
            to LARGEST_TILE after a request's last must be finite.
        tiles: [·, 4] int32, contiguous: ``prompt_tiles`` of TILE, with a request's first key as its
            slot.
    Returns: [n, heads, D], dtype of q.
    """
    n, heads, D = q.shape
    q = q if q.stride(1) == D and q.stride(2) == 1 else q.contiguous()
    out = torch.empty(n, heads, D, dtype=q.dtype, device=q.device)
    size = keys_of_tile(D)
    _prompt_kernel[(len(tiles) * heads,)](
        *(_described(q, ROWS), _described(keys, size), _described(values, size)),
        *(tiles, out, scale * math.log2(math.e)),
        HEADS=heads,
        GROUP=heads // keys.shape[1],
        STAGES=STAGES,
        num_warps=4,
    )
    return out
