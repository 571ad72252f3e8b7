"""The radix cache against a plain dict of prefixes, and its order of eviction."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from mamba_eagle.cache.allocator import SlotAllocator
from mamba_eagle.cache.base import as_tokens, common_prefix
from mamba_eagle.cache.radix import RadixCache

PROMPT = st.lists(st.integers(0, 2), min_size=1, max_size=9)


class CacheAgainstDict(RuleBasedStateMachine):
    """``kv``: cached prefix -> slot of its last token; ``states``: prefix -> state slot."""

    def __init__(self):
        super().__init__()
        self.pool, self.state_slots = SlotAllocator(40), SlotAllocator(6)
        self.cache = RadixCache(self.pool, self.state_slots)
        self.kv: dict[tuple[int, ...], int] = {}
        self.states: dict[tuple[int, ...], int] = {}
        self.locked: list[tuple[tuple[int, ...], object]] = []

    def longest(self, prompt):
        sizes = range(len(prompt), 0, -1)
        return next((size for size in sizes if tuple(prompt[:size]) in self.kv), 0)

    def check_match(self, prompt, limit):
        match = self.cache.match(as_tokens(prompt), limit)
        assert match.length == self.longest(prompt)
        hits = [n for n in range(1, limit + 1) if tuple(prompt[:n]) in self.states]
        hits = [n for n in hits if n <= len(prompt)]
        assert match.position == max(hits, default=0) == match.node.end
        assert match.state_slot == self.states.get(tuple(prompt[: match.position]), -1)
        expected = [self.kv[tuple(prompt[: n + 1])] for n in range(match.position)]
        assert match.kv_slots == expected
        return match

    def forget_what_went(self):
        """The dict cannot know what is evicted; but it must be closed, and keep what is locked."""
        nodes = list(self.cache._nodes())
        gone_kv = set(self.kv.values()) - {slot for node in nodes for slot in node.kv_slots}
        gone_states = set(self.states.values()) - {node.state_slot for node in nodes}
        self.kv = {key: slot for key, slot in self.kv.items() if slot not in gone_kv}
        self.states = {key: slot for key, slot in self.states.items() if slot not in gone_states}
        for prefix in self.kv:
            assert len(prefix) == 1 or prefix[:-1] in self.kv
        for prefix in self.states:
            assert prefix in self.kv, "a state slot without the KV before it"
        for prefix, _ in self.locked:
            assert not prefix or prefix in self.kv, "a locked prefix was evicted"
        return len(gone_kv), len(gone_states)

    @rule(prompt=PROMPT, limit=st.integers(0, 9))
    def match(self, prompt, limit):
        self.check_match(prompt, limit)

    @rule(prompt=PROMPT)
    def insert(self, prompt):
        match = self.check_match(prompt, len(prompt))
        start = match.position
        slots = self.pool.allocate(len(prompt) - start)
        if slots is None:
            return
        done = self.cache.insert(match.node, as_tokens(prompt[start:]), slots)
        had = self.longest(prompt)
        assert done.taken == len(prompt) - max(had, start) and done.node.end == len(prompt)
        for n in range(had, len(prompt)):
            self.kv[tuple(prompt[: n + 1])] = slots[n - start]
        self.pool.free(slots[: len(slots) - done.taken])

    @rule(prompt=PROMPT, position=st.integers(1, 9), spare=st.booleans())
    def attach_state(self, prompt, position, spare):
        size = self.longest(prompt)
        slots = self.state_slots.allocate(1)
        if slots is None:
            return
        if not 0 < position <= size:
            self.state_slots.free(slots)
            return
        match = self.cache.match(as_tokens(prompt[:size]), size)
        node = self.cache.insert(
            match.node,
            as_tokens(prompt[match.position : size]),
            [self.kv[tuple(prompt[: n + 1])] for n in range(match.position, size)],
        ).node
        key = tuple(prompt[:position])
        taken = self.cache.attach_state(node, position, slots[0], spare)
        assert taken == (key not in self.states)
        if taken:
            self.states[key] = slots[0]
        else:
            self.state_slots.free(slots)

    @rule(prompt=PROMPT)
    def lock(self, prompt):
        match = self.check_match(prompt, len(prompt))
        self.cache.lock(match.node)
        self.locked.append((tuple(prompt[: match.position]), match.node))

    @rule(which=st.integers(0, 20))
    def unlock(self, which):
        if self.locked:
            self.cache.unlock(self.locked.pop(which % len(self.locked))[1])

    @rule(count=st.integers(0, 12))
    def evict_kv(self, count):
        evictable, free = self.cache.evictable_kv, self.pool.num_free
        freed = self.cache.evict_kv(count)
        assert freed == self.pool.num_free - free >= min(count, evictable)
        assert self.forget_what_went()[0] == freed

    @rule(count=st.integers(0, 3), keep=st.sets(st.integers(0, 5)))
    def evict_states(self, count, keep):
        kept = keep & set(self.states.values())
        may_go = len(self.states) - len(kept)
        freed = self.cache.evict_states(count, keep)
        assert freed == min(count, may_go)
        assert self.forget_what_went() == (0, freed)
        assert kept <= set(self.states.values())

    @rule()
    def flush(self):
        if self.cache.evictable_kv == self.cache.num_kv:
            self.cache.flush()
            self.locked.clear()  # only the root can have been
            self.kv, self.states = {}, {}
        else:
            with pytest.raises(RuntimeError, match="in use"):
                self.cache.flush()

    @invariant()
    def books_balance(self):
        self.cache.check_integrity()
        assert self.cache.num_kv == len(self.kv) == self.pool.total - self.pool.num_free
        held = self.state_slots.total - self.state_slots.num_free
        assert self.cache.num_states == len(self.states) == held
        locked = {prefix[:n] for prefix, _ in self.locked for n in range(1, len(prefix) + 1)}
        # Locks are of whole nodes, which end where a state slot is or was.
        assert self.cache.evictable_kv == len(self.kv) - len(locked)


TestRadixCacheAgainstDict = CacheAgainstDict.TestCase
TestRadixCacheAgainstDict.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None
)


def cache_of(state_slots: int = 8, kv: int = 4000) -> RadixCache:
    return RadixCache(SlotAllocator(kv), SlotAllocator(state_slots))


def put(cache: RadixCache, prompt: list[int], *positions: int, spare: bool = False):
    """Inserts the prompt, with state slots there."""
    slots = cache.kv.allocate(len(prompt))
    done = cache.insert(cache.root, as_tokens(prompt), slots)
    cache.kv.free(slots[: len(slots) - done.taken])
    for position in positions:
        (slot,) = cache.state_slots.allocate(1)
        if not cache.attach_state(done.node, position, slot, spare):
            cache.state_slots.free([slot])
    return done.node


def hit(cache: RadixCache, prompt: list[int]) -> int:
    return cache.match(as_tokens(prompt), len(prompt)).position


def state_slots(cache: RadixCache) -> list[int]:
    return sorted(node.end for node in cache._nodes() if node.state_slot >= 0)


def test_a_hit_is_the_deepest_state_not_the_deepest_token():
    cache = cache_of()
    put(cache, list(range(100)), 30, 60)
    match = cache.match(as_tokens([*range(80), 500]), 80)
    assert (match.length, match.position) == (80, 60)
    assert cache.match(as_tokens(list(range(100))), 59).position == 30
    assert hit(cache, list(range(29))) == 0


def test_the_handle_of_a_lock_survives_splits():
    cache = cache_of()
    node = put(cache, list(range(100)), 100)
    cache.lock(node)
    put(cache, [*range(50), 500, 501], 20, 50, 52)
    assert node.end == 100 and cache.evictable_kv == 2
    cache.evict_kv(1000)
    assert hit(cache, list(range(100))) == 100
    cache.unlock(node)
    cache.check_integrity()
    assert cache.evictable_kv == 100


def test_unlocking_what_is_not_locked_is_an_error():
    cache = cache_of()
    node = put(cache, [1, 2, 3])
    with pytest.raises(RuntimeError, match="not locked"):
        cache.unlock(node)


def test_states_leave_in_order_of_use_when_equal():
    cache = cache_of()
    for base in (100, 200, 300):
        put(cache, list(range(base, base + 10)), 10)
    assert hit(cache, list(range(100, 110))) == 10  # now 200 is the oldest
    cache.evict_states(1)
    assert [hit(cache, list(range(base, base + 10))) for base in (100, 200, 300)] == [10, 0, 10]


def test_cheap_states_leave_before_valuable_ones():
    cache = cache_of()
    put(cache, list(range(1000)), 900, 905)
    cache.evict_states(1)
    assert state_slots(cache) == [900], "905 spares five tokens only"


def test_spare_states_leave_first_unless_hit():
    cache = cache_of()
    put(cache, list(range(300)), 290)
    put(cache, list(range(300)), 100, 200, spare=True)
    assert hit(cache, list(range(250))) == 200  # not spare any more
    cache.evict_states(1)
    assert state_slots(cache) == [200, 290]


def test_valuable_states_that_nobody_uses_leave_in_the_end():
    cache = cache_of(state_slots=4)
    put(cache, list(range(300)), 300)
    for i in range(60):
        if cache.state_slots.num_free == 0:
            cache.evict_states(1)
        put(cache, [1000 + i] * 50, 50)
    assert hit(cache, list(range(300))) == 0


def test_an_inner_node_loses_its_state_and_keeps_its_kv():
    cache = cache_of()
    put(cache, list(range(100)), 50, 100)
    cache.evict_states(1, keep={cache.match(as_tokens(list(range(100))), 100).state_slot})
    assert hit(cache, list(range(100))) == 100 and hit(cache, list(range(60))) == 0
    assert cache.match(as_tokens(list(range(60))), 60).length == 60


def test_kv_that_leads_to_no_state_leaves_first():
    cache = cache_of()
    put(cache, list(range(100, 110)), 10)
    put(cache, list(range(200, 210)))  # younger, and useless
    assert cache.evict_kv(1) == 10
    assert hit(cache, list(range(100, 110))) == 10
    cache.evict_kv(1)
    assert cache.num_kv == 0 and cache.state_slots.num_free == 8, "its state slot goes with it"


def test_a_match_of_a_thousand_tokens_costs_well_under_a_millisecond():
    cache = cache_of(state_slots=40)
    prompt = list(range(1000))
    put(cache, prompt, *range(50, 1000, 50))
    tokens, times = as_tokens(prompt), []
    for _ in range(20):
        begin = time.perf_counter()
        cache.match(tokens, 1000)
        times.append(time.perf_counter() - begin)
    assert min(times) < 0.5e-3


def test_common_prefix():
    rng = np.random.default_rng(0)
    for _ in range(200):
        a, b = (rng.integers(0, 2, rng.integers(0, 8)) for _ in range(2))
        naive = 0
        while naive < min(len(a), len(b)) and a[naive] == b[naive]:
            naive += 1
        assert common_prefix(a, b) == naive
