"""The lazy heap against a scan over all members, while ranks rise and fall."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from mamba_eagle.cache.order import MIN_STALE, LazyHeap

MEMBER, RANK = st.integers(0, 9), st.integers(0, 30)


class HeapAgainstScan(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.ranks: dict[int, tuple[int, int]] = {}
        self.heap: LazyHeap[int] = LazyHeap(lambda member: self.ranks[member])

    @rule(member=MEMBER, rank=RANK)
    def put(self, member: int, rank: int) -> None:
        """Whether it is new, rises or falls."""
        self.ranks[member] = (rank, member)
        self.heap.put(member)

    @rule(member=MEMBER, by=RANK)
    def rise(self, member: int, by: int) -> None:
        """Without a word to the heap."""
        if member in self.ranks:
            self.ranks[member] = (self.ranks[member][0] + by, member)

    @rule(member=MEMBER)
    def remove(self, member: int) -> None:
        self.heap.remove(member)
        self.ranks.pop(member, None)

    @rule()
    def take_the_first(self) -> None:
        expected = min(self.ranks, key=lambda member: self.ranks[member], default=None)
        assert self.heap.first() == expected
        if expected is not None:
            self.remove(expected)

    @invariant()
    def members_are_right(self) -> None:
        assert set(self.heap) == set(self.ranks) and len(self.heap) == len(self.ranks)
        assert self.heap.problem() == ""


TestLazyHeapAgainstScan = HeapAgainstScan.TestCase
TestLazyHeapAgainstScan.settings = settings(max_examples=100, stateful_step_count=50)


def test_entries_of_removed_members_do_not_pile_up():
    heap: LazyHeap[int] = LazyHeap(lambda member: (member,))
    for member in range(10_000):
        heap.put(member)
        heap.remove(member)
        assert len(heap._heap) <= MIN_STALE + 2
    assert heap.first() is None and heap.problem() == ""


@pytest.mark.parametrize("rank", [(0,), (5,)], ids=["fell without a word", "of another order"])
def test_a_heap_that_is_wrong_is_found(rank):
    ranks = {0: (1,), 1: (2,), 2: (3,)}
    heap: LazyHeap[int] = LazyHeap(lambda member: ranks[member])
    for member in ranks:
        heap.put(member)
    if rank == (0,):
        ranks[2] = rank
        assert "a member of rank (0,) is kept at (3,)" in heap.problem()
    else:
        heap._heap.reverse()
        assert "is above one of lower rank" in heap.problem()
