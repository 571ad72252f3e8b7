"""Which rows the nodes of a step take, and which of them stay: the index work of rows and folds.

Each request has one program; accepting has one more for each block of its features. layout.py says
what ``path`` is, and naive_rows.py what is chosen.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mamba_eagle.kernels.gpu import cdiv, next_power_of_2
from mamba_eagle.kernels.tree_verify.layout import Paths, Room, TreeLayout


# not specialized: other numbers of nodes or rows should not need new machine code
@triton.jit(do_not_specialize=["T", "W", "M", "accepts"])
def _begin_kernel(
    slots,  # [b]
    ancestors,  # [b, T, T] uint8
    state_slot,  # [R]
    path,  # [R, PLACES]
    journal_len,  # [R]
    state_slots,  # [b]
    journal,  # [b, M]
    length_out,  # [b]
    rows,  # [b, T]
    masks,  # [b, T]
    tail,  # [b, HISTORY]
    fold,  # [b] uint8
    T,
    W,
    M,
    accepts,
    PLACES,
    request_stride,
    node_stride,
    member_stride,
    HISTORY: tl.constexpr,
    HP: tl.constexpr,  # HISTORY, padded
    TP: tl.constexpr,  # T, padded
    MP: tl.constexpr,  # M, padded
    WP: tl.constexpr,  # W, padded
):
    request = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + request)
    length = tl.load(journal_len + slot)
    path += slot * PLACES
    tl.store(state_slots + request, tl.load(state_slot + slot))
    tl.store(length_out + request, length)
    tl.store(fold + request, (length + accepts > M).to(tl.uint8))

    at = tl.arange(0, MP)
    place = tl.load(path + HISTORY + at, mask=at < M, other=HISTORY)
    tl.store(journal + request * M + at, place - HISTORY, mask=at < M)
    at = tl.arange(0, HP)
    place = tl.load(path + length + at, mask=at < HISTORY, other=0)
    tl.store(tail + request * HISTORY + at, place, mask=at < HISTORY)

    # taken: rows of the journal or of the history (places below HISTORY are not rows)
    row = tl.arange(0, WP)
    taken = tl.zeros([WP], tl.int32)
    for first in tl.range(0, HISTORY + length.to(tl.int32), 16):
        column = first + tl.arange(0, 16)
        used = tl.load(path + column, mask=column < HISTORY + length, other=0) - HISTORY
        taken += tl.sum((row[:, None] == used[None, :]).to(tl.int32), 1)
    free = ((taken == 0) & (row < W)).to(tl.int32)
    # free rows come first, in rising order
    behind = tl.where(row < W, 1 - free, 0)
    order = tl.where(free > 0, tl.cumsum(free, 0), tl.sum(free, 0) + tl.cumsum(behind, 0)) - 1
    chosen = (row < W) & (order < T)
    tl.store(rows + request * T + order, row.to(tl.int64), mask=chosen)

    node = tl.arange(0, TP)
    inside = (node < T)[:, None] & (node < T)[None, :]
    pair = node[:, None] * node_stride + node[None, :] * member_stride
    above = tl.load(ancestors + request * request_stride + pair, mask=inside, other=0)
    mask = tl.sum(above.to(tl.int64) << node.to(tl.int64)[None, :], 1)
    tl.store(masks + request * T + node, mask, mask=node < T)


def begin_rows(
    slots: Tensor, parents: Tensor, ancestors: Tensor, paths: Paths, room: Room
) -> TreeLayout:
    """Choose a free row for each node, and look up what all layers need to know of the step.

    A request whose journal might outgrow ``max_journal`` in this step folds.

    slots: [b] int64; parents: [b, T] int64; ancestors: [b, T, T] bool; T at most 64.
    """
    b, T = parents.shape

    def integers(*shape: int) -> Tensor:
        return torch.empty(*shape, dtype=torch.int64, device=slots.device)

    step = TreeLayout(
        slots=slots,
        state_slots=integers(b),
        journal=integers(b, room.max_journal),
        journal_len=integers(b),
        rows=integers(b, T),
        parents=parents.contiguous(),
        ancestors=integers(b, T),
        tail=integers(b, room.history),
        fold=torch.empty(b, dtype=torch.bool, device=slots.device),
    )
    assert step.fold is not None
    _begin_kernel[(b,)](
        *(slots, ancestors.view(torch.uint8), *paths, step.state_slots, step.journal),
        *(step.journal_len, step.rows, step.ancestors, step.tail, step.fold.view(torch.uint8)),
        *(T, room.rows, room.max_journal, room.accepts, paths.path.shape[1], *ancestors.stride()),
        HISTORY=room.history,
        HP=next_power_of_2(room.history),
        TP=next_power_of_2(T),
        MP=next_power_of_2(room.max_journal),
        WP=next_power_of_2(room.rows),
        num_warps=1 if T <= 16 and room.rows <= 64 else 4,
    )
    return step


@triton.jit(do_not_specialize=["T", "W", "M"])
def _accept_kernel(
    slots,  # [b]
    state_slots,  # [b]
    journal,  # [b, M]
    lengths,  # [b], before the step
    rows,  # [b, T]
    tail,  # [b, HISTORY]
    fold,  # [b] uint8
    nodes,  # [b, D]
    count,  # [b]
    path,  # [R, PLACES]
    journal_len,  # [R]
    feature,  # [R, W, F]
    saved,  # [state slots, F]
    features,  # [b, T, F]
    T,
    W,
    M,
    F,
    PLACES,
    request_stride,
    node_stride,
    D: tl.constexpr,
    DP: tl.constexpr,  # D, padded
    HISTORY: tl.constexpr,
    HP: tl.constexpr,  # HISTORY, padded
    BLOCK: tl.constexpr,
):
    block = tl.program_id(0) - 1
    request = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + request)
    length = tl.load(lengths + request)
    folds = tl.load(fold + request) != 0
    kept = tl.load(count + request)
    if block < 0:
        path += slot * PLACES
        at = tl.arange(0, HP)
        is_tail = at < tl.where(folds, HISTORY, 0)
        place = tl.load(tail + request * HISTORY + at, mask=is_tail, other=0)
        tl.store(path + at, place, mask=is_tail)
        end = tl.where(folds, 0, length)
        step = tl.arange(0, DP)
        accepted = step < kept
        node = tl.load(nodes + request * D + step, mask=accepted, other=0)
        row = tl.load(rows + request * T + node, mask=accepted, other=0)
        tl.store(path + HISTORY + end + step, row + HISTORY, mask=accepted)
        tl.store(journal_len + slot, end + kept)
    else:
        column = block * BLOCK + tl.arange(0, BLOCK)
        inside = column < F
        if folds & (length > 0):
            last = tl.load(journal + request * M + length - 1)
            made = tl.load(feature + (slot * W + last) * F + column, mask=inside)
            state_slot = tl.load(state_slots + request)
            tl.store(saved + state_slot * F + column, made, mask=inside)
        for i in tl.range(0, kept.to(tl.int32)):
            source = tl.load(nodes + request * D + i)
            target = tl.load(rows + request * T + source)
            given = features + request * request_stride + source * node_stride
            new = tl.load(given + column, mask=inside)
            tl.store(feature + (slot * W + target) * F + column, new, mask=inside)


def accept_rows(
    step: TreeLayout,
    nodes: Tensor,
    count: Tensor,
    paths: Paths,
    room: Room,
    feature: Tensor,
    saved: Tensor,
    features: Tensor,
) -> None:
    """The rows of the accepted nodes join the paths; journals that were folded are emptied.

    Args:
        step: from ``begin_rows``; nodes: [b, D] int64; count: [b] int64.
        feature: [R, W, F], of the rows; saved: [state slots, F], which gets the feature of the last
            row of each folded journal; features: [b, T, F], of the nodes, any float dtype.
    """
    b, D = nodes.shape
    T, F = step.rows.shape[1], feature.shape[2]
    assert step.fold is not None
    features = features if F == 0 or features.stride(2) == 1 else features.contiguous()
    block = min(1024, next_power_of_2(max(F, 1)))
    _accept_kernel[(1 + cdiv(F, block), b)](
        *(*step.up_to_rows, step.tail, step.fold.view(torch.uint8), nodes, count),
        *(paths.path, paths.journal_len, feature, saved, features),
        *(T, room.rows, room.max_journal, F, paths.path.shape[1], *features.stride()[:2]),
        D=D,
        DP=next_power_of_2(D),
        HISTORY=room.history,
        HP=next_power_of_2(room.history),
        BLOCK=block,
        num_warps=4,
    )
