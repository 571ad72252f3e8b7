"""tree_verify and fold of naive.py in one pass over the state, rows and state read in place.

A program owns some heads of one group of one request. It forms C·Bᵀ once, and then, a head at a
time, streams the head's state through the tensor cores while the next one is on its way. P is cut
into pieces that are powers of two (80 = 64 + 16), so that no lane and no byte is wasted.

Precision: rows of 16 bits are exact operands, what multiplies them is split into two such numbers
(16 bits of mantissa), and C·S0 takes S0 in tf32. With float32 rows every product is made of three
tf32 ones. Sums are float32.

Nothing here waits for the device, and the grid depends on the batch alone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class Sizes(NamedTuple):
    """Of one Mamba2 layer: H heads of P channels, G groups, N state size."""

    heads: int
    head_dim: int
    groups: int
    state_size: int


class RowBuffers(NamedTuple):
    """The row buffers of all request slots in one layer; R slots, W rows."""

    xB: Tensor  # [R, W, H*P + G*N] after convolution and SiLU
    dt: Tensor  # [R, W, H] float32, after softplus and clamp
    log_decay: Tensor  # [R, W, H] float32: L, the sum of dt·A from the checkpoint to the row


class TreeStep(NamedTuple):
    """What all layers read of a verify step: b requests, T <= 64 nodes, at most M chain rows.

    A node's parent comes before it and node 0 is the root. ``fold`` asks for the state after the
    chain to be written to S0 in this step. Nodes of such a request keep an L that starts at the
    new checkpoint: afterwards its chain must be emptied, and then the accepted nodes appended.
    """

    slots: Tensor  # [b] int64: the request's slot in the row buffers
    checkpoints: Tensor  # [b] int64: its checkpoint's slot in the state pool
    chain: Tensor  # [b, M] int64 row ids, oldest first; what is past chain_len is not looked at
    chain_len: Tensor  # [b] int64
    rows: Tensor  # [b, T] int64: a free row for each node
    parents: Tensor  # [b, T] int64
    ancestors: Tensor  # [b, T] int64: bit j says that node j is node i or above it
    tail: Tensor  # [b, K-1] int64: places in conv_in of the last K-1 tokens, oldest first
    fold: Tensor | None = None  # [b] bool


class Config(NamedTuple):
    """How the work is cut; the result does not depend on it."""

    heads: int  # a program; divides the heads of a group
    warps: int
    stages: int  # states on their way


def ancestor_bits(ancestors: Tensor) -> Tensor:
    """[b, T, T] bool -> [b, T] int64, bit j of entry i: ancestors[:, i, j]."""
    bits = torch.ones_like(ancestors[0, 0], dtype=torch.int64).cumsum(0) - 1
    return (ancestors.to(torch.int64) << bits).sum(2)


@triton.jit
def _dot_split(a, b, acc, PRECISION: tl.constexpr):
    """acc + a·b for a float32 factor a and an exact factor b."""
    if b.dtype == tl.float32:
        return tl.dot(a, b, acc, input_precision=PRECISION)
    else:
        high = a.to(b.dtype)
        low = (a - high.to(tl.float32)).to(b.dtype)
        return tl.dot(low, b, tl.dot(high, b, acc))


@triton.jit
def _piece(
    x_rows,  # pointers to the head's x in each row, [J]
    state,  # pointer to the head's state
    y_rows,  # pointers to the head's outputs of each node, [TP]
    C,  # [TP, N] float32, or as the state if that has 16 bits
    B,  # [J, N]
    weights,  # [TP, J] float32
    node_decay,  # [TP] float32: exp(L)
    fold_weights,  # [J] float32
    fold_decay,
    folding,
    valid_rows,  # [J] bool
    valid_nodes,  # [TP] bool
    FIRST: tl.constexpr,
    LENGTH: tl.constexpr,
    N: tl.constexpr,
    FOLD: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Outputs, and the folded state, of channels FIRST … FIRST + LENGTH of a head."""
    p = FIRST + tl.arange(0, LENGTH)
    places = state + p[:, None] * N + tl.arange(0, N)[None, :]
    before = tl.load(places)  # [LENGTH, N]
    x = tl.load(x_rows[:, None] + p[None, :], mask=valid_rows[:, None], other=0.0)
    y = tl.dot(C, tl.trans(before.to(C.dtype)), input_precision=PRECISION)
    y = _dot_split(weights, x, y * node_decay[:, None], PRECISION)
    tl.store(y_rows[:, None] + p[None, :], y, mask=valid_nodes[:, None])
    if FOLD:
        if folding:
            added = tl.trans(x.to(tl.float32) * fold_weights[:, None])
            after = _dot_split(added, B, before.to(tl.float32) * fold_decay, PRECISION)
            tl.store(places, after)


