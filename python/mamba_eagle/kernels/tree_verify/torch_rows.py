"""The index work of rows and folds in torch: triton_rows.py's two launches, step by step."""

from __future__ import annotations

import torch
from torch import Tensor

from mamba_eagle.kernels.tree_verify.layout import Paths, Room, TreeLayout, pack_ancestors


def free_rows(path: Tensor, length: Tensor, history: int, rows: int, count: int) -> Tensor:
    """The lowest ``count`` rows that are neither the journal's nor serve as history.

    path: [b, K-1 + rows or more] and length: [b], of each request -> [b, count] int64.
    """
    path = path[:, : history + rows]
    used = torch.arange(history + rows, device=path.device) < (history + length)[:, None]
    # history places below K-1 are no rows
    taken = torch.where(used & (path >= history), path - history, rows)
    marks = torch.zeros(len(path), rows + 1, dtype=torch.int8, device=path.device)
    marks.scatter_(1, taken, 1)
    return marks[:, :rows].argsort(dim=1, stable=True)[:, :count]


def begin_rows(
    slots: Tensor, parents: Tensor, ancestors: Tensor, paths: Paths, room: Room
) -> TreeLayout:
    """As triton_rows.begin_rows."""
    h, path, length = room.history, paths.path[slots], paths.journal_len[slots]
    offsets = torch.arange(h, device=slots.device)
    return TreeLayout(
        slots=slots,
        state_slots=paths.state_slot[slots],
        journal=path[:, h : h + room.max_journal] - h,
        journal_len=length,
        rows=free_rows(path, length, h, room.rows, parents.shape[1]),
        parents=parents,
        ancestors=pack_ancestors(ancestors)[..., 0],
        tail=path.gather(1, length[:, None] + offsets),
        fold=length + room.accepts > room.max_journal,
    )


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
    """As triton_rows.accept_rows; what it leaves behind the accepted entries means nothing."""
    assert step.fold is not None
    h, slots, fold = room.history, step.slots, step.fold[:, None]
    # a journal's last row; of an empty journal any, whose feature is not taken
    last = step.journal.gather(1, (step.journal_len - 1).clamp(min=0)[:, None])[:, 0].clamp(min=0)
    moved = fold & (step.journal_len > 0)[:, None]
    made, before = feature[slots, last], saved[step.state_slots]
    saved[step.state_slots] = torch.where(moved, made, before)
    feature[slots[:, None], step.rows] = features.to(feature.dtype)

    offsets = torch.arange(h, device=slots.device)
    history = paths.path[slots[:, None], offsets]
    paths.path[slots[:, None], offsets] = torch.where(fold, step.tail, history)
    ends = torch.where(step.fold, 0, step.journal_len)
    columns = h + ends[:, None] + torch.arange(nodes.shape[1], device=slots.device)
    paths.path[slots[:, None], columns] = step.rows.gather(1, nodes) + h
    paths.journal_len[slots] = ends + count
