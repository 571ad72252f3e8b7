"""Verification of gated DeltaNet and its folds, by the recurrence itself.

As Mamba2's (recurrence/gluon_verify.py): a program has some values of a head of one request, walks
over the journal, where a request that folds stores the state, and then from the root along the path
to each leaf. Rows of a journal have u, so that only nodes read the state before they write it. The
journal was written by earlier steps: that walk need not wait for the convolution.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mamba_eagle.kernels.delta_recurrence.gluon_step import (
    MAX_KEY,
    advance,
    choose_tiles,
    prepare,
    room_for_tokens,
    write_output,
)
from mamba_eagle.kernels.delta_rule.rows import DeltaRows
from mamba_eagle.kernels.gpu import next_power_of_2, overlapping
from mamba_eagle.kernels.recurrence import gluon_step as recurrence
from mamba_eagle.kernels.recurrence.gluon_step import (
    LOG2_E,
    PLAIN,
    barrier,
    in_state,
    read_layout,
    read_rows,
    store_numbers,
    tile_layout,
)
from mamba_eagle.kernels.recurrence.gluon_verify import walk_tree
from mamba_eagle.kernels.recurrence.layout import Tiles, check_sizes
from mamba_eagle.kernels.tree_verify.layout import Sizes, TreeLayout
from mamba_eagle.kernels.triton_math import previous_done

JOURNAL = gl.constexpr(32)  # rows that are prepared at a time


@gluon.jit
def _prepare_rows(feed, path, length, rows, widths, num_warps: gl.constexpr):
    """The next rows of a journal, of ``length`` that are left, as tokens of Mamba2's. rows: gates,
    keys and u of the request's row 0, at the head and the tile's first value."""
    row, valid = _next_rows(path, length, read_layout(feed[3].shape[1], num_warps))
    store_numbers(feed[3], read_rows(feed[3], rows[1], row, valid, widths[1], num_warps))
    g = gl.load(rows[0] + row * widths[0], mask=valid, other=0.0)
    feed[2].store(gl.exp2(g * LOG2_E)[:, None])
    row, valid = _next_rows(path, length, read_layout(feed[0].shape[1], num_warps))
    feed[0].store(read_rows(feed[0], rows[2], row, valid, widths[2], num_warps))


@gluon.jit
def _next_rows(path, length, layout: gl.constexpr):
    """Ids of rows, and which of them there are: [JOURNAL], by rows of ``layout``."""
    i = gl.arange(0, JOURNAL, gl.SliceLayout(1, layout))
    return gl.load(path + i, mask=i < length, other=0).to(gl.int32), i < length


@gluon.jit
def _prepare_nodes(tokens, given, T, own, keeps, sizes, EPS: gl.constexpr, num_warps: gl.constexpr):
    """What nodes feed in. Some programs also write the nodes' keys and gates to their rows, for
    all: keeps, of keys and of gates.

    given: gates, queries and values of the request's first node; row_gates, row_keys of its row 0;
    all at the head. own: the nodes' rows."""
    gates, queries, values, row_gates, row_keys = given
    H, GN, WIDTH = sizes
    NODES: gl.constexpr = tokens[0].shape[0]
    layout: gl.constexpr = read_layout(tokens[1].shape[1], num_warps)
    node = gl.arange(0, NODES, gl.SliceLayout(1, layout))
    is_node = node < T
    q = read_rows(tokens[1], queries, node, is_node, WIDTH, num_warps)
    k = read_rows(tokens[1], queries + GN, node, is_node, WIDTH, num_warps)
    g = gl.load(gates + node * (2 * H), mask=is_node, other=0.0)
    beta = gl.load(gates + H + node * (2 * H), mask=is_node, other=0.0)
    prepare(tokens, q, k, g[:, None], beta[:, None], EPS)
    row = gl.load(own + node, mask=is_node, other=0).to(gl.int32)
    if keeps[0]:
        n = gl.arange(0, tokens[1].shape[1], gl.SliceLayout(0, layout))
        gl.store(row_keys + (row * GN)[:, None] + n[None, :], k, mask=is_node[:, None])
    if keeps[1]:
        gl.store(row_gates + row * (2 * H), g, mask=is_node)
        gl.store(row_gates + H + row * (2 * H), beta, mask=is_node)
    of_values: gl.constexpr = read_layout(tokens[0].shape[1], num_warps)
    node = gl.arange(0, NODES, gl.SliceLayout(1, of_values))
    v = read_rows(tokens[0], values, node, node < T, WIDTH, num_warps)
    tokens[0].store(v.to(gl.float32))


