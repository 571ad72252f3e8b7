"""torch.py's tree_verify and fold for rows and states that are read in place.

A program owns some values of one head of one request. It asks for its part of the state first, and
multiplies it part by part by the queries and keys of all nodes, while it adds up what these read of
each other; norms and decays are factors of the sums. Then it inverts the nodes' unit triangular
system by substitution, row by row. (Products of powers would take fewer steps; but where keys
resemble each other, powers of 2**15 cancel.) u is one product more, and so are the outputs. A plain
step is a tree of one node.

Log decays are added along the path between two tokens. All of them have one sign, so that nothing
cancels in float32, where differences of sums from the state would need float64. Each product of
float32 numbers is three of tf32.

Nothing here waits for the device, and the grids depend on the batch alone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mamba_eagle.kernels.gpu import launches_overlap
from mamba_eagle.kernels.state_rounding.triton import round_state
from mamba_eagle.kernels.tree_verify.layout import Sizes, TreeLayout
from mamba_eagle.kernels.triton_math import exact_dot, previous_done

MAX_NODES = 64


class DeltaRows(NamedTuple):
    """The row buffers of all request slots, of one layer or (with a leading dimension) of all."""

    gates: Tensor  # [R, W, H + H], or [R, W, H*N + H] with a decay per channel: g, beta; float32
    keys: Tensor  # [R, W, G*N], out of the convolution
    u: Tensor  # [R, W, H*P] float32


@triton.jit
def _dot(a, b, acc=None):
    """acc + a·b, both factors float32 or of 16 bits; nearly as exact as float32."""
    if acc is None:
        acc = tl.zeros([a.shape[0], b.shape[1]], tl.float32)
    return exact_dot(a, b, acc, "tf32x3")


@triton.jit
def _decay_sums(at, after, valid, follows):
    """Of g of a journal's rows, at pointers ``at`` and those of the rows that follow, ``after``:
    the sum of all that follow each row, and that of all."""
    sums = tl.cumsum(tl.load(after, mask=follows, other=0.0), 0, reverse=True)
    return sums, tl.sum(tl.load(at, mask=valid, other=0.0), 0)


@triton.jit
def _add_channel_pairs(
    found, q, k, k_rows, g, suffix, on_path, valid, T, TP: tl.constexpr, JP: tl.constexpr
):
    """What some channels with decays of their own add to ``found``: k_i·k_j and q_i·k_j of nodes
    [TP, TP] and of nodes and rows [TP, JP], under the decay between i and j. Node by node, since
    each pair has its own exponentials. g: [TP, channels]; suffix: [JP, channels]."""
    k_nodes, q_nodes, k_past, q_past = found
    node = tl.arange(0, TP)
    for i in range(T):
        mine = (node == i)[:, None]
        q_i = tl.sum(tl.where(mine, q, 0.0), 0)[None, :]
        k_i = tl.sum(tl.where(mine, k, 0.0), 0)[None, :]
        above = tl.sum(tl.where(mine, on_path, 0.0), 0)
        since = tl.sum(above[:, None] * g, 0)  # from the journal's end
        between = _dot(above[None, :] * (1.0 - on_path), g)  # nodes that are not above j
        read = tl.where(above[:, None] > 0, k * tl.exp(between), 0.0)
        k_nodes += tl.where(mine, tl.sum(read * k_i, 1)[None, :], 0.0)
        q_nodes += tl.where(mine, tl.sum(read * q_i, 1)[None, :], 0.0)
        read = tl.where(valid[:, None], k_rows * tl.exp(suffix + since[None, :]), 0.0)
        k_past += tl.where(mine, tl.sum(read * k_i, 1)[None, :], 0.0)
        q_past += tl.where(mine, tl.sum(read * q_i, 1)[None, :], 0.0)
    return k_nodes, q_nodes, k_past, q_past


@triton.jit
def _inverse(below, T):
    """(I + below)⁻¹, where below [T, T] is strictly lower triangular."""
    node = tl.arange(0, below.shape[0])
    found = (node[:, None] == node[None, :]).to(tl.float32)
    for i in range(1, T):
        mine = (node == i)[:, None]
        row = tl.sum(tl.where(mine, below, 0.0), 0)
        above = tl.sum(tl.where((node < i)[:, None], row[:, None] * found, 0.0), 0)
        found = tl.where(mine, found - above[None, :], found)
    return found


@triton.jit
def _verify_kernel(
    gates,  # [b, T, GATES]
    convolved,  # [b, T, 2*G*N + H*P]: queries, keys, values
    row_gates,  # [R, W, GATES]
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
    fold,  # [b]: whether the journal is already in the state; None: nowhere
    T,
    W,
    M,
    state_stride,
    H: tl.constexpr,
    P: tl.constexpr,
    G: tl.constexpr,
    N: tl.constexpr,
    TP: tl.constexpr,  # nodes, padded
    JP: tl.constexpr,  # rows of a journal, padded
    TILE: tl.constexpr,  # values of a head
    PART: tl.constexpr,  # channels of a key that are multiplied at once
    CHANNELS: tl.constexpr,
    EPS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    DECAYS: tl.constexpr = H * N if CHANNELS else H
    GATES: tl.constexpr = DECAYS + H
    WIDTH: tl.constexpr = 2 * G * N + H * P
    first = tl.program_id(0) * TILE  # of the flat H*P
    request = tl.program_id(1)
    head = first // P
    group = head // (H // G)
    channel = first + tl.arange(0, TILE)
    n = tl.arange(0, PART)
    node = tl.arange(0, TP)
    packed = tl.arange(0, JP)

    state += tl.load(state_slots + request).to(tl.int64) * state_stride
    stored = ()
    for part in tl.static_range(N // PART):  # the load that takes longest is started first
        in_state = channel[None, :] * N + (part * PART + n)[:, None]
        stored += (tl.load(state + in_state),)  # [PART, TILE]
    slot = tl.load(slots + request).to(tl.int64)
    length = tl.load(journal_len + request).to(tl.int32)
    if fold is not None:
        length = tl.where(tl.load(fold + request) != 0, 0, length)
    is_node, valid, follows = node < T, packed < length, packed + 1 < length
    own = tl.load(rows + request * T + node, mask=is_node, other=0).to(tl.int32)
    row = tl.load(journal + request * M + packed, mask=valid, other=0).to(tl.int32)
    next_row = tl.load(journal + request * M + packed + 1, mask=follows, other=0).to(tl.int32)
    bits = tl.load(ancestors + request * T + node, mask=is_node, other=0)
    above = (bits[:, None] >> tl.minimum(node, 63).to(tl.int64)[None, :]) & 1
    on_path = tl.where(is_node[None, :], above, 0).to(tl.float32)  # [TP, TP]: j is i, or above it
    previous_done(OVERLAP)

    row_gates += slot * W * GATES
    row_keys += slot * W * (G * N) + group * N
    row_u += slot * W * (H * P)
    at = request.to(tl.int64) * T + node
    gates_at, own_gates = gates + at * GATES, row_gates + own * GATES
    log_at = head * (N if CHANNELS else 1)
    nodes_2d, rows_2d = is_node[:, None], valid[:, None]
    of_tile = tl.where(first % P == 0, T, 0)  # nodes whose gates this program writes
    first_tile = node < of_tile
    first_of_group = node < tl.where(head % (H // G) == 0, of_tile, 0)
    if not CHANNELS:
        g = tl.load(gates_at + log_at, mask=is_node, other=0.0)
        tl.store(own_gates + log_at, g, mask=first_tile)
        g_rows, g_next = row_gates + row * GATES + log_at, row_gates + next_row * GATES + log_at
        suffix, total = _decay_sums(g_rows, g_next, valid, follows)
    k_nodes = tl.zeros([TP, TP], tl.float32)
    q_nodes = tl.zeros([TP, TP], tl.float32)
    k_past = tl.zeros([TP, JP], tl.float32)
    q_past = tl.zeros([TP, JP], tl.float32)
    k_state = tl.zeros([TP, TILE], tl.float32)
    q_state = tl.zeros([TP, TILE], tl.float32)
    q_size = tl.full([TP], EPS, tl.float32)
    k_size = tl.full([TP], EPS, tl.float32)
    row_size = tl.full([JP], EPS, tl.float32)
    for part in tl.static_range(N // PART):
        key = (part * PART + n)[None, :]
        q_at = (convolved + at * WIDTH + group * N)[:, None] + key
        raw_q = tl.load(q_at, mask=nodes_2d, other=0.0)
        raw_k = tl.load(q_at + G * N, mask=nodes_2d, other=0.0)
        raw_rows = tl.load((row_keys + row * (G * N))[:, None] + key, mask=rows_2d, other=0.0)
        own_keys = (row_keys + own * (G * N))[:, None] + key
        tl.store(own_keys, raw_k, mask=first_of_group[:, None])
        q, k = raw_q.to(tl.float32), raw_k.to(tl.float32)
        k_rows = raw_rows.to(tl.float32)
        q_size += tl.sum(q * q, 1)
        k_size += tl.sum(k * k, 1)
        row_size += tl.sum(k_rows * k_rows, 1)
        before = stored[part].to(tl.float32)
        if CHANNELS:
            g = tl.load(gates_at[:, None] + log_at + key, mask=nodes_2d, other=0.0)
            tl.store(own_gates[:, None] + log_at + key, g, mask=first_tile[:, None])
            g_rows = (row_gates + row * GATES)[:, None] + log_at + key
            g_next = (row_gates + next_row * GATES)[:, None] + log_at + key
            suffix, total = _decay_sums(g_rows, g_next, rows_2d, follows[:, None])
            found = (k_nodes, q_nodes, k_past, q_past)
            k_nodes, q_nodes, k_past, q_past = _add_channel_pairs(
                found, q, k, k_rows, g, suffix, on_path, valid, T, TP, JP
            )
            grown = tl.exp(_dot(on_path, g) + total[None, :])
            q *= grown
            k *= grown
        else:
            k_nodes = _dot(raw_k, tl.trans(raw_k), k_nodes)
            q_nodes = _dot(raw_q, tl.trans(raw_k), q_nodes)
            k_past = _dot(raw_k, tl.trans(raw_rows), k_past)
            q_past = _dot(raw_q, tl.trans(raw_rows), q_past)
        k_state = _dot(k, before, k_state)
        q_state = _dot(q, before, q_state)

    beta = tl.load(gates_at + DECAYS + head, mask=is_node, other=0.0)
    tl.store(own_gates + DECAYS + head, beta, mask=first_tile)
    of_q, of_k = (N**-0.5) / tl.sqrt(q_size)[:, None], 1.0 / tl.sqrt(k_size)
    of_l, of_rows = (beta * of_k)[:, None], 1.0 / tl.sqrt(row_size)[None, :]
    from_state_q, from_state_l = of_q, of_l
    if not CHANNELS:
        of_path = on_path * g[None, :]
        since = tl.sum(of_path, 1)  # from the journal's end
        # masked, since it means nothing where j is not above i; nodes that are not above j
        between = tl.exp(_dot(of_path, tl.trans(1.0 - on_path))) * on_path
        k_nodes *= between
        q_nodes *= between
        past = tl.exp(since[:, None] + suffix[None, :])
        k_past *= past
        q_past *= past
        grown = tl.exp(since + total)[:, None]
        from_state_q *= grown
        from_state_l *= grown
    strictly = node[:, None] != node[None, :]
    below = tl.where(strictly, k_nodes * of_l * of_k[None, :], 0.0)
    v_at = (convolved + at * WIDTH + 2 * G * N)[:, None] + channel[None, :]
    v = tl.load(v_at, mask=nodes_2d, other=0.0).to(tl.float32)
    u_at = (row_u + row * (H * P))[:, None] + channel[None, :]
    u_rows = tl.load(u_at, mask=rows_2d, other=0.0)
    known = v * beta[:, None] - k_state * from_state_l - _dot(k_past * of_l * of_rows, u_rows)
    u = _dot(_inverse(below, T), known)
    tl.store((row_u + own * (H * P))[:, None] + channel[None, :], u, mask=nodes_2d)
    o = q_state * from_state_q
    o = _dot(q_past * of_q * of_rows, u_rows, o)
    o = _dot(q_nodes * of_q * of_k[None, :], u, o)
    tl.store(y + at[:, None] * (H * P) + channel[None, :], o, mask=nodes_2d)


def tree_verify(
    rows: DeltaRows,
    gates: Tensor,
    convolved: Tensor,
    state: Tensor,
    step: TreeLayout,
    sizes: Sizes,
    eps: float,
    tile: int | None = None,
) -> Tensor:
    """Outputs of all nodes; their rows are written, the state is not.

    On Hopper it starts before the previous kernel has ended. That kernel may write ``gates`` and
    ``convolved``, but neither the state nor the step's indices.

    Args:
        rows: of one layer, contiguous.
        gates: [b*T, H + H], or [b*T, H*N + H] with a decay per channel; float32, contiguous.
        convolved: [b, T, 2*G*N + H*P], contiguous: queries, keys and values.
        state: [slots, H, P, N], of one layer, contiguous.
        step: where it folds, the state already has the journal (``fold_journals``).
        eps: added to the squared norms of queries and keys.
        tile: values of a head per program.
    Returns: [b*T, H*P], dtype of ``convolved``.
    Raises: ValueError for trees of more than 64 nodes.
    """
    (b, T), (H, P, G, N) = step.rows.shape, sizes
    if T > MAX_NODES:
        raise ValueError(f"a tree of {T} nodes: at most {MAX_NODES} are supported")
    y = torch.empty(b * T, H * P, dtype=convolved.dtype, device=convolved.device)
    tile, overlap = tile or value_tile(P), launches_overlap(state.device)
    M, nodes = step.journal.shape[1], (step.rows, step.ancestors, step.fold)
    indices = (step.slots, step.state_slots, step.journal, step.journal_len, *nodes)
    _verify_kernel[(H * P // tile, b)](
        gates,
        convolved,
        *rows,
        state,
        y,
        *indices,
        T,
        rows.u.shape[1],
        M,
        state.stride(0),
        H=H,
        P=P,
        G=G,
        N=N,
        TP=max(16, triton.next_power_of_2(T)),
        JP=max(16, triton.next_power_of_2(M)),
        TILE=tile,
        PART=min(32, N),
        CHANNELS=has_channel_decay(rows, sizes),
        EPS=eps,
        OVERLAP=overlap,
        num_warps=8 if T > 16 else 4,
        launch_pdl=overlap,
    )
    return y


def value_tile(head_dim: int) -> int:
    """The widest power of two, up to 32, that divides a head's values."""
    return min(32, head_dim & -head_dim)


