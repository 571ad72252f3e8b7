"""tree_verify and fold of torch.py in one pass over the state; rows and states are read in place.

A program owns a tile of a request: TILE of the H*P channels with all N numbers of each. Tiles are
powers of two; P need not be one, so a tile may lie in two heads (of 80 channels, 4 heads are 5
tiles of 64) and then uses the weights of both. In a step in which requests may fold, those that do
are left to a second launch, whose other programs end at once.

Precision: rows of 16 bits are exact factors, what multiplies them is split into two 16-bit numbers
(to 2**-16), and S0·C takes S0 in tf32. With float32 rows every product consists of three tf32
products. Sums are float32.

Nothing here waits for the device, and the grid depends on the batch alone.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mamba_eagle.kernels.gpu import next_power_of_2, overlapping
from mamba_eagle.kernels.state_rounding.triton import round_state
from mamba_eagle.kernels.tree_verify.layout import RowBuffers, Sizes, TreeLayout
from mamba_eagle.kernels.triton_math import (
    dual_weights,
    end_shares,
    exact_dot,
    previous_done,
    split_dot,
)


class Config(NamedTuple):
    """How the work is divided; the result does not depend on it."""

    tile: int  # channels: a power of two, at least 16, at most P; divides those of a group
    early: bool = False  # read the state before the previous kernel has ended


@triton.jit
def _is_mine(fold, request, length, FOLDING: tl.constexpr):
    """Whether this launch handles the request: those that fold have a launch of their own."""
    mine = True
    if fold is not None:
        folding = (tl.load(fold + request) != 0) & (length > 0)
        mine = folding == FOLDING
    return mine


# not specialized: layers 1 and 16 should not need new machine code
@triton.jit(do_not_specialize=["layer"])
def _tree_verify_kernel(
    xB,  # [R, W, H*P + G*N]
    dt,  # [R, W, H]
    log_decay,  # [R, W, H]
    C,  # [b, T, G*N]
    D,  # [H]
    state,  # [slots, H, P, N]
    after_journal,  # state again, to be written: with one pointer, addresses would take registers
    y,  # [b, T, H*P]
    slots,
    state_slots,
    journal,  # [b, M]
    journal_len,
    rows,  # [b, T]
    ancestors,  # [b, T]
    fold,
    round_keys,  # [b]; None: to nearest
    layer,
    T,
    W,
    M,
    state_stride,
    H: tl.constexpr,
    P: tl.constexpr,
    G: tl.constexpr,
    N: tl.constexpr,
    TP: tl.constexpr,  # nodes, padded
    J: tl.constexpr,  # packed rows [tree ; journal], padded
    TILE: tl.constexpr,  # channels of the flat H*P, at most P: a tile lies in one head or in two
    FOLDING: tl.constexpr,  # handles the requests that fold; otherwise the ones that don't
    EARLY: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    TWO_HEADS: tl.constexpr = P % TILE != 0
    WIDTH: tl.constexpr = H * P + G * N
    first = tl.program_id(0) * TILE
    request = tl.program_id(1)
    group = first // (H // G * P)

    if not EARLY:
        previous_done(OVERLAP)
    length = tl.load(journal_len + request).to(tl.int32)
    if not _is_mine(fold, request, length, FOLDING):
        if EARLY:
            previous_done(OVERLAP)
        return
    state_slot = tl.load(state_slots + request).to(tl.int64)
    state += state_slot * state_stride
    after_journal += state_slot * state_stride
    n = tl.arange(0, N)
    in_tile = tl.arange(0, TILE)[:, None] * N + n[None, :]
    before = tl.load(state + first * N + in_tile)  # [TILE, N], the load that takes longest
    if EARLY:
        previous_done(OVERLAP)

    node = tl.arange(0, TP)
    packed = tl.arange(0, J)
    valid_nodes = node < T
    is_node = packed < T
    slot = tl.load(slots + request).to(tl.int64)
    node_row = tl.load(rows + request * T + packed, mask=is_node, other=0)
    in_table = (packed >= T) & (packed < T + M)
    journal_row = tl.load(journal + request * M + packed - T, mask=in_table, other=0)
    own_row = tl.load(rows + request * T + node, mask=valid_nodes, other=0).to(tl.int32)
    bits = tl.load(ancestors + request * T + node, mask=valid_nodes, other=0)
    in_journal = in_table & (packed < T + length)
    valid_rows = is_node | in_journal
    row = tl.where(in_journal, journal_row, tl.where(is_node, node_row, 0)).to(tl.int32)
    above = (bits[None, :] >> tl.minimum(packed, 63).to(tl.int64)[:, None]) & 1
    visible = ((above != 0) & is_node[:, None]) | in_journal[:, None]  # [J, TP]
    own = packed[:, None] == node[None, :]
    if FOLDING:
        last_row = tl.sum(tl.where(packed == T + length - 1, row, 0))

    xB += slot * W * WIDTH
    dt += slot * W * H
    log_decay += slot * W * H
    y += request.to(tl.int64) * T * (H * P)

    C_rows = C + (request * T + node) * (G * N) + group * N
    C_nodes = tl.load(C_rows[:, None] + n[None, :], mask=valid_nodes[:, None], other=0.0)
    B_rows = xB + row * WIDTH + H * P + group * N
    B = tl.load(B_rows[:, None] + n[None, :], mask=valid_rows[:, None], other=0.0)  # [J, N]
    C_nodes = tl.trans(C_nodes)  # [N, TP]
    scores = exact_dot(B, C_nodes, tl.zeros([J, TP], tl.float32), PRECISION)
    if C_nodes.dtype != state.dtype.element_ty:
        C_nodes = C_nodes.to(tl.float32)

    channel = first + tl.arange(0, TILE)  # of the flat H*P
    head = first // P
    x_rows = xB + row * WIDTH
    x = tl.load(x_rows[:, None] + channel[None, :], mask=valid_rows[:, None], other=0.0)
    step = tl.load(dt + row * H + head, mask=valid_rows, other=0.0)
    row_log = tl.load(log_decay + row * H + head, mask=valid_rows, other=0.0)
    node_log = tl.load(log_decay + own_row * H + head, mask=valid_nodes, other=0.0)
    skip = tl.load(D + head)
    if FOLDING:  # the nodes' L counts from the end of the journal
        end_log = tl.load(log_decay + last_row * H + head)
        row_log += tl.where(is_node, end_log, 0.0)
        node_log += end_log
    if TWO_HEADS:
        head_2 = (first + TILE - 1) // P
        in_first = channel < (head + 1) * P
        step_2 = tl.load(dt + row * H + head_2, mask=valid_rows, other=0.0)
        row_log_2 = tl.load(log_decay + row * H + head_2, mask=valid_rows, other=0.0)
        node_log_2 = tl.load(log_decay + own_row * H + head_2, mask=valid_nodes, other=0.0)
        skip_2 = tl.load(D + head_2)
        if FOLDING:
            end_log_2 = tl.load(log_decay + last_row * H + head_2)
            row_log_2 += tl.where(is_node, end_log_2, 0.0)
            node_log_2 += end_log_2

    weights = dual_weights(row_log, node_log, step, skip, scores, visible, own)
    node_decay = tl.exp(node_log)[None, :]

    added = tl.zeros([TILE, TP], tl.float32)
    added = split_dot(tl.trans(x), weights, added, PRECISION)  # [TILE, TP]
    if TWO_HEADS:
        weights = dual_weights(row_log_2, node_log_2, step_2, skip_2, scores, visible, own)
        added_2 = tl.zeros([TILE, TP], tl.float32)
        added_2 = split_dot(tl.trans(x), weights, added_2, PRECISION)
        added = tl.where(in_first[:, None], added, added_2)
        node_decay = tl.where(in_first[:, None], node_decay, tl.exp(node_log_2)[None, :])

    from_state = tl.zeros([TILE, TP], tl.float32)
    from_state = exact_dot(before.to(C_nodes.dtype), C_nodes, from_state, PRECISION)
    outputs = y + node[None, :] * (H * P) + channel[:, None]
    tl.store(outputs, added + node_decay * from_state, mask=valid_nodes[None, :])

    if FOLDING:
        share = end_shares(row_log, end_log, step, in_journal)[:, None]
        decay = tl.exp(end_log)
        if TWO_HEADS:
            share_2 = end_shares(row_log_2, end_log_2, step_2, in_journal)[:, None]
            share = tl.where(in_first[None, :], share, share_2)
            decay = tl.where(in_first, decay, tl.exp(end_log_2))[:, None]
        dtx = tl.trans(x.to(tl.float32) * share)  # [TILE, J]
        gained = split_dot(dtx, B, tl.zeros([TILE, N], tl.float32), PRECISION)
        after = before.to(tl.float32) * decay + gained
        if round_keys is not None:
            key, place = tl.load(round_keys + request), first * N + in_tile
            after = round_state(after, key, layer, place, state.dtype.element_ty)
        tl.store(after_journal + first * N + in_tile, after)


def channel_tiles(sizes: Sizes) -> list[int]:
    """Tile widths that divide a group's channels and span two heads at most, the widest last.

    Raises: ValueError where there is none.
    """
    channels = sizes.heads // sizes.groups * sizes.head_dim
    fitting = [t for t in (16, 32, 64) if t <= sizes.head_dim and channels % t == 0]
    if not fitting:
        raise ValueError(
            f"{channels} channels per group, {sizes.head_dim} per head: must be a multiple of 16 "
            "per group, and at least 16 per head"
        )
    return fitting


def choose_config(batch: int, nodes: int, rows: int, sizes: Sizes) -> Config:
    """In a small batch programs start by loading their tile."""
    tile = channel_tiles(sizes)[-1]
    if sizes.state_size > 128 and nodes + rows > 64:
        return Config(min(32, tile))
    return Config(tile, early=batch * sizes.heads * sizes.head_dim // tile < 512)


def tree_verify(
    buffers: RowBuffers,
    C: Tensor,
    D: Tensor,
    state: Tensor,
    step: TreeLayout,
    sizes: Sizes,
    config: Config | None = None,
    layer: int = 0,
) -> Tensor:
    """Outputs of all nodes, ``D x`` included; where ``step.fold`` is set, S0 is folded in place.

    On Hopper it starts before the previous kernel has ended. That kernel may write rows and C, as
    causal_conv/triton.py does, but neither the state nor the step's indices.

    Args:
        buffers: contiguous; the nodes' rows are already filled (see causal_conv/triton.py).
        C: [b, T, G*N], dtype of the rows; D: [H] float32.
        state: [slots, H, P, N], the layer's part of the pool, contiguous.
        config: for all launches; None: ``choose_config``.
        layer: part of the key of the noise that rounds a folded state (``step.round_keys``).
    Returns: [b*T, H*P], dtype of the rows.
    """
    (b, T), M, W = step.rows.shape, step.journal.shape[1], buffers.xB.shape[1]
    if T > 64:
        raise ValueError(f"a tree of {T} nodes: at most 64 are supported")
    config = config or choose_config(b, T, M, sizes)
    channels = sizes.heads * sizes.head_dim
    y = torch.empty(b * T, channels, dtype=buffers.xB.dtype, device=C.device)
    # two launches instead of a branch: folding would take registers from the other side, and ptxas
    # 12.8 mixes up shared memory addresses where both sides of a branch multiply
    for folding in (False,) if step.fold is None else (False, True):
        _tree_verify_kernel[(channels // config.tile, b)](
            *(*buffers, C, D, state, state, y, *step.up_to_rows, step.ancestors, step.fold),
            *(step.round_keys if folding else None, layer, T, W, M, state.stride(0)),
            **sizes.constants,
            TP=max(16, next_power_of_2(T)),
            J=max(16, next_power_of_2(T + M)),
            TILE=config.tile,
            FOLDING=folding,
            EARLY=config.early,
            PRECISION="tf32" if buffers.xB.dtype != torch.float32 else "tf32x3",
            num_warps=4,
            **overlapping(C.device),
        )
    return y
