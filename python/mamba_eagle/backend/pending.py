"""Entries that wait to be processed by a drafter's network.

entries   0 ─────────── processed ─────────────── processed + pending
          in the caches           wait; the last is the root
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from mamba_eagle.backend.pools import RequestTable
from mamba_eagle.tree.accept import Truncated

UNTRACKED = -1  # in ``pending``: of an untracked request nothing waits, and nothing ever will


class Taken(NamedTuple):
    """Entries of b requests that are about to be processed, E at most of each."""

    accepted: Truncated  # the first ``count`` of E in a row
    prefix: Tensor  # [b] int64: entries that were processed before
    kv_slots: Tensor  # [b, E] int64; the padding slot where there is no entry
    positions: Tensor  # [b, E] int64


class PendingSize(NamedTuple):
    """What a drafter's pending entries have room for."""

    width: int  # entries that wait, per request
    features: int  # numbers per entry
    dtype: torch.dtype
    padding_slot: int  # the KV slot of what is no entry


class PendingEntries:
    """By request slot: R slots, with room for ``width`` entries that wait."""

    def __init__(self, table: RequestTable, size: PendingSize) -> None:
        requests, device = table.processed.shape[0], table.processed.device
        self.table, self.padding_slot = table, size.padding_slot
        self.processed = torch.zeros_like(table.processed)  # entries in the caches
        self.pending = torch.zeros_like(table.processed)
        self.tokens = table.processed.new_zeros(requests, size.width)
        shape = (requests, size.width, size.features)
        self.features = torch.zeros(shape, dtype=size.dtype, device=device)

    def take(self, slots: Tensor, counts: Tensor | None, longest: int) -> Taken:
        """The first ``counts`` [b] entries of each request in ``slots`` [b], ``longest`` at most,
        are about to be processed: ``processed`` counts them at once. None: all that wait, of
        requests that have not ended, and they wait no longer."""
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
        """Accepted tokens join those that wait. features [b, T, F]: the target's, of all nodes;
        entry_features makes [n, F] what n entries keep, [n, features]."""
        self._append(slots, accepted, _accepted_features(self, accepted, features, entry_features))

    def _append(self, slots: Tensor, accepted: Truncated, entries: Tensor) -> None:
        """entries [b, D, features]: those of the accepted tokens."""
        deep = accepted.tokens.shape[1]
        waiting = self.pending[slots]
        columns = waiting.clamp(min=0)[:, None] + torch.arange(deep, device=slots.device)
        # valid or not: hence there is room for a step's tokens after the most that may wait
        self.tokens[slots[:, None], columns] = accepted.tokens
        self.features[slots[:, None], columns] = entries.to(self.features.dtype)
        self.pending[slots] += torch.where(waiting < 0, 0, accepted.count)


def _accepted_features(
    entries: PendingEntries,
    accepted: Truncated,
    features: Tensor,
    entry_features: Callable[[Tensor], Tensor],
) -> Tensor:
    """What the entries of the accepted nodes keep of ``features``. [b, D, features]"""
    b, deep = accepted.nodes.shape
    if not entries.features.shape[2]:
        return features.new_empty(b, deep, 0)
    index = accepted.nodes[..., None].expand(-1, -1, features.shape[2])
    return entry_features(features.gather(1, index).flatten(0, 1)).view(b, deep, -1)
