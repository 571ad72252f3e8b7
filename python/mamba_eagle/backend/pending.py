"""Entries that a drafter's network has yet to process.

entries   0 ─────────── processed ─────────────── processed + pending
          in the caches           pending; the last is the root
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from mamba_eagle.backend.pools import RequestTable
from mamba_eagle.tree.accept import Truncated

UNTRACKED = -1  # in ``pending``: the request is untracked and never has pending entries


class Taken(NamedTuple):
    """Entries of b requests that are about to be processed, at most E per request."""

    accepted: Truncated  # of chains of E nodes: the first ``count`` are entries
    prefix: Tensor  # [b] int64: number of entries processed before
    kv_slots: Tensor  # [b, E] int64; the padding slot where there is no entry
    positions: Tensor  # [b, E] int64


class PendingSize(NamedTuple):
    """Sizes of a drafter's queue of pending entries."""

    width: int  # most pending entries per request
    features: int  # feature elements per entry
    dtype: torch.dtype  # of the features
    padding_slot: int  # KV slot for padding


class PendingEntries:
    """Pending entries by request slot: R request slots with room for ``width`` entries each."""

    def __init__(self, table: RequestTable, size: PendingSize) -> None:
        requests, device = table.processed.shape[0], table.processed.device
        self.table, self.padding_slot = table, size.padding_slot
        self.processed = torch.zeros_like(table.processed)  # [R] entries in the caches
        self.pending = torch.zeros_like(table.processed)  # [R] pending entries, or UNTRACKED
        self.tokens = table.processed.new_zeros(requests, size.width)
        shape = (requests, size.width, size.features)
        self.features = torch.zeros(shape, dtype=size.dtype, device=device)

    def waiting(self, slots: list[int]) -> list[int]:
        """How many entries of requests that have not ended are pending, by waiting for the
        device."""
        remaining = self.table.remaining[slots]
        counts: list[int] = torch.where(remaining > 0, self.pending[slots], 0).tolist()
        return counts

    def take(self, slots: Tensor, counts: Tensor | None, longest: int) -> Taken:
        """Take entries that are about to be processed, and add them to ``processed``.

        slots: [b] request slots. counts: [b], how many of the first pending entries to take, at
        most ``longest``; the caller updates ``pending``. None: take all pending entries of requests
        that have not ended, and remove them from ``pending``.
        """
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

    def append(
        self,
        slots: Tensor,
        accepted: Truncated,
        features: Tensor,
        entry_features: Callable[[Tensor], Tensor],
    ) -> None:
        """Append entries for accepted tokens.

        features: [b, T, F], the target's, of all nodes. entry_features: maps the target's features
        [n, F] to those of entries [n, features].
        """
        b, width = accepted.nodes.shape
        if self.features.shape[2]:
            index = accepted.nodes[..., None].expand(-1, -1, features.shape[2])
            entries = entry_features(features.gather(1, index).flatten(0, 1)).view(b, width, -1)
        else:
            entries = features.new_empty(b, width, 0)
        self._append(slots, accepted, entries)

    def _append(self, slots: Tensor, accepted: Truncated, entries: Tensor) -> None:
        """entries: [b, D, features], features of the accepted tokens' entries."""
        width = accepted.tokens.shape[1]
        pending = self.pending[slots]
        columns = pending.clamp(min=0)[:, None] + torch.arange(width, device=slots.device)
        # columns after ``count`` are written too, so the queue has room for them past its limit
        self.tokens[slots[:, None], columns] = accepted.tokens
        self.features[slots[:, None], columns] = entries.to(self.features.dtype)
        self.pending[slots] += torch.where(pending < 0, 0, accepted.count)
