"""Verification and folds by the recurrence itself: bits that do not depend on how a token came.

A program is one warp with a tile of channels of one request. It walks over the journal, row by
row; a request that folds stores the state there. Then it walks over the tree: from the root along
the path to each leaf, and back to the state after the root, which is in shared memory; a node's
output is formed on the first path that it is on. Each row's inputs are asked for one row ahead.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mamba_eagle.kernels.gpu import overlapping
from mamba_eagle.kernels.recurrence.gluon_step import (
    LOG2_E,
    advance,
    as_loaded,
    loads_layout,
    numbers_per_load,
    output,
    tile_layout,
)
from mamba_eagle.kernels.tree_verify.layout import Folds, RowBuffers, Sizes, TreeLayout
from mamba_eagle.kernels.triton_math import previous_done


@gluon.jit
def _row(inputs, row, BY: gl.constexpr):
    """x [TILE], B as loaded and dt of a row. inputs: pointers to those of row 0; BY: from one row
    to the next."""
    x_at, B_at, dt_at = inputs
    row = row.to(gl.int32)
    return gl.load(x_at + row * BY[0]), gl.load(B_at + row * BY[1]), gl.load(dt_at + row * BY[2])


@gluon.jit
def _journal_row(journal, k, length, behind):
    """Id of the journal's row k; behind its end ``behind``."""
    return gl.load(journal + k, mask=k < length, other=behind)


@gluon.jit
def _after_journal(S, inputs, journal, length, behind, rate, BY: gl.constexpr):
    """The state after the journal; and the inputs of the row ``behind``, which follows it."""
    x, B, step = _row(inputs, _journal_row(journal, 0, length, behind), BY)
    row = _journal_row(journal, 1, length, behind)
    for k in range(length):
        after = _journal_row(journal, k + 2, length, behind)
        next_x, next_B, next_step = _row(inputs, row, BY)
        S = advance(S, x, B, step, rate)
        x, B, step, row = next_x, next_B, next_step, after
    return S, x, B, step


@gluon.jit
def _lowest(mask):
    """The lowest bit that is set in an integer; negative if none is."""
    alone = (mask & -mask).to(gl.float32)
    return ((alone.to(gl.int32, bitcast=True) >> 23) & 255) - 127


@gluon.jit
def bit(node, BITS: gl.constexpr):
    """The bit of a node in masks of BITS."""
    return gl.full([], 1, BITS) << node.to(BITS)


