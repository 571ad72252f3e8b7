"""Verification and its folds by the recurrence itself: bits that do not depend on how a token came.

A program has the channels of a head, or some of them, of one request. It prepares the rows of the
journal and the tree, then walks over the journal; a request that folds stores the state there. Then
it walks over the tree: from the root along the path to each leaf, and back to the state after the
root for the next one; a node's output is formed on the first path that it is on.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mamba_eagle.kernels.gpu import next_power_of_2, overlapping
from mamba_eagle.kernels.recurrence.gluon_step import (
    LOG2_E,
    PLAIN,
    REGISTERS,
    advance,
    barrier,
    in_state,
    prepare,
    read_layout,
    read_rows,
    store_numbers,
    store_tiles,
    tile_feed,
    tile_layout,
    write_output,
)
from mamba_eagle.kernels.recurrence.layout import Tiles, check_sizes, choose_tiles
from mamba_eagle.kernels.tree_verify.layout import RowBuffers, Sizes, TreeLayout
from mamba_eagle.kernels.triton_math import previous_done

MAX_ROWS = 64  # that are prepared at a time


@gluon.jit
def _prepare_B(buffer, tables, B, WIDTH: gl.constexpr, num_warps: gl.constexpr):
    """B of the rows [journal ; tree] in float32. B: of row 0."""
    layout: gl.constexpr = read_layout(buffer.shape[1], num_warps)
    row, valid = _rows(tables, buffer.shape[0], layout)
    store_numbers(buffer, read_rows(buffer, B, row, valid, WIDTH, num_warps))


@gluon.jit
def _prepare_C(buffer, T, C, WIDTH: gl.constexpr, num_warps: gl.constexpr):
    """C of the nodes."""
    layout: gl.constexpr = read_layout(buffer.shape[1], num_warps)
    node = gl.arange(0, buffer.shape[0], gl.SliceLayout(1, layout))
    store_numbers(buffer, read_rows(buffer, C, node, node < T, WIDTH, num_warps))


@gluon.jit
def _prepare_x(
    feed, tables, x, dt, rate, WIDTH: gl.constexpr, H: gl.constexpr, num_warps: gl.constexpr
):
    """What comes of x and dt. x: of row 0, at the tile's first channel; dt: of row 0."""
    layout: gl.constexpr = read_layout(feed[0].shape[1], num_warps)
    row, valid = _rows(tables, feed[0].shape[0], layout)
    step = gl.load(dt + row * H, mask=valid, other=0.0)
    own = read_rows(feed[0], x, row, valid, WIDTH, num_warps)
    prepare(feed, own, step[:, None], rate)
    node = gl.arange(0, feed[1].shape[0], gl.SliceLayout(1, layout))
    is_node = node < tables[3]
    row = gl.load(tables[1] + node, mask=is_node, other=0).to(gl.int32)
    feed[1].store(read_rows(feed[1], x, row, is_node, WIDTH, num_warps).to(gl.float32))


@gluon.jit
def _rows(tables, COUNT: gl.constexpr, layout: gl.constexpr):
    """Ids of the rows [journal ; tree], and which there are: [COUNT], by rows of ``layout``."""
    journal, rows, length, T = tables
    k = gl.arange(0, COUNT, gl.SliceLayout(1, layout))
    valid = k < length + T
    row = gl.load(journal + k, mask=k < length, other=0)
    row += gl.load(rows + k - length, mask=valid & (k >= length), other=0)
    return row.to(gl.int32), valid


@gluon.jit
def _lowest(mask):
    """The lowest bit that is set in an integer; negative if none is."""
    alone = (mask & -mask).to(gl.float32)
    return ((alone.to(gl.int32, bitcast=True) >> 23) & 255) - 127