def has_channel_decay(rows: DeltaRows, sizes: Sizes) -> bool:
    return rows.gates.shape[-1] != 2 * sizes.heads


@triton.jit
def _fold_kernel(
    gates,  # [layers, R, W, GATES]
    keys,  # [layers, R, W, G*N]
    u,  # [layers, R, W, H*P]
    state,  # [layers, S, H, P, N]
    slots,  # [b]
    state_slots,  # [b]
    journal,  # [b, M]
    lengths,  # [b]
    wanted,  # [b]; None: all
    round_keys,  # [b]; None: to nearest
    b,
    R,
    W,
    S,
    M,
    H: tl.constexpr,
    P: tl.constexpr,
    G: tl.constexpr,
    N: tl.constexpr,
    JP: tl.constexpr,
    TILE: tl.constexpr,
    PART: tl.constexpr,  # channels of a key
    CHANNELS: tl.constexpr,
    EPS: tl.constexpr,
):
    GATES: tl.constexpr = (H * N if CHANNELS else H) + H
    first = tl.program_id(0) * TILE
    part = tl.program_id(1) * PART
    layer = tl.program_id(2).to(tl.int64)
    head = first // P
    n, every = part + tl.arange(0, PART), tl.arange(0, N)
    in_state = (first + tl.arange(0, TILE))[:, None] * N + n[None, :]
    packed = tl.arange(0, JP)
    for request in range(b):
        length = tl.load(lengths + request).to(tl.int32)
        if wanted is not None:
            length = tl.where(tl.load(wanted + request) != 0, length, 0)
        if length > 0:
            valid, follows = packed < length, packed + 1 < length
            path = journal + request * M + packed
            first_row = (layer * R + tl.load(slots + request)) * W
            row = first_row + tl.load(path, mask=valid, other=0)
            next_row = first_row + tl.load(path + 1, mask=follows, other=0)
            states = state + (layer * S + tl.load(state_slots + request)) * (H * P * N)
            before = tl.load(states + in_state).to(tl.float32)
            k_at = (keys + row * (G * N) + head // (H // G) * N)[:, None]
            whole = tl.load(k_at + every[None, :], mask=valid[:, None], other=0.0).to(tl.float32)
            of_k = 1.0 / tl.sqrt(tl.sum(whole * whole, 1) + EPS)
            k = tl.load(k_at + n[None, :], mask=valid[:, None], other=0.0).to(tl.float32)
            u_at = (u + row * (H * P))[None, :] + (first + tl.arange(0, TILE))[:, None]
            written = tl.load(u_at, mask=valid[None, :], other=0.0) * of_k[None, :]
            log_at = gates + head * (N if CHANNELS else 1)
            g_rows, g_next = log_at + row * GATES, log_at + next_row * GATES
            if CHANNELS:
                g_rows, g_next = g_rows[:, None] + n[None, :], g_next[:, None] + n[None, :]
                inside = (valid[:, None], follows[:, None])
                suffix, total = _decay_sums(g_rows, g_next, inside[0], inside[1])
                decay, k = tl.exp(total)[None, :], k * tl.exp(suffix)
            else:
                suffix, total = _decay_sums(g_rows, g_next, valid, follows)
                decay, k = tl.exp(total), k * tl.exp(suffix)[:, None]
            folded = _dot(written, k, before * decay)
            if round_keys is not None:
                key = tl.load(round_keys + request)
                folded = round_state(folded, key, layer, in_state, state.dtype.element_ty)
            tl.store(states + in_state, folded)


def fold_journals(
    rows: DeltaRows,
    state: Tensor,
    slots: Tensor,
    state_slots: Tensor,
    journal: Tensor,
    length: Tensor,
    sizes: Sizes,
    eps: float,
    wanted: Tensor | None = None,
    round_keys: Tensor | None = None,
) -> None:
    """S0 := the state after the first ``length[i]`` rows of request i's journal, in all layers.

    Few requests fold at a time, so a program goes through all of them: those that do not fold cost
    a look at a number.

    Args:
        rows: of all layers, contiguous.
        state: [layers, S, H, P, N], contiguous; bfloat16, float16 or float32.
        slots, state_slots: [b] int64. No two requests have the same state slot unless one is not
            folded.
        journal: [b, M] int64, contiguous: row ids, oldest first; not read past ``length``.
        length: [b] int64, at most M; 0: the request's states are neither read nor changed.
        wanted: [b] bool: which requests are folded; None: all.
        round_keys: [b] int64, of the noise that rounds a state to 16 bits; None: to nearest.
    """
    (layers, R, W, _), (b, M), (H, P, G, N) = rows.u.shape, journal.shape, sizes
    tile, part = value_tile(P), min(64, N)
    _fold_kernel[(H * P // tile, N // part, layers)](
        *rows,
        state,
        slots,
        state_slots,
        journal,
        length,
        wanted,
        round_keys,
        b,
        R,
        W,
        state.shape[1],
        M,
        H=H,
        P=P,
        G=G,
        N=N,
        JP=max(16, triton.next_power_of_2(M)),
        TILE=tile,
        PART=part,
        CHANNELS=has_channel_decay(rows, sizes),
        EPS=eps,
        num_warps=4,
    )