@gluon.jit
def leaves_of(ancestors, T, BITS: gl.constexpr, WARPS: gl.constexpr):
    """Nodes without children, as bits."""
    NODES: gl.constexpr = BITS.primitive_bitwidth
    node = gl.arange(0, NODES, gl.BlockedLayout([NODES // 32], [32], [WARPS], [0]))
    own = gl.full([NODES], 1, BITS, node.type.layout) << node.to(BITS)
    bits = gl.load(ancestors + node, mask=node < T, other=0).to(BITS)
    return ~gl.reduce_or(gl.where(node < T, bits & ~own, own), 0)


@gluon.jit
def next_node(ancestors, path, leaves, BITS: gl.constexpr):
    """The next node of the walk, or a negative number; what is left of its path and of the leaves;
    whether its path begins."""
    begins = path == 0
    leaf = gl.maximum(_lowest(leaves), 0)
    whole = gl.load(ancestors + leaf, mask=begins & (leaves != 0), other=0).to(BITS)
    path = gl.where(begins, whole & -2, path)  # without the root
    leaves = gl.where(begins, leaves & (leaves - 1), leaves)
    return _lowest(path), path & (path - 1), leaves, begins


@gluon.jit(do_not_specialize=["T", "W", "M"])
def _verify_kernel(
    xB,  # [R, W, H*P + G*N]
    dt,  # [R, W, H]
    C,  # [b, T, G*N]
    A,  # [H]
    D,  # [H]
    state,  # [slots, H, P, N]
    y,  # [b, T, H*P]
    slots,
    state_slots,
    journal,  # [b, M]
    journal_len,
    rows,  # [b, T]
    ancestors,  # [b, T]
    fold,
    T,
    W,
    M,
    state_stride,
    H: gl.constexpr,
    P: gl.constexpr,
    G: gl.constexpr,
    N: gl.constexpr,
    TILE: gl.constexpr,
    BITS: gl.constexpr,  # integers with a bit for each node; None: one node
    OVERLAP: gl.constexpr,
):
    WIDTH: gl.constexpr = H * P + G * N
    PER_LOAD: gl.constexpr = numbers_per_load(xB.dtype.element_ty)
    BY: gl.constexpr = (WIDTH, WIDTH // PER_LOAD, H)
    layout: gl.constexpr = tile_layout(TILE, 1)
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [1, 0])
    number = gl.arange(0, N // PER_LOAD, loads_layout(layout, PER_LOAD))
    first = gl.program_id(0) * TILE
    request = gl.program_id(1)
    head = first // P
    group = head // (H // G)
    channel = first + gl.arange(0, TILE, gl.SliceLayout(1, layout))
    n = gl.arange(0, N, gl.SliceLayout(0, layout))

    # what the previous kernel does not write
    state_slot = gl.load(state_slots + request).to(gl.int64)
    slot = gl.load(slots + request).to(gl.int64)
    length = gl.load(journal_len + request).to(gl.int32)
    rows += request * T
    root_row = gl.load(rows)
    state += state_slot * state_stride
    in_state = channel[:, None] * N + n[None, :]
    S = gl.load(state + in_state)
    rate = gl.load(A + head) * LOG2_E
    skip = gl.load(D + head)
    previous_done(OVERLAP)

    B_at = as_loaded(xB + slot * W * WIDTH + H * P + group * N, PER_LOAD) + number
    inputs = (xB + slot * W * WIDTH + channel, B_at, dt + slot * W * H + head)
    C_at = as_loaded(C + request * T * (G * N) + group * N, PER_LOAD) + number
    y += request.to(gl.int64) * T * (H * P)
    S, x, B, step = _after_journal(S, inputs, journal + request * M, length, root_row, rate, BY)
    if fold is not None:  # noqa: SIM102 - known when compiled; the other one is not
        if (gl.load(fold + request) != 0) & (length > 0):
            gl.store(state + in_state, S)
    S = advance(S, x, B, step, rate)
    gl.store(y + channel, output(S, gl.load(C_at), x, skip).to(y.dtype.element_ty))

    if BITS is not None:
        after_root = gl.allocate_shared_memory(gl.float32, [TILE, N], SHARED)
        after_root.store(S)
        ancestors += request * T
        done = gl.full([], 1, BITS)
        leaves = leaves_of(ancestors, T, BITS, 1)
        node, path, leaves, begins = next_node(ancestors, done - 1, leaves, BITS)
        x, B, step = _row(inputs, gl.load(rows + node), BY)
        C_node = gl.load(C_at + node * (G * N // PER_LOAD))
        while node >= 0:
            S = after_root.load(layout)
            begins = node < 0
            while not begins:
                later, path, leaves, begins = next_node(ancestors, path, leaves, BITS)
                asked = gl.maximum(later, 0)
                next_x, next_B, next_step = _row(inputs, gl.load(rows + asked), BY)
                next_C = gl.load(C_at + asked * (G * N // PER_LOAD))
                S = advance(S, x, B, step, rate)
                if ((done >> node.to(BITS)) & 1) == 0:
                    out = output(S, C_node, x, skip)
                    gl.store(y + node * (H * P) + channel, out.to(y.dtype.element_ty))
                done |= bit(node, BITS)
                x, B, step, C_node, node = next_x, next_B, next_step, next_C, later


@gluon.jit(do_not_specialize=["R", "W", "S_slots", "M"])
def _fold_kernel(
    xB,  # [layers, R, W, H*P + G*N]
    dt,  # [layers, R, W, H]
    A,  # [layers, H]
    state,  # [layers, S_slots, H, P, N]
    slots,
    state_slots,
    journal,  # [b, M]
    lengths,
    R,
    W,
    S_slots,
    M,
    H: gl.constexpr,
    P: gl.constexpr,
    G: gl.constexpr,
    N: gl.constexpr,
    TILE: gl.constexpr,
):
    WIDTH: gl.constexpr = H * P + G * N
    PER_LOAD: gl.constexpr = numbers_per_load(xB.dtype.element_ty)
    BY: gl.constexpr = (WIDTH, WIDTH // PER_LOAD, H)
    layout: gl.constexpr = tile_layout(TILE, 1)
    number = gl.arange(0, N // PER_LOAD, loads_layout(layout, PER_LOAD))
    first = gl.program_id(0) * TILE
    layer = gl.program_id(1).to(gl.int64)
    request = gl.program_id(2)
    length = gl.load(lengths + request).to(gl.int32)
    if length > 0:
        head = first // P
        channel = first + gl.arange(0, TILE, gl.SliceLayout(1, layout))
        n = gl.arange(0, N, gl.SliceLayout(0, layout))
        first_row = (layer * R + gl.load(slots + request)) * W
        xB += first_row * WIDTH
        B_at = as_loaded(xB + H * P + head // (H // G) * N, PER_LOAD) + number
        inputs = (xB + channel, B_at, dt + first_row * H + head)
        state += (layer * S_slots + gl.load(state_slots + request)) * (H * P * N)
        in_state = channel[:, None] * N + n[None, :]
        rate = gl.load(A + layer * H + head) * LOG2_E
        S = gl.load(state + in_state)
        journal += request * M
        S, x, B, step = _after_journal(S, inputs, journal, length, gl.load(journal), rate, BY)
        gl.store(state + in_state, S)


def check_sizes(sizes: Sizes, state: Tensor) -> None:
    """Raises: ValueError for sizes and states that the kernels do not take."""
    H, P, G, N = sizes
    if P % 16 or N & (N - 1) or not 16 <= N <= 256:
        raise ValueError(
            f"{P} channels per head, {N} numbers per channel: heads must be a multiple of 16, and "
            "states 16 to 256, a power of two"
        )
    if state.dtype != torch.float32:
        raise ValueError(f"a state in {state.dtype}: exact bits need float32")


def mask_type(nodes: int) -> gl.dtype | None:
    """Integers with a bit for each node of a tree; None for one node, which needs none."""
    if nodes == 1:
        return None
    return gl.int32 if nodes < 32 else gl.int64


def choose_tile(channels: int, state_size: int) -> int:
    """Channels per program, of all ``channels`` of a launch: 64 numbers of the state in a thread
    where there are enough programs to fill a GPU, else 32."""
    tile = 16 if channels >= 32768 else 8
    return tile if state_size <= 128 else tile // 2


def tree_verify(
    buffers: RowBuffers,
    C: Tensor,
    A: Tensor,
    D: Tensor,
    state: Tensor,
    step: TreeLayout,
    sizes: Sizes,
    tile: int | None = None,
) -> Tensor:
    """tree_verify/triton.py's, from dt and A instead of L, with a state in float32.

    Args:
        A: [H] float32, negative.
        tile: channels per program, 4, 8 or 16; None: by measurement. Bits do not depend on it.
    Raises: ValueError for more than 64 nodes, and as ``check_sizes``.
    """
    check_sizes(sizes, state)
    (b, T), (H, P, G, N) = step.rows.shape, sizes
    if T > 64:
        raise ValueError(f"a tree of {T} nodes: at most 64 are supported")
    y = torch.empty(b * T, H * P, dtype=buffers.xB.dtype, device=C.device)
    tile = tile or choose_tile(b * H * P, N)
    _verify_kernel[(H * P // tile, b)](
        buffers.xB,
        buffers.dt,
        C,
        A,
        D,
        state,
        y,
        *step[:5],  # up to the rows
        step.ancestors,
        step.fold,
        T,
        buffers.xB.shape[1],
        step.journal.shape[1],
        state.stride(0),
        H=H,
        P=P,
        G=G,
        N=N,
        TILE=tile,
        BITS=mask_type(T),
        num_warps=1,
        **overlapping(C.device),
    )
    return y


def fold_journals(
    buffers: RowBuffers, A: Tensor, state: Tensor, folds: Folds, sizes: Sizes
) -> None:
    """tree_verify/triton_fold.py's, from dt and A instead of L. A: [layers, H] float32.

    Raises: ValueError as ``check_sizes``.
    """
    check_sizes(sizes, state)
    layers, R, W, _ = buffers.xB.shape
    H, P, G, N = sizes
    b, M = folds.journal.shape
    tile = choose_tile(layers * b * H * P, N)
    _fold_kernel[(H * P // tile, layers, b)](
        buffers.xB,
        buffers.dt,
        A,
        state,
        *folds[:4],
        R,
        W,
        state.shape[1],
        M,
        H=H,
        P=P,
        G=G,
        N=N,
        TILE=tile,
        num_warps=1,
    )
