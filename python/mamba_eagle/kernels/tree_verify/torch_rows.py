"""The index work of rows and folds, in torch: what triton_rows.py does in two launches."""

from __future__ import annotations

import torch
from torch import Tensor

from mamba_eagle.kernels.tree_verify.layout import Paths, Room, TreeLayout, pack_ancestors


def free_rows(path: Tensor, length: Tensor, history: int, rows: int, count: int) -> Tensor:
    """The lowest ``count`` rows that neither belong to the journal nor serve as history.

    path: [b, K-1 + rows or more]; length: [b], of the journal -> [b, count] int64.
    """
    path = path[:, : history + rows]
    used = torch.arange(history + rows, device=path.device) < (history + length)[:, None]
    # places below K-1 are history, not rows
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
    """As triton_rows.accept_rows. Path entries past the accepted ones are meaningless."""
    assert step.fold is not None
    h, slots, fold = room.history, step.slots, step.fold[:, None]
    # the journal's last row; of an empty journal any row, whose feature is not used
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
