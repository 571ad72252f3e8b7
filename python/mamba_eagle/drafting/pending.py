"""Entries that wait to be run by a drafter's network.

entries   0 ─────────── run ─────────────── run + pending
          in the caches     wait; the last is the root
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mamba_eagle.kernels import gpu
from mamba_eagle.runner.pools import RequestTable
from mamba_eagle.tree.accept import Truncated

UNTRACKED = -1  # in ``pending``: of an untracked request nothing waits, and nothing ever will


class Taken(NamedTuple):
    """Entries of b requests that are about to be run, E at most of each."""

    accepted: Truncated  # the first ``count`` of E in a row
    prefix: Tensor  # [b] int64: entries that were run before
    kv_slots: Tensor  # [b, E] int64; the bin where there is no entry
    positions: Tensor  # [b, E] int64


class PendingEntries:
    """By request slot. R slots, with room for ``width`` entries that wait."""

    def __init__(
        self, table: RequestTable, width: int, features: int, dtype: torch.dtype, padding_slot: int
    ) -> None:
        """padding_slot: the KV slot of what is no entry."""
        requests = table.processed.shape[0]
        self.table, self.padding_slot = table, padding_slot
        self.processed = torch.zeros_like(table.processed)  # entries in the caches
        self.pending = torch.zeros_like(table.processed)
        self.tokens = table.processed.new_zeros(requests, width)
        self.features = torch.zeros(
            requests, width, features, dtype=dtype, device=table.processed.device
        )

    def take(self, slots: Tensor, counts: Tensor | None, longest: int) -> Taken:
        """The first ``counts`` [b] entries of each request in ``slots`` [b], ``longest`` at most,
        are about to be run: ``run`` counts them at once. None: all that wait, of requests that
        have not ended, and they wait no longer."""
        taken = counts
        if taken is None:
            waiting = self.pending[slots].clamp(min=0)
            taken = torch.where(self.table.remaining[slots] > 0, waiting, 0)
            self.pending[slots] -= taken
        offsets = torch.arange(longest, device=slots.device)
        prefix = self.processed[slots]
        positions = prefix[:, None] + offsets
        own = self.table.kv_slots[slots[:, None], positions]
        own = torch.where(offsets < taken[:, None], own, self.padding_slot)
        nodes = torch.minimum(offsets, (taken - 1).clamp(min=0)[:, None])
        self.processed[slots] += taken
        tokens = self.tokens[slots, :longest]
        return Taken(Truncated(nodes, tokens, taken, taken == 0), prefix, own, positions)

    def append(self, slots: Tensor, accepted: Truncated, entries: Tensor) -> None:
        """Accepted tokens join those that wait. entries [b, D, F]: their features."""
        deep = accepted.tokens.shape[1]
        waiting = self.pending[slots]
        columns = waiting.clamp(min=0)[:, None] + torch.arange(deep, device=slots.device)
        # valid or not: hence there is room behind the most that may wait
        self.tokens[slots[:, None], columns] = accepted.tokens
        self.features[slots[:, None], columns] = entries.to(self.features.dtype)
        self.pending[slots] += torch.where(waiting < 0, 0, accepted.count)


class TritonPendingEntries(PendingEntries):
    """The same, a launch each."""

    def take(self, slots: Tensor, counts: Tensor | None, longest: int) -> Taken:
        from mamba_eagle.kernels.accept.triton_pending import take_pending  # needs triton

        b, table = len(slots), self.table
        nodes, tokens, own, positions = (slots.new_empty(b, longest) for _ in range(4))
        finished = torch.empty(b, dtype=torch.bool, device=slots.device)
        accepted = Truncated(nodes, tokens, slots.new_empty(b), finished)
        taken = Taken(accepted, slots.new_empty(b), own, positions)
        tables = (table.remaining, self.processed, self.pending, self.tokens, table.kv_slots)
        take_pending(slots, counts, *tables, self.padding_slot, *accepted, *taken[1:])
        return taken

    def append(self, slots: Tensor, accepted: Truncated, entries: Tensor) -> None:
        from mamba_eagle.kernels.accept.triton_pending import append_pending  # needs triton

        new = (accepted.tokens, accepted.count, entries)
        append_pending(slots, *new, self.tokens, self.features, self.pending)


def pending_entries(
    table: RequestTable, width: int, features: int, dtype: torch.dtype, padding_slot: int
) -> PendingEntries:
    """With kernels where there are some for the table's device."""
    on_gpu = gpu.usable(table.processed.device, dtype)
    kind = TritonPendingEntries if on_gpu else PendingEntries
    return kind(table, width, features, dtype, padding_slot)