@gluon.jit
def leaves_of(ancestors, T, BITS: gl.constexpr, num_warps: gl.constexpr):
    """Nodes without children, as bits."""
    NODES: gl.constexpr = BITS.primitive_bitwidth
    node = gl.arange(0, NODES, gl.BlockedLayout([NODES // 32], [32], [num_warps], [0]))
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


@gluon.jit
def walk_tree(
    S, ancestors, T, given, BITS: gl.constexpr, NODE: gl.constexpr, num_warps: gl.constexpr
):
    """From the state after the root along the path to each leaf.

    S: tiles of a head, the first of which waits for the next path in shared memory; ancestors: the
    request's. NODE(S, given, node, new) returns the state after a node, and writes the output of
    one that is on no path before."""
    banks: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [1, 0])
    after_root = gl.allocate_shared_memory(gl.float32, S[0].shape, banks, S[0])
    rest_after_root = S[1:]
    done = gl.full([], 1, BITS)
    leaves = leaves_of(ancestors, T, BITS, num_warps)
    node, path, leaves, begins = next_node(ancestors, done - 1, leaves, BITS)
    while node >= 0:
        S = (after_root.load(S[0].type.layout),) + rest_after_root
        begins = node < 0
        while not begins:
            later, path, leaves, begins = next_node(ancestors, path, leaves, BITS)
            bit = gl.full([], 1, BITS) << node.to(BITS)
            S = NODE(S, given, node, (done & bit) == 0)
            done |= bit
            node = later


@gluon.jit
def _advance(S, feeds, row):
    after = ()
    for i in gl.static_range(len(S)):
        after += (advance(S[i], feeds[i], row),)
    return after


@gluon.jit
def _node(S, given, node, new):
    feeds, nodes_at, skip, y, width = given
    S = _advance(S, feeds, nodes_at + node)
    if new:
        for i in gl.static_range(len(S)):
            write_output(S[i], feeds[i], node, skip, y + node * width + i * S[0].shape[0])
    return S


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
    REST: gl.constexpr,  # channels of a second tile; 0: none
    J: gl.constexpr,  # rows that are prepared at a time, at least T
    LONG: gl.constexpr,  # whether there may be more of them
    NODES: gl.constexpr,  # T, padded
    BITS: gl.constexpr,  # integers with a bit for each node; None: one node
    OVERLAP: gl.constexpr,
    num_warps: gl.constexpr,
):
    WIDTH: gl.constexpr = H * P + G * N
    layout: gl.constexpr = tile_layout(TILE, num_warps)
    first = gl.program_id(0) * (TILE + REST)
    request = gl.program_id(1)
    head = first // P
    group = head // (H // G)

    # what the previous kernel does not write
    slot = gl.load(slots + request).to(gl.int64)
    length = gl.load(journal_len + request).to(gl.int32)
    folding = False
    if fold is not None:
        folding = (gl.load(fold + request) != 0) & (length > 0)
    state += gl.load(state_slots + request).to(gl.int64) * state_stride + first * N
    S = (gl.load(state + in_state(TILE, N, layout)),)
    if REST:
        S += (gl.load(state + TILE * N + in_state(REST, N, tile_layout(REST, num_warps))),)
    rate = gl.load(A + head) * LOG2_E
    skip = gl.load(D + head)
    previous_done(OVERLAP)

    x = xB + slot * W * WIDTH + first
    B = xB + slot * W * WIDTH + H * P + group * N
    dt += slot * W * H + head
    rows += request * T
    journal += request * M
    B_shared = gl.allocate_shared_memory(gl.float32, [J, N], PLAIN)
    C_shared = gl.allocate_shared_memory(gl.float32, [NODES, N], PLAIN)
    feeds = (tile_feed(J, NODES, TILE, B_shared, C_shared),)
    if REST:
        feeds += (tile_feed(J, NODES, REST, B_shared, C_shared),)
    _prepare_C(C_shared, T, C + request * T * (G * N) + group * N, G * N, num_warps)
    nodes_at = -1  # the root's row among those that are prepared
    while nodes_at < 0:
        tables = (journal, rows, length, T)
        _prepare_B(B_shared, tables, B, WIDTH, num_warps)
        for i in gl.static_range(len(feeds)):
            _prepare_x(feeds[i], tables, x + i * TILE, dt, rate, WIDTH, H, num_warps)
        barrier()
        count = gl.minimum(length, J) if LONG else length
        for k in range(count):
            S = _advance(S, feeds, k)
        nodes_at = gl.where(length + T > J, -1, count) if LONG else count
        if LONG:
            barrier()
            length -= count
            journal += count
    if folding:
        store_tiles(state, S)

    y += request.to(gl.int64) * T * (H * P) + first
    given = (feeds, nodes_at, skip, y, H * P)
    S = _node(S, given, 0, True)
    if BITS is not None:
        walk_tree(S, ancestors + request * T, T, given, BITS, _node, num_warps)


def tree_verify(
    buffers: RowBuffers,
    C: Tensor,
    A: Tensor,
    D: Tensor,
    state: Tensor,
    step: TreeLayout,
    sizes: Sizes,
    tiles: Tiles | None = None,
) -> Tensor:
    """tree_verify/triton.py's, from dt and A instead of L, with a state in float32.

    Args:
        A: [H] float32, negative.
        tiles: None: ``choose_tiles``. Bits do not depend on it.
    Raises: ValueError for more than 64 nodes, and as ``check_sizes``.
    """
    check_sizes(sizes, state)
    (b, T), (H, P, _, N) = step.rows.shape, sizes
    if T > 64:
        raise ValueError(f"a tree of {T} nodes: at most 64 are supported")
    y = torch.empty(b * T, H * P, dtype=buffers.xB.dtype, device=C.device)
    M, (tile, rest, warps) = step.journal.shape[1], tiles or choose_tiles(P, N)
    padded = max(16, next_power_of_2(T + M))
    masks = gl.int32 if T < 32 else gl.int64
    tables = (*step.up_to_rows, step.ancestors, step.fold)
    lengths = (T, buffers.xB.shape[1], M, state.stride(0))
    _verify_kernel[(H * P // (tile + rest), b)](
        *(buffers.xB, buffers.dt, C, A, D, state, y, *tables, *lengths),
        **sizes.constants,
        TILE=tile,
        REST=rest,
        J=min(padded, MAX_ROWS),
        LONG=padded > MAX_ROWS,
        NODES=next_power_of_2(T),
        BITS=None if T == 1 else masks,
        num_warps=warps,
        maxnreg=REGISTERS,
        **overlapping(C.device),
    )
    return y
