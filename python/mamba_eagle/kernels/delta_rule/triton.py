"""torch.py's tree_verify for rows and states that are read in place: two kernels.

What does not depend on values is made once per head of a request (``_weights_kernel``): pairs of
queries and keys under the decay between them, and the inverse of the nodes' unit triangular system
by substitution, row by row. (Products of powers would take fewer steps; but where keys resemble
each other, powers of 2**15 cancel.) What is left is linear in the values, so that a program of
``_verify_kernel`` takes some of a head's: it asks for its part of the state before the first kernel
has ended, multiplies it once by the queries and keys of all nodes, and is left with small products.
A plain step is a tree of one node, and these are sums; gluon.py has a form for few nodes.

Log decays are added along the path between two tokens. All of them have one sign, so that nothing
cancels in float32, where differences of sums from the state would need float64. Each product of
float32 numbers is three of tf32; queries and keys of 16 bits are multiplied by two halves of the
state. Norms and decays are factors of the sums.

Nothing here waits for the device, and the grids depend on the batch alone.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mamba_eagle.kernels.delta_rule import gluon
from mamba_eagle.kernels.delta_rule.rows import (
    DeltaRows,
    decay_sums,
    float32_dot,
    has_channel_decay,
)
from mamba_eagle.kernels.gpu import PROCESSORS, next_power_of_2, overlapping
from mamba_eagle.kernels.tree_verify.layout import Sizes, TreeLayout
from mamba_eagle.kernels.triton_math import previous_done, split_dot

MAX_NODES = 64


@triton.jit
def _add_channel_pairs(found, q, k, k_rows, g, suffix, on_path, valid, T, TP: tl.constexpr):
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
        # nodes that are not above j
        between = float32_dot(above[None, :] * (1.0 - on_path), g)
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
def _journal_length(journal_len, fold, request):
    """Rows that the state does not have yet; none where the journal has been folded."""
    length = tl.load(journal_len + request).to(tl.int32)
    if fold is not None:
        length = tl.where(tl.load(fold + request) != 0, 0, length)
    return length


@triton.jit
def _weights_kernel(
    gates,  # [b, T, GATES]
    convolved,  # [b, T, 2*G*N + H*P]: queries, keys, values
    row_gates,  # [R, W, GATES]
    row_keys,  # [R, W, G*N]
    weights,  # [b, H, T, 3 + 2*M + 2*T]
    decayed,  # [b, H, 2*T, N] float32, if CHANNELS
    slots,
    journal,  # [b, M]
    journal_len,
    rows,  # [b, T]
    ancestors,  # [b, T]
    fold,  # [b]: whether the journal is already in the state; None: nowhere
    T,
    W,
    M,
    H: tl.constexpr,
    P: tl.constexpr,
    G: tl.constexpr,
    N: tl.constexpr,
    TP: tl.constexpr,  # nodes, padded
    JP: tl.constexpr,  # rows of a journal, padded
    PART: tl.constexpr,  # channels of a key that are multiplied at once
    CHANNELS: tl.constexpr,
    EPS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Of a head of a request: its nodes' weights, gates and keys."""
    DECAYS: tl.constexpr = H * N if CHANNELS else H
    GATES: tl.constexpr = DECAYS + H
    WIDTH: tl.constexpr = 2 * G * N + H * P
    head, request = tl.program_id(0), tl.program_id(1)
    group = head // (H // G)
    n = tl.arange(0, PART)
    node = tl.arange(0, TP)
    packed = tl.arange(0, JP)

    slot = tl.load(slots + request).to(tl.int64)
    length = _journal_length(journal_len, fold, request)
    is_node, valid, follows = node < T, packed < length, packed + 1 < length
    own = tl.load(rows + request * T + node, mask=is_node, other=0).to(tl.int32)
    row = tl.load(journal + request * M + packed, mask=valid, other=0).to(tl.int32)
    next_row = tl.load(journal + request * M + packed + 1, mask=follows, other=0).to(tl.int32)
    bits = tl.load(ancestors + request * T + node, mask=is_node, other=0)
    above = (bits[:, None] >> tl.minimum(node, 63).to(tl.int64)[None, :]) & 1
    on_path = tl.where(is_node[None, :], above, 0).to(tl.float32)  # [TP, TP]: j is i, or above it
    row_gates += slot * W * GATES
    row_keys += slot * W * (G * N) + group * N
    log_at = head * (N if CHANNELS else 1)
    if not CHANNELS:
        g_rows, g_next = row_gates + row * GATES + log_at, row_gates + next_row * GATES + log_at
        suffix, total = decay_sums(g_rows, g_next, valid, follows)
    previous_done(OVERLAP)

    at = request.to(tl.int64) * T + node
    gates_at, own_gates = gates + at * GATES, row_gates + own * GATES
    nodes_2d, rows_2d = is_node[:, None], valid[:, None]
    first_of_group = node < tl.where(head % (H // G) == 0, T, 0)
    if not CHANNELS:
        g = tl.load(gates_at + log_at, mask=is_node, other=0.0)
        tl.store(own_gates + log_at, g, mask=is_node)
    k_nodes = tl.zeros([TP, TP], tl.float32)
    q_nodes = tl.zeros([TP, TP], tl.float32)
    k_past = tl.zeros([TP, JP], tl.float32)
    q_past = tl.zeros([TP, JP], tl.float32)
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
        if CHANNELS:
            g = tl.load(gates_at[:, None] + log_at + key, mask=nodes_2d, other=0.0)
            tl.store(own_gates[:, None] + log_at + key, g, mask=nodes_2d)
            g_rows = (row_gates + row * GATES)[:, None] + log_at + key
            g_next = (row_gates + next_row * GATES)[:, None] + log_at + key
            suffix, total = decay_sums(g_rows, g_next, rows_2d, follows[:, None])
            found = (k_nodes, q_nodes, k_past, q_past)
            k_nodes, q_nodes, k_past, q_past = _add_channel_pairs(
                found, q, k, k_rows, g, suffix, on_path, valid, T, TP
            )
            grown = tl.exp(float32_dot(on_path, g) + total[None, :])
            of_head = decayed + ((request * H + head).to(tl.int64) * 2 * T + 2 * node)[:, None] * N
            tl.store(of_head + key, q * grown, mask=nodes_2d)
            tl.store(of_head + N + key, k * grown, mask=nodes_2d)
        else:
            k_nodes = float32_dot(raw_k, tl.trans(raw_k), k_nodes)
            q_nodes = float32_dot(raw_q, tl.trans(raw_k), q_nodes)
            k_past = float32_dot(raw_k, tl.trans(raw_rows), k_past)
            q_past = float32_dot(raw_q, tl.trans(raw_rows), q_past)

    beta = tl.load(gates_at + DECAYS + head, mask=is_node, other=0.0)
    tl.store(own_gates + DECAYS + head, beta, mask=is_node)
    of_q, of_k = (N**-0.5) / tl.sqrt(q_size), 1.0 / tl.sqrt(k_size)
    of_l, of_rows = beta * of_k, 1.0 / tl.sqrt(row_size)[None, :]
    from_state_q, from_state_l = of_q, of_l
    if not CHANNELS:
        of_path = on_path * g[None, :]
        since = tl.sum(of_path, 1)  # from the journal's end
        # masked, since it means nothing where j is not above i; nodes that are not above j
        between = tl.exp(float32_dot(of_path, tl.trans(1.0 - on_path))) * on_path
        k_nodes *= between
        q_nodes *= between
        past = tl.exp(since[:, None] + suffix[None, :])
        k_past *= past
        q_past *= past
        grown = tl.exp(since + total)
        from_state_q *= grown
        from_state_l *= grown
    strictly = node[:, None] != node[None, :]
    below = tl.where(strictly, k_nodes * of_l[:, None] * of_k[None, :], 0.0)
    line = weights + ((request * H + head).to(tl.int64) * T + node) * (3 + 2 * M + 2 * T)
    tl.store(line, beta, mask=is_node)
    tl.store(line + 1, from_state_l, mask=is_node)
    tl.store(line + 2, from_state_q, mask=is_node)
    past_at, past_mask = (line + 3)[:, None] + packed[None, :], nodes_2d & (packed < M)[None, :]
    tl.store(past_at, k_past * of_l[:, None] * of_rows, mask=past_mask)
    tl.store(past_at + M, q_past * of_q[:, None] * of_rows, mask=past_mask)
    nodes_at, nodes_mask = (line + 3 + 2 * M)[:, None] + node[None, :], nodes_2d & is_node[None, :]
    tl.store(nodes_at, _inverse(below, T), mask=nodes_mask)
    tl.store(nodes_at + T, q_nodes * of_q[:, None] * of_k[None, :], mask=nodes_mask)


@triton.jit
def _verify_kernel(
    convolved,  # [b, T, 2*G*N + H*P]: queries, keys, values
    weights,  # [b, H, T, 3 + 2*M + 2*T]
    decayed,  # [b, H, 2*T, N] float32, if CHANNELS
    row_u,  # [R, W, H*P]
    state,  # [slots, H, P, N]
    y,  # [b, T, H*P]
    slots,
    state_slots,
    journal,  # [b, M]
    journal_len,
    rows,  # [b, T]
    fold,  # [b]: whether the journal is already in the state; None: nowhere
    T,
    W,
    M,
    state_stride,
    H: tl.constexpr,
    P: tl.constexpr,
    G: tl.constexpr,
    N: tl.constexpr,
    TP: tl.constexpr,  # nodes, padded; 1: a plain step
    JP: tl.constexpr,  # rows of a journal, padded
    TILE: tl.constexpr,  # values of a head
    CHANNELS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Some values of a head of a request; tiles are transposed, [TILE, nodes]."""
    KEYS: tl.constexpr = G * N
    WIDTH: tl.constexpr = 2 * KEYS + H * P
    first = tl.program_id(0) * TILE  # of the flat H*P
    request = tl.program_id(1)
    head = first // P
    channel = first + tl.arange(0, TILE)
    n, node, packed = tl.arange(0, N), tl.arange(0, TP), tl.arange(0, JP)

    state += tl.load(state_slots + request).to(tl.int64) * state_stride
    stored = tl.load(state + channel[:, None] * N + n[None, :])  # takes longest
    row_u += tl.load(slots + request).to(tl.int64) * W * (H * P)
    length = _journal_length(journal_len, fold, request)
    is_node, valid = node < T, packed < length
    own = tl.load(rows + request * T + node, mask=is_node, other=0).to(tl.int32)
    row = tl.load(journal + request * M + packed, mask=valid, other=0).to(tl.int32)
    u_at = channel[:, None] + (row * (H * P))[None, :]
    u_rows = tl.load(row_u + u_at, mask=valid[None, :], other=0.0)
    previous_done(OVERLAP)

    first_node = request.to(tl.int64) * T
    LINE = 3 + 2 * M + 2 * T
    line = weights + (request * H + head).to(tl.int64) * T * LINE
    nodes = (first_node + node) * (H * P)
    of_tree = convolved + first_node * WIDTH
    if CHANNELS:  # query, key; query, key; …
        q_at, lower, to_next = decayed + (request * H + head).to(tl.int64) * 2 * T * N, N, 2 * N
    else:
        q_at, lower, to_next = of_tree + head // (H // G) * N, KEYS, WIDTH
    if TP == 1:
        v = tl.load(of_tree + 2 * KEYS + channel).to(tl.float32)
        k_n, q_n = tl.load(q_at + lower + n).to(tl.float32), tl.load(q_at + n).to(tl.float32)
        wide = stored.to(tl.float32)
        l_past = tl.load(line + 3 + packed, mask=valid, other=0.0)[None, :]
        q_past = tl.load(line + 3 + M + packed, mask=valid, other=0.0)[None, :]
        u = v * tl.load(line) - tl.sum(wide * k_n[None, :], 1) * tl.load(line + 1)
        u -= tl.sum(u_rows * l_past, 1)
        o = tl.sum(wide * q_n[None, :], 1) * tl.load(line + 2) + tl.sum(u_rows * q_past, 1)
        o += u * tl.load(line + 4 + 2 * M)
        u, o = u[:, None], o[:, None]
    else:
        both = tl.arange(0, 2 * TP)  # query, key; query, key; …
        both_at = q_at + (both // 2) * to_next + (both % 2) * lower
        read = tl.load(both_at[None, :] + n[:, None], mask=(both < 2 * T)[None, :], other=0.0)
        read = split_dot(stored, read, tl.zeros([TILE, 2 * TP], tl.float32), "tf32x3")
        q_state, k_state = tl.split(tl.reshape(read, [TILE, TP, 2]))
        v_at = of_tree + 2 * KEYS + channel[:, None] + (node * WIDTH)[None, :]
        v = tl.load(v_at, mask=is_node[None, :], other=0.0).to(tl.float32)
        of_node = line + node * LINE
        beta = tl.load(of_node, mask=is_node, other=0.0)
        from_state_l = tl.load(of_node + 1, mask=is_node, other=0.0)
        from_state_q = tl.load(of_node + 2, mask=is_node, other=0.0)
        past_at = (of_node + 3)[None, :] + packed[:, None]
        in_past = valid[:, None] & is_node[None, :]
        above_at = (of_node + 3 + 2 * M)[None, :] + node[:, None]
        in_tree = is_node[:, None] & is_node[None, :]
        l_past = tl.load(past_at, mask=in_past, other=0.0)  # [JP, TP]
        q_past = tl.load(past_at + M, mask=in_past, other=0.0)
        inverse = tl.load(above_at, mask=in_tree, other=0.0)  # [TP, TP]
        q_nodes = tl.load(above_at + T, mask=in_tree, other=0.0)
        known = v * beta[None, :] - k_state * from_state_l[None, :] - float32_dot(u_rows, l_past)
        u = float32_dot(known, inverse)
        o = float32_dot(u_rows, q_past, q_state * from_state_q[None, :])
        o = float32_dot(u, q_nodes, o)
    tl.store(row_u + channel[:, None] + (own * (H * P))[None, :], u, mask=is_node[None, :])
    tl.store(y + channel[:, None] + nodes[None, :], o, mask=is_node[None, :])


class Config(NamedTuple):
    """How the work on values is divided. The result depends on it by rounding only."""

    tile: int  # values of a head per program
    warps: int


def choose_config(head_dim: int, nodes: int) -> Config:
    """For Hopper; measured with benchmark/kernels/bench_delta_rule.py."""
    widest = head_dim & -head_dim  # the widest power of two that divides a head's values
    return Config(min(32, widest), 2) if nodes == 1 else Config(min(64, widest), 4)


def tree_verify(
    rows: DeltaRows,
    gates: Tensor,
    convolved: Tensor,
    state: Tensor,
    step: TreeLayout,
    sizes: Sizes,
    eps: float,
    config: Config | None = None,
) -> Tensor:
    """Outputs of all nodes; their rows are written, the state is not.

    On Hopper it starts before the previous kernel has ended. That kernel may write ``gates`` and
    ``convolved``, but neither the state, nor journals' rows, nor the step's indices.

    Args:
        rows: of one layer, contiguous.
        gates: [b*T, H + H], or [b*T, H*N + H] with a decay per channel; float32, contiguous.
        convolved: [b, T, 2*G*N + H*P], contiguous: queries, keys and values.
        state: [slots, H, P, N], of one layer, contiguous.
        step: where it folds, the state already has the journal (``fold_journals``).
        eps: added to the squared norms of queries and keys.
    Returns: [b*T, H*P], dtype of ``convolved``.
    Raises: ValueError for trees of more than 64 nodes.
    """
    (b, T), H, P = step.rows.shape, sizes.heads, sizes.head_dim
    if T > MAX_NODES:
        raise ValueError(f"a tree of {T} nodes: at most {MAX_NODES} are supported")
    M = step.journal.shape[1]
    padded, journal = max(16, next_power_of_2(T)), max(16, next_power_of_2(M))
    form = {"JP": journal, "CHANNELS": has_channel_decay(rows, sizes)}
    form |= {**sizes.constants, **overlapping(state.device)}
    made = _node_weights(rows, gates, convolved, step, {**form, "TP": padded, "EPS": eps})
    y = torch.empty(b * T, H * P, dtype=convolved.dtype, device=convolved.device)
    if config is None and gluon.supports(rows, convolved, state, step, sizes):
        kernel, (tile, warps) = gluon.verify_kernel, (gluon.TILE, gluon.WARPS)
        nodes = max(4, next_power_of_2(T))
    else:
        kernel, (tile, warps) = _verify_kernel, config or choose_config(P, T)
        nodes = 1 if T == 1 else padded
    kernel[(H * P // tile, b)](
        *(convolved, *made, rows.u, state, y, *step.up_to_rows, step.fold),
        *(T, rows.u.shape[1], M, state.stride(0)),
        TP=nodes,
        TILE=tile,
        num_warps=warps,
        **form,
    )
    return y


class NodeWeights(NamedTuple):
    """What does not depend on values, of each head."""

    lines: Tensor  # [b, H, T, 3 + 2*M + 2*T] float32
    decayed: Tensor | None  # [b, H, 2*T, N] float32: queries and keys, where channels decay


def _node_weights(
    rows: DeltaRows, gates: Tensor, convolved: Tensor, step: TreeLayout, form: dict[str, Any]
) -> NodeWeights:
    """Also writes the nodes' gates and keys to their rows. form: of ``_weights_kernel``."""
    (b, T), M, (H, N) = step.rows.shape, step.journal.shape[1], (form["H"], form["N"])
    lines = gates.new_empty(b, H, T, 3 + 2 * M + 2 * T)
    decayed = gates.new_empty(b, H, 2 * T, N) if form["CHANNELS"] else None
    _weights_kernel[(H, b)](
        *(gates, convolved, rows.gates, rows.keys, lines, decayed, step.slots, step.journal),
        *(step.journal_len, step.rows, step.ancestors, step.fold),
        *(T, rows.u.shape[1], M),
        PART=min(32 if form["CHANNELS"] else 128, N),
        # several programs of few warps hide each other's waits
        num_warps=4 if b * H <= PROCESSORS else 2 if b * H <= 4 * PROCESSORS else 1,
        **form,
    )
    return NodeWeights(lines, decayed)
