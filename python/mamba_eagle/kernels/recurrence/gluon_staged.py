"""gluon.py's verification with a head per program, for which all rows are prepared once.

There each warp widens B and C of a row for 16 channels, and finds the row's address. Here four
warps share the rows of a head: B and C in float32, dt · x and decays lie in shared memory before
the walk begins, so a row takes little more than its two operations for each number of the state.
Bits are the same. More rows than MAX_ROWS, and heads that are no two tiles, are left to gluon.py.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mamba_eagle.kernels.gpu import overlapping
from mamba_eagle.kernels.recurrence import gluon as by_warp
from mamba_eagle.kernels.recurrence.gluon import bit, leaves_of, mask_type, next_node
from mamba_eagle.kernels.recurrence.gluon_prompts import choose_config
from mamba_eagle.kernels.recurrence.gluon_step import (
    LOG2_E,
    barrier,
    decay_of,
    fed,
    output_of,
    shared_row,
    stepped,
    tile_layout,
)
from mamba_eagle.kernels.tree_verify.layout import RowBuffers, Sizes, TreeLayout
from mamba_eagle.kernels.triton_math import previous_done

MAX_ROWS = 64  # of the journal and the tree, padded
WARPS = gl.constexpr(4)


@gluon.constexpr_function
def _read(elements, warps):
    """16 bytes of 16-bit numbers a thread."""
    across = min(32, elements // 8)
    return gl.BlockedLayout([1, 8], [32 // across, across], [warps, 1], [1, 0])


@gluon.jit
def _rows(tables, COUNT: gl.constexpr, layout: gl.constexpr):
    """Ids of the rows [journal ; tree], and which there are: [COUNT], by rows of ``layout``."""
    journal, rows, length, T = tables
    k = gl.arange(0, COUNT, gl.SliceLayout(1, layout))
    in_tree = (k >= length) & (k < length + T)
    row = gl.load(journal + k, mask=k < length, other=0)
    row += gl.load(rows + k - length, mask=in_tree, other=0)
    return row.to(gl.int32), k < length + T


@gluon.jit
def _stage_x(to, tables, x, dt, rate, WIDTH: gl.constexpr, H: gl.constexpr):
    """dt · x of all rows, x of the nodes and decays for one tile, x being at its first channel."""
    dtx, x_nodes, decays = to
    layout: gl.constexpr = _read(dtx.shape[1], WARPS)
    channel = gl.arange(0, dtx.shape[1], gl.SliceLayout(0, layout))
    row, valid = _rows(tables, dtx.shape[0], layout)
    step = gl.load(dt + row * H, mask=valid, other=0.0)
    own = gl.load(x + (row * WIDTH)[:, None] + channel[None, :], mask=valid[:, None], other=0.0)
    dtx.store(fed(own, step[:, None]))
    decays.store(decay_of(step, rate)[:, None])
    node = gl.arange(0, x_nodes.shape[0], gl.SliceLayout(1, layout))
    is_node = node < tables[3]
    row = gl.load(tables[1] + node, mask=is_node, other=0).to(gl.int32)
    own = gl.load(x + (row * WIDTH)[:, None] + channel[None, :], mask=is_node[:, None], other=0.0)
    x_nodes.store(own.to(gl.float32))


@gluon.jit
def _stage_B_C(B_shared, C_shared, tables, B, C, WIDTH: gl.constexpr, C_WIDTH: gl.constexpr):
    """B of all rows and C of all nodes in float32."""
    layout: gl.constexpr = _read(B_shared.shape[1], WARPS)
    n = gl.arange(0, B_shared.shape[1], gl.SliceLayout(0, layout))
    row, valid = _rows(tables, B_shared.shape[0], layout)
    own = gl.load(B + (row * WIDTH)[:, None] + n[None, :], mask=valid[:, None], other=0.0)
    B_shared.store(own.to(gl.float32))
    node = gl.arange(0, C_shared.shape[0], gl.SliceLayout(1, layout))
    is_node = (node < tables[3])[:, None]
    own = gl.load(C + (node * C_WIDTH)[:, None] + n[None, :], mask=is_node, other=0.0)
    C_shared.store(own.to(gl.float32))


@gluon.jit
def _step(S, staged, B_shared, k):
    """S: of a tile; staged: its ``_stage_x``."""
    layout: gl.constexpr = S.type.layout
    by_channel: gl.constexpr = gl.SliceLayout(1, layout)
    B = shared_row(B_shared, k, gl.SliceLayout(0, layout))[None, :]
    decay = shared_row(staged[2], k, by_channel)
    return stepped(S, decay, shared_row(staged[0], k, by_channel), B)


@gluon.jit
def _write(S, staged, C_shared, node, skip, y):
    """The node's output. y: at the tile's first channel."""
    layout: gl.constexpr = S.type.layout
    by_channel: gl.constexpr = gl.SliceLayout(1, layout)
    C = shared_row(C_shared, node, gl.SliceLayout(0, layout))[None, :]
    out = output_of(S, C, shared_row(staged[1], node, by_channel), skip)
    gl.store(y + gl.arange(0, S.shape[0], by_channel), out.to(y.dtype.element_ty))


@gluon.jit
def _buffers(J: gl.constexpr, TP: gl.constexpr, TILE: gl.constexpr):
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    return (
        gl.allocate_shared_memory(gl.float32, [J, TILE], plain),
        gl.allocate_shared_memory(gl.float32, [TP, TILE], plain),
        gl.allocate_shared_memory(gl.float32, [J, 1], plain),
    )


@gluon.jit
def _in_state(TILE: gl.constexpr, N: gl.constexpr, layout: gl.constexpr):
    channel = gl.arange(0, TILE, gl.SliceLayout(1, layout))
    return channel[:, None] * N + gl.arange(0, N, gl.SliceLayout(0, layout))[None, :]


@gluon.jit(do_not_specialize=["T", "W", "M"])
def _staged_kernel(
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
    J: gl.constexpr,  # rows of the journal and the tree, padded
    TP: gl.constexpr,  # nodes, padded
    BITS: gl.constexpr,  # integers with a bit for each node; None: one node
    OVERLAP: gl.constexpr,
):
    WIDTH: gl.constexpr = H * P + G * N
    SECOND: gl.constexpr = REST if REST else TILE
    layout: gl.constexpr = tile_layout(TILE, WARPS)
    rest_layout: gl.constexpr = tile_layout(SECOND, WARPS)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    first = gl.program_id(0) * (TILE + REST)
    request = gl.program_id(1)
    head = first // P
    group = head // (H // G)

    # what the previous kernel does not write
    slot = gl.load(slots + request).to(gl.int64)
    length = gl.load(journal_len + request).to(gl.int32)
    state += gl.load(state_slots + request).to(gl.int64) * state_stride + first * N
    S = gl.load(state + _in_state(TILE, N, layout))
    S_rest = S
    if REST:
        S_rest = gl.load(state + TILE * N + _in_state(REST, N, rest_layout))
    rate = gl.load(A + head) * LOG2_E
    skip = gl.load(D + head)
    previous_done(OVERLAP)

    xB += slot * W * WIDTH
    dt += slot * W * H + head
    rows += request * T
    tables = (journal + request * M, rows, length, T)
    B_shared = gl.allocate_shared_memory(gl.float32, [J, N], plain)
    C_shared = gl.allocate_shared_memory(gl.float32, [TP, N], plain)
    of_group = (xB + H * P + group * N, C + request * T * (G * N) + group * N)
    _stage_B_C(B_shared, C_shared, tables, of_group[0], of_group[1], WIDTH, G * N)
    staged = _buffers(J, TP, TILE)
    staged_rest = staged
    _stage_x(staged, tables, xB + first, dt, rate, WIDTH, H)
    if REST:
        staged_rest = _buffers(J, TP, REST)
        _stage_x(staged_rest, tables, xB + first + TILE, dt, rate, WIDTH, H)
    barrier()

    for k in range(length):
        S = _step(S, staged, B_shared, k)
        if REST:
            S_rest = _step(S_rest, staged_rest, B_shared, k)
    if fold is not None:  # noqa: SIM102 - known when compiled; the other one is not
        if (gl.load(fold + request) != 0) & (length > 0):
            gl.store(state + _in_state(TILE, N, layout), S)
            if REST:
                gl.store(state + TILE * N + _in_state(REST, N, rest_layout), S_rest)

    y += request.to(gl.int64) * T * (H * P) + first
    S = _step(S, staged, B_shared, length)
    _write(S, staged, C_shared, 0, skip, y)
    if REST:
        S_rest = _step(S_rest, staged_rest, B_shared, length)
        _write(S_rest, staged_rest, C_shared, 0, skip, y + TILE)
    if BITS is not None:
        after_root = gl.allocate_shared_memory(
            gl.float32, [TILE, N], gl.SwizzledSharedLayout(4, 1, 8, [1, 0])
        )
        after_root.store(S)
        rest_after_root = S_rest
        ancestors += request * T
        done = gl.full([], 1, BITS)
        leaves = leaves_of(ancestors, T, BITS, WARPS)
        node, path, leaves, begins = next_node(ancestors, done - 1, leaves, BITS)
        while node >= 0:
            S = after_root.load(layout)
            if REST:
                S_rest = rest_after_root
            begins = node < 0
            while not begins:
                later, path, leaves, begins = next_node(ancestors, path, leaves, BITS)
                S = _step(S, staged, B_shared, length + node)
                if REST:
                    S_rest = _step(S_rest, staged_rest, B_shared, length + node)
                if ((done >> node.to(BITS)) & 1) == 0:
                    _write(S, staged, C_shared, node, skip, y + node * (H * P))
                    if REST:
                        at = y + node * (H * P) + TILE
                        _write(S_rest, staged_rest, C_shared, node, skip, at)
                done |= bit(node, BITS)
                node = later


def tree_verify(
    buffers: RowBuffers,
    C: Tensor,
    A: Tensor,
    D: Tensor,
    state: Tensor,
    step: TreeLayout,
    sizes: Sizes,
) -> Tensor:
    """gluon.py's, to which it leaves what this kernel does not support."""
    by_warp.check_sizes(sizes, state)
    (b, T), (H, P, G, N) = step.rows.shape, sizes
    M, (tile, rest, warps) = step.journal.shape[1], choose_config(P, N)
    assert warps == WARPS.value
    padded = max(16, triton.next_power_of_2(T + M))
    if padded > MAX_ROWS or tile < 4 * warps or N > 128:
        return by_warp.tree_verify(buffers, C, A, D, state, step, sizes)
    y = torch.empty(b * T, H * P, dtype=buffers.xB.dtype, device=C.device)
    _staged_kernel[(H * P // (tile + rest), b)](
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
        M,
        state.stride(0),
        H=H,
        P=P,
        G=G,
        N=N,
        TILE=tile,
        REST=rest,
        J=padded,
        TP=triton.next_power_of_2(T),
        BITS=mask_type(T),
        num_warps=warps,
        **overlapping(C.device),
    )
    return y
