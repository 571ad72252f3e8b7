"""Which rows are free, in torch."""

from __future__ import annotations

import torch
from torch import Tensor


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