@gluon.jit
def _node(S, given, node, new):
    """The state after a node. If it is new, its u goes to its row, and its output is written."""
    tokens, rows, row_u, y, width = given
    after, u = advance(S[0], tokens, node)
    if new:
        row = gl.load(rows + node).to(gl.int32)
        gl.store(row_u + row * width + gl.arange(0, after.shape[0], u.type.layout), u)
        write_output(after, tokens, node, y + node * width)
    return (after,)


@gluon.jit(do_not_specialize=["T", "W", "M"])
def _verify_kernel(
    gates,  # [b, T, H + H]
    convolved,  # [b, T, 2*G*N + H*P]: queries, keys, values
    row_gates,  # [R, W, H + H]
    row_keys,  # [R, W, G*N]
    row_u,  # [R, W, H*P]
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
    NODES: gl.constexpr,  # T, padded
    BITS: gl.constexpr,  # integers with a bit for each node; None: one node
    EPS: gl.constexpr,
    OVERLAP: gl.constexpr,
    num_warps: gl.constexpr,
):
    WIDTH: gl.constexpr = 2 * G * N + H * P
    layout: gl.constexpr = tile_layout(TILE, num_warps)
    first = gl.program_id(0) * TILE
    request = gl.program_id(1)
    head = first // P
    group = head // (H // G)

    slot = gl.load(slots + request).to(gl.int64)
    length = gl.load(journal_len + request).to(gl.int32)
    folding = False
    if fold is not None:
        folding = (gl.load(fold + request) != 0) & (length > 0)
    state += gl.load(state_slots + request).to(gl.int64) * state_stride + first * N
    S = gl.load(state + in_state(TILE, N, layout))
    row_gates += slot * W * (2 * H) + head
    row_keys += slot * W * (G * N) + group * N
    row_u += slot * W * (H * P) + first
    rows += request * T
    journal += request * M
    written = gl.allocate_shared_memory(gl.float32, [JOURNAL, TILE], PLAIN)
    decays = gl.allocate_shared_memory(gl.float32, [JOURNAL, 1], PLAIN)
    keys = gl.allocate_shared_memory(gl.float32, [JOURNAL, N], PLAIN)
    past = (written, written, decays, keys, keys)
    buffers, widths = (row_gates, row_keys, row_u), (2 * H, G * N, H * P)
    for at in range(0, length, JOURNAL):
        _prepare_rows(past, journal + at, length - at, buffers, widths, num_warps)
        barrier()
        for i in range(gl.minimum(length - at, JOURNAL)):
            S = recurrence.advance(S, past, i)
        barrier()
    if folding:
        gl.store(state + in_state(TILE, N, layout), S)
    previous_done(OVERLAP)

    tokens = room_for_tokens(NODES, TILE, N)
    at = request.to(gl.int64) * T
    queries, values = convolved + at * WIDTH + group * N, convolved + at * WIDTH + 2 * G * N + first
    given = (gates + at * (2 * H) + head, queries, values, row_gates, row_keys)
    of_head = first % P == 0
    keeps = (of_head & (head % (H // G) == 0), of_head)
    _prepare_nodes(tokens, given, T, rows, keeps, (H, G * N, WIDTH), EPS, num_warps)
    barrier()
    y += at * (H * P) + first
    given = (tokens, rows, row_u, y, H * P)
    S = _node((S,), given, 0, True)
    if BITS is not None:
        walk_tree(S, ancestors + request * T, T, given, BITS, _node, num_warps)


def tree_verify(
    rows: DeltaRows,
    gates: Tensor,
    convolved: Tensor,
    state: Tensor,
    step: TreeLayout,
    sizes: Sizes,
    eps: float,
    tiles: Tiles | None = None,
) -> Tensor:
    """delta_rule/triton.py's, with a state in float32 and one decay per head. Where ``step`` folds,
    the state after the journal is written as well.

    Args:
        rows: u over the length of its key.
        tiles: None: ``choose_tiles``. Bits do not depend on it.
    Raises: ValueError for more than 64 nodes, and as ``check_sizes``.
    """
    check_sizes(sizes, state, MAX_KEY)
    (b, T), width = step.rows.shape, rows.u.shape[2]
    if T > 64:
        raise ValueError(f"a tree of {T} nodes: at most 64 are supported")
    y = torch.empty(b * T, width, dtype=convolved.dtype, device=convolved.device)
    tile, _, warps = tiles or choose_tiles(sizes)
    masks = gl.int32 if T < 32 else gl.int64
    tables = (*step.up_to_rows, step.ancestors, step.fold)
    lengths = (T, rows.u.shape[1], step.journal.shape[1], state.stride(0))
    _verify_kernel[(width // tile, b)](
        *(gates, convolved, *rows, state, y, *tables, *lengths),
        **sizes.constants,
        TILE=tile,
        NODES=next_power_of_2(T),
        BITS=None if T == 1 else masks,
        EPS=eps,
        num_warps=warps,
        **overlapping(convolved.device),
    )
    return y
