"""How many entries of each request a drafter has yet to process, as the host knows it."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from mamba_eagle.backend.pending import UNTRACKED, PendingEntries
from mamba_eagle.backend.place import Place
from mamba_eagle.backend.pools import KVPool, RequestTable
from mamba_eagle.core import PLAIN, TreeShape
from mamba_eagle.drafting.base import CachedPools, Drafter, StepPart
from mamba_eagle.tree.accept import Truncated


class Kept(NamedTuple):
    """Released requests whose entries up to some position are kept for what continues them."""

    slots: Tensor  # [n] int64, request slots
    ends: Tensor  # [n] int64, positions
    missing: Tensor  # [n] int64, entries before them that are not processed yet
    longest: int  # at least the largest of ``missing``


class Waiting:
    """Upper bounds of pending entries by request slot; on a CPU the numbers themselves are read.

    Steps in flight may add fewer entries than the host assumes. Before a request's entries could
    exceed the queue, ``prepare`` asks for them to be processed.
    """

    def __init__(
        self, entries: PendingEntries, table: RequestTable, place: Place, most: int, longest: int
    ) -> None:
        """most: pending entries that a request may have. longest: of these, how many a step with
        drafts can process; it is the same for all steps of a graph."""
        self.entries, self.table, self.place = entries, table, place
        self.most, self.longest = most, longest
        self.bounds = [0] * table.processed.shape[0]  # or UNTRACKED

    def tracks(self, slot: int) -> bool:
        return self.bounds[slot] != UNTRACKED

    def set(self, slots: Sequence[int], bound: int) -> None:
        for slot in slots:
            self.bounds[slot] = bound

    def untrack(self, slots: Sequence[int]) -> None:
        self.entries.pending.index_fill_(0, self.place.to_device(slots), UNTRACKED)
        self.set(slots, UNTRACKED)

    def kept(self, slots: Sequence[int], positions: Sequence[int]) -> Kept | None:
        """Of requests that are about to be released; None if none is kept.

        positions: how many tokens of each are kept, negative for none.
        """
        kept = [
            (slot, position)
            for slot, position in zip(slots, positions)
            if position >= 0 and self.tracks(slot)
        ]
        if not kept:
            return None
        kept_slots, ends = self.place.to_device(list(zip(*kept)))
        # a stop string may have cut off tokens that were already processed: then fewer entries
        # remain to be processed, or the end of the journal is dropped
        missing = (ends - self.entries.processed[kept_slots]).clamp(min=0)
        longest = int(missing.max()) if self.place.on_host else self.most
        return Kept(kept_slots, ends, missing, longest)

    def release(self, slots: Sequence[int]) -> None:
        self.entries.pending.index_fill_(0, self.place.to_device(slots), 0)
        self.set(slots, 0)

    def prepare(self, slots: Sequence[int], shape: TreeShape, left: int) -> StepPart:
        """A drafter's part in a step. left: entries that ``catch_up`` leaves pending."""
        tracked = [slot for slot in slots if self.tracks(slot)]
        counts = dict(zip(tracked, self._counts(tracked), strict=True))
        added = shape.depth + 1
        if shape == PLAIN:
            full = [slot for slot, n in counts.items() if n + added > self.most]
            counts.update(dict.fromkeys(full, left))
            for slot, n in counts.items():
                self.bounds[slot] = n + added
            return StepPart(shape, not tracked, full)
        self.set(tracked, added)
        if self.place.on_host:
            return StepPart(shape, longest=max([1, *counts.values()]))
        needs_catch_up = [slot for slot, n in counts.items() if n > self.longest]
        return StepPart(shape, False, needs_catch_up, self.longest)

    def _counts(self, slots: Sequence[int]) -> list[int]:
        """Pending entries of the requests in ``slots``: exact on a CPU, else upper bounds."""
        if not self.place.on_host or not slots:
            return [self.bounds[slot] for slot in slots]
        return self.entries.waiting(list(slots))


class QueueingDrafter(Drafter):
    """A drafter with a network, which processes entries of the sequences when it is to draft."""

    catches_up = True
    left_waiting = 0  # entries that ``catch_up`` leaves pending
    kv: KVPool
    entries: PendingEntries
    place: Place
    waiting: Waiting

    def cached_pools(self) -> CachedPools:
        return CachedPools(self.kv)

    def copy_kv(self, sources: Tensor, targets: Tensor) -> None:
        self.kv.copy(sources, targets)

    def prepare(self, slots: Sequence[int], shape: TreeShape) -> StepPart:
        return self.waiting.prepare(slots, shape, self.left_waiting)

    def untrack(self, slots: Sequence[int]) -> None:
        self.waiting.untrack(slots)

    def catch_up(self, slots: Tensor) -> None:
        """Process all pending entries, but for roots that stay pending."""
        queue, left = self.entries, self.left_waiting
        counts = (queue.pending[slots] - left).clamp(min=0)
        longest = max(int(counts.max()), 1) if self.place.on_host else self.waiting.most
        self.run_pending(slots, counts, longest)
        if left:
            queue.tokens[slots, 0] = queue.tokens[slots, counts]
            queue.features[slots, 0] = queue.features[slots, counts]
        queue.pending[slots] -= counts

    def observe_accepted(self, slots: Tensor, accepted: Truncated, features: Tensor) -> None:
        """The entries of accepted tokens become pending."""
        self.entries.append(slots, accepted, features, self.entry_features)

    def release(self, slots: Sequence[int], positions: Sequence[int]) -> None:
        kept = self.waiting.kept(slots, positions)
        if kept is not None:
            if kept.longest:
                self.run_pending(kept.slots, kept.missing, kept.longest)
            self.keep(kept)
        self.waiting.release(slots)

    def keep(self, kept: Kept) -> None:
        """The entries of requests that leave are processed."""

    @abstractmethod
    def entry_features(self, features: Tensor) -> Tensor:
        """The target's features of tokens [n, F] -> those of their entries [n, ·]."""

    @abstractmethod
    def run_pending(self, slots: Tensor, counts: Tensor | None, longest: int) -> Any:
        """Process the entries that ``PendingEntries.take`` returns for these arguments."""
