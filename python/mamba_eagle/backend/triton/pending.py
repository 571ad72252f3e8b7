"""Pending entries of a drafter on a GPU: one kernel takes entries, another appends them."""

from __future__ import annotations

import torch
from torch import Tensor

from mamba_eagle.backend.pending import PendingEntries, Taken
from mamba_eagle.kernels.accept.triton_pending import append_pending, rows_of, take_pending
from mamba_eagle.tree.accept import Truncated


class TritonPendingEntries(PendingEntries):
    def take(self, slots: Tensor, counts: Tensor | None, longest: int) -> Taken:
        b, table = len(slots), self.table
        nodes, tokens, own, positions = (slots.new_empty(b, longest) for _ in range(4))
        finished = torch.empty(b, dtype=torch.bool, device=slots.device)
        accepted = Truncated(nodes, tokens, slots.new_empty(b), finished)
        taken = Taken(accepted, slots.new_empty(b), own, positions)
        tables = (table.remaining, self.processed, self.pending, self.tokens, table.kv_slots)
        take_pending(slots, counts, *tables, self.padding_slot, *accepted, *taken[1:])
        return taken

    def _rows_of(self, features: Tensor, nodes: Tensor) -> Tensor:
        return rows_of(features, nodes)

    def _append(self, slots: Tensor, accepted: Truncated, entries: Tensor) -> None:
        new = (accepted.tokens, accepted.count, entries)
        append_pending(slots, *new, self.tokens, self.features, self.pending)
