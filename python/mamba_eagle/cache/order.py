"""Which of many entries comes first, while their ranks change."""

import heapq
from collections.abc import Callable, Hashable, Iterator
from typing import Any, Generic, NamedTuple, TypeVar

T = TypeVar("T", bound=Hashable)
Rank = tuple[int, ...]

MIN_STALE = 64  # stale entries that a heap may hold, however few members it has


class Entry(NamedTuple):
    rank: Rank
    stamp: int  # unique, so that members are never compared
    member: Any


class LazyHeap(Generic[T]):
    """A set of members, the lowest rank first.

    ``rank(member)`` may change at any time. The heap has for each member one current entry, whose
    rank is at most the true one; it is looked at again when it comes to the top. So nothing need be
    done when a rank rises, and ``put`` must be called when it falls. Entries of removed members,
    and those that ``put`` has replaced, stay until they come to the top or are most of the heap.

    All operations take O(log n), amortized over rises and falls, if ``rank`` takes O(1).
    """

    def __init__(self, rank: Callable[[T], Rank]) -> None:
        self._rank = rank
        self._current: dict[T, Entry] = {}
        self._heap: list[Entry] = []
        self._stamp = 0

    def __len__(self) -> int:
        return len(self._current)

    def __iter__(self) -> Iterator[T]:
        return iter(self._current)

    def put(self, member: T) -> None:
        """It becomes a member; or it is one, and its rank may have fallen."""
        rank, current = self._rank(member), self._current.get(member)
        if current is None or rank < current.rank:
            if len(self._heap) > 2 * len(self._current) + MIN_STALE:
                self._heap = list(self._current.values())
                heapq.heapify(self._heap)
            heapq.heappush(self._heap, self._entry(rank, member))

    def update(self, member: T) -> None:
        """Its rank may have fallen, if it is a member."""
        if member in self._current:
            self.put(member)

    def remove(self, member: T) -> None:
        """Remove it, if present."""
        self._current.pop(member, None)

    def first(self, unless: Callable[[T], bool] | None = None) -> T | None:
        """The member of the lowest rank for which ``unless`` is false; None if there is none."""
        passed: list[T] = []
        while (member := self._first()) is not None and unless is not None and unless(member):
            passed.append(member)
            self.remove(member)
        for each in passed:
            self.put(each)
        return member

    def _first(self) -> T | None:
        while self._heap:
            entry = self._heap[0]
            if self._current.get(entry.member) is not entry:
                heapq.heappop(self._heap)
                continue
            rank = self._rank(entry.member)
            if rank == entry.rank:
                return entry.member
            heapq.heapreplace(self._heap, self._entry(rank, entry.member))
        return None

    def _entry(self, rank: Rank, member: T) -> Entry:
        self._stamp += 1
        entry = self._current[member] = Entry(rank, self._stamp, member)
        return entry

    def problem(self) -> str:
        """What is wrong with the structure; "" if nothing."""
        heap = self._heap
        for place in range(1, len(heap)):
            if heap[(place - 1) // 2] > heap[place]:
                return f"entry {place} of {len(heap)} is above one of lower rank"
        stored = {entry.stamp for entry in heap}
        for member, entry in self._current.items():
            if entry.stamp not in stored:
                return f"a member of rank {entry.rank} has no entry in the heap"
            if entry.rank > self._rank(member):
                return f"a member of rank {self._rank(member)} is kept at {entry.rank}"
        return ""