@triton.jit
def _tree_verify_kernel(
    xB,  # [R, W, H*P + G*N]
    dt,  # [R, W, H]
    log_decay,  # [R, W, H]
    C,  # [b, T, G*N]
    D,  # [H]
    state,  # [slots, H, P, N]
    y,  # [b, T, H*P]
    slots,
    checkpoints,
    chain,  # [b, M]
    chain_len,
    rows,  # [b, T]
    ancestors,  # [b, T]
    fold,
    T,
    W,
    M,
    state_stride,
    H: tl.constexpr,
    P: tl.constexpr,
    G: tl.constexpr,
    N: tl.constexpr,
    TP: tl.constexpr,  # nodes, padded
    J: tl.constexpr,  # packed rows [tree ; chain], padded
    P0: tl.constexpr,  # the pieces of P
    P1: tl.constexpr,
    HEADS: tl.constexpr,
    FOLD: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    first_head = tl.program_id(0) * HEADS
    request = tl.program_id(1)
    group = first_head // (H // G)
    node = tl.arange(0, TP)
    packed = tl.arange(0, J)
    valid_nodes = node < T
    is_node = packed < T

    slot = tl.load(slots + request).to(tl.int64)
    checkpoint = tl.load(checkpoints + request).to(tl.int64)
    length = tl.load(chain_len + request).to(tl.int32)
    node_row = tl.load(rows + request * T + packed, mask=is_node, other=0)
    chain_row = tl.load(
        chain + request * M + packed - T, mask=(packed >= T) & (packed < T + M), other=0
    )
    own_row = tl.load(rows + request * T + node, mask=valid_nodes, other=0).to(tl.int32)
    bits = tl.load(ancestors + request * T + node, mask=valid_nodes, other=0)
    in_chain = (packed >= T) & (packed < T + length)
    valid_rows = is_node | in_chain
    row = tl.where(in_chain, chain_row, node_row).to(tl.int32)
    above = (bits[:, None] >> tl.minimum(packed, 63).to(tl.int64)[None, :]) & 1
    visible = ((above != 0) & is_node[None, :]) | in_chain[None, :]
    own = node[:, None] == packed[None, :]

    WIDTH: tl.constexpr = H * P + G * N
    xB += slot * W * WIDTH + first_head * P
    dt += slot * W * H + first_head
    log_decay += slot * W * H + first_head
    state += checkpoint * state_stride + first_head * (P * N)
    y += request.to(tl.int64) * T * (H * P) + first_head * P
    D += first_head

    n = tl.arange(0, N)
    C_rows = (request * T + node) * (G * N) + group * N
    C_nodes = tl.load(C + C_rows[:, None] + n[None, :], mask=valid_nodes[:, None], other=0.0)
    B_rows = row * WIDTH + (H * P - first_head * P + group * N)
    B_packed = tl.load(xB + B_rows[:, None] + n[None, :], mask=valid_rows[:, None], other=0.0)
    scores = tl.dot(C_nodes, tl.trans(B_packed), input_precision=PRECISION)  # [TP, J]
    if C_nodes.dtype != state.dtype.element_ty:
        C_nodes = C_nodes.to(tl.float32)

    folding = False
    last_row = 0
    if FOLD:
        folding = (tl.load(fold + request) != 0) & (length > 0)
        last_row = tl.sum(tl.where(packed == T + length - 1, row, 0))

    for i in tl.range(0, HEADS, num_stages=STAGES):
        step = tl.load(dt + row * H + i, mask=valid_rows, other=0.0)
        row_log = tl.load(log_decay + row * H + i, mask=valid_rows, other=0.0)
        node_log = tl.load(log_decay + own_row * H + i, mask=valid_nodes, other=0.0)
        skip = tl.load(D + i)
        fold_weights = step
        fold_decay = 1.0
        if FOLD:
            # a folded request's nodes count from the end of the chain
            end_log = tl.load(log_decay + last_row * H + i)
            end_log = tl.where(folding, end_log, 0.0)
            fold_weights = tl.exp(tl.where(in_chain, end_log - row_log, float("-inf"))) * step
            fold_decay = tl.exp(end_log)
            row_log = tl.where(is_node, row_log + end_log, row_log)
            node_log += end_log
        # masked before exp: the difference to an unrelated row may be large and positive
        gap = tl.where(visible, node_log[:, None] - row_log[None, :], float("-inf"))
        weights = tl.exp(gap) * step[None, :] * scores
        weights += tl.where(own, skip, 0.0)  # D x, with x being the node's own row
        node_decay = tl.exp(node_log)
        x_rows = xB + row * WIDTH + i * P
        y_rows = y + node * (H * P) + i * P
        head_state = state + i * (P * N)
        _piece(
            x_rows, head_state, y_rows, C_nodes, B_packed, weights, node_decay, fold_weights,
            fold_decay, folding, valid_rows, valid_nodes, 0, P0, N, FOLD, PRECISION,
        )  # fmt: skip
        if P1 > 0:
            _piece(
                x_rows, head_state, y_rows, C_nodes, B_packed, weights, node_decay, fold_weights,
                fold_decay, folding, valid_rows, valid_nodes, P0, P1, N, FOLD, PRECISION,
            )  # fmt: skip


def choose_config(batch: int, sizes: Sizes, fold: bool) -> Config:
    return Config(1, 4, 2)


def tree_verify(
    buffers: RowBuffers,
    C: Tensor,
    D: Tensor,
    state: Tensor,
    step: TreeStep,
    sizes: Sizes,
    config: Config | None = None,
) -> Tensor:
    """Outputs of all nodes, ``D x`` included; with ``step.fold`` also S0 after the chain, in place.

    Args:
        buffers: the nodes' rows are already there (see causal_conv.triton).
        C: [b, T, G*N], dtype of the rows; D: [H] float32.
        state: [slots, H, P, N], the layer's part of the pool.
    Returns: [b*T, H*P], dtype of the rows.
    """
    b, T = step.rows.shape
    H, P, G, N = sizes
    W, M = buffers.xB.shape[1], step.chain.shape[1]
    if T > 64:
        raise ValueError(f"a tree of {T} nodes: at most 64 are supported")
    config = config or choose_config(b, sizes, step.fold is not None)
    y = torch.empty(b * T, H * P, dtype=buffers.xB.dtype, device=C.device)
    piece = 1 << (P.bit_length() - 1)
    _tree_verify_kernel[(H // config.heads, b)](
        *buffers,
        C,
        D,
        state,
        y,
        step.slots,
        step.checkpoints,
        step.chain,
        step.chain_len,
        step.rows,
        step.ancestors,
        step.fold,
        T,
        W,
        M,
        state.stride(0),
        H=H,
        P=P,
        G=G,
        N=N,
        TP=max(16, triton.next_power_of_2(T)),
        J=max(16, triton.next_power_of_2(T + M)),
        P0=piece,
        P1=P - piece,
        HEADS=config.heads,
        FOLD=step.fold is not None,
        PRECISION="tf32" if buffers.xB.dtype != torch.float32 else "tf32x3",
        STAGES=config.stages,
        num_warps=config.warps,
    )
    return y
