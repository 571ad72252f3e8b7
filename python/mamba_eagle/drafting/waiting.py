"""Drafters that process entries of the sequences when they are to draft: which ones wait, as the
host knows it."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from mamba_eagle.backend.pending import UNTRACKED, PendingSize
from mamba_eagle.backend.pools import KVPool
from mamba_eagle.config import DraftSettings
from mamba_eagle.core import PLAIN, TreeShape
from mamba_eagle.drafting.base import Drafter, DraftParts, StepPart
from mamba_eagle.tree.accept import Truncated

MAX_PENDING = 16  # entries that plain steps may leave pending before they must be processed
# Limit for drafters without recurrent state, which need no row per entry; large so that plain
# decoding rarely has to stop for them. The slot table has room for 64 positions past a request.
MAX_WITHOUT_ROWS = 62


def max_pending(config: DraftSettings) -> int:
    """Most pending entries per request: those that plain steps may leave, plus those of one step
    with drafts."""
    return MAX_PENDING + config.tree_shape.depth + 1


def max_without_rows(config: DraftSettings) -> int:
    """The same limit for a drafter without recurrent layers."""
    return max(max_pending(config), MAX_WITHOUT_ROWS)


class QueueingDrafter(Drafter):
    """A drafter with a network, whose entries of accepted tokens stay *pending* until it is to
    draft.

    ``bounds`` are upper bounds of pending entries by request slot; on a CPU the numbers themselves
    are read. Steps in flight may add fewer entries than the host assumes. Before a request's
    entries could exceed the queue, ``prepare`` asks for them to be processed.
    """

    catches_up = True
    kv: KVPool
    left_waiting = 0  # entries that ``catch_up`` leaves pending

    def __init__(self, parts: DraftParts, kv: KVPool, most: int, features: int) -> None:
        """kv: its pool. most: pending entries that a request may have. features: of an entry."""
        self.kv, self.table, self.max_pending = kv, parts.table, most
        self.backend, self.place = parts.backend, parts.backend.place
        self.max_accepted = parts.config.tree_shape.depth + 1
        # a step also writes entries past ``count``; hence the room past ``max_pending``
        width = most + self.max_accepted
        entry = PendingSize(width, features, parts.backend.dtype, kv.padding_slot)
        self.entries = parts.backend.pending_entries(parts.table, entry)
        self.bounds = [0] * parts.table.processed.shape[0]  # or UNTRACKED

    def tracks(self, slot: int) -> bool:
        return self.bounds[slot] != UNTRACKED

    def set_bounds(self, slots: Sequence[int], bound: int) -> None:
        for slot in slots:
            self.bounds[slot] = bound

    def begin_prompts(self, slots: Sequence[int], ends: Sequence[int]) -> None:
        """The entries of prompt chunks that end there are processed."""
        own = self.place.to_device(slots)
        self.entries.processed[own] = self.place.to_device(ends)
        self.entries.pending.index_fill_(0, own, 0)

    def prepare(self, slots: Sequence[int], shape: TreeShape) -> StepPart:
        tracked = [slot for slot in slots if self.tracks(slot)]
        counts = {slot: self.bounds[slot] for slot in tracked}  # of pending entries, or more
        if tracked and self.place.on_host:
            counts = dict(zip(tracked, self.entries.waiting(tracked), strict=True))
        added = shape.depth + 1
        if shape == PLAIN:
            full = [slot for slot, n in counts.items() if n + added > self.max_pending]
            counts.update(dict.fromkeys(full, self.left_waiting))
            for slot, n in counts.items():
                self.bounds[slot] = n + added
            return StepPart(shape, not tracked, full)
        self.set_bounds(tracked, added)
        if self.place.on_host:
            return StepPart(shape, longest=max([1, *counts.values()]))
        needs_catch_up = [slot for slot, n in counts.items() if n > self.max_accepted]
        # the same for all steps of a graph, so no more than steps with drafts leave
        return StepPart(shape, False, needs_catch_up, self.max_accepted)

    def untrack(self, slots: Sequence[int]) -> None:
        self.entries.pending.index_fill_(0, self.place.to_device(slots), UNTRACKED)
        self.set_bounds(slots, UNTRACKED)

    def catch_up(self, slots: Tensor) -> None:
        """Process all pending entries, but for roots that stay pending."""
        queue, left = self.entries, self.left_waiting
        counts = (queue.pending[slots] - left).clamp(min=0)
        longest = max(int(counts.max()), 1) if self.place.on_host else self.max_pending
        self.run_pending(slots, counts, longest)
        if left:
            queue.tokens[slots, 0] = queue.tokens[slots, counts]
            queue.features[slots, 0] = queue.features[slots, counts]
        queue.pending[slots] -= counts

    def observe_accepted(self, slots: Tensor, accepted: Truncated, features: Tensor) -> None:
        """The entries of accepted tokens become pending."""
        self.entries.append(slots, accepted, features, self.entry_features)

    def release(self, slots: Sequence[int], positions: Sequence[int]) -> None:
        kept = [
            (slot, position)
            for slot, position in zip(slots, positions)
            if position >= 0 and self.tracks(slot)
        ]
        if kept:
            kept_slots, ends = self.place.to_device(list(zip(*kept)))
            # a stop string may have cut off tokens that were already processed: then fewer entries
            # remain to be processed, or the end of the journal is dropped
            missing = (ends - self.entries.processed[kept_slots]).clamp(min=0)
            longest = int(missing.max()) if self.place.on_host else self.max_pending
            if longest:
                self.run_pending(kept_slots, missing, longest)
            self.keep(kept_slots, ends)
        self.entries.pending.index_fill_(0, self.place.to_device(slots), 0)
        self.set_bounds(slots, 0)

    def keep(self, slots: Tensor, ends: Tensor) -> None:
        """Requests leave, slots [n], whose entries up to positions ``ends`` [n] are kept for what
        continues them, and processed."""

    @abstractmethod
    def entry_features(self, features: Tensor) -> Tensor:
        """The target's features of tokens [n, F] -> those of their entries [n, ·]."""

    @abstractmethod
    def run_pending(self, slots: Tensor, counts: Tensor | None, longest: int) -> Any:
        """Process the entries that ``PendingEntries.take`` returns for these arguments."""
