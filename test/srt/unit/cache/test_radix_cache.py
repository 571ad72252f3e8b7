"""The radix cache against a plain dict of prefixes, and its order of eviction."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from mamba_eagle.cache.allocator import SlotAllocator
from mamba_eagle.cache.node import as_tokens, common_prefix
from mamba_eagle.cache.radix import RadixCache
from mamba_eagle.message.indices import indices

SALT = st.integers(0, 1)
PROMPT = st.lists(st.integers(0, 2), min_size=1, max_size=9)


class CacheAgainstDict(RuleBasedStateMachine):
    """``kv``: cached prefix -> slot of its last token; ``states``: prefix -> state slot. A prefix
    is a salt and at least one token."""

    def __init__(self):
        super().__init__()
        self.pool, self.state_slots = SlotAllocator(40), SlotAllocator(6)
        self.journal_slots = SlotAllocator(4, "journal slot")
        self.cache = RadixCache(self.pool, self.state_slots, self.journal_slots)
        # journal slot -> anchor (a prefix) and the prefix that it ends with
        self.journals: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}
        self.hit_at: dict[int, int] = {}  # by journal slot: the position that it served last
        self.kv: dict[tuple[int, ...], int] = {}
        self.states: dict[tuple[int, ...], int] = {}
        self.locked: list[tuple[tuple[int, ...], object]] = []
        self.now = 0.0

    def longest(self, prompt, salt):
        sizes = range(len(prompt), 0, -1)
        return next((size for size in sizes if (salt, *prompt[:size]) in self.kv), 0)

    def check_match(self, prompt, limit, salt):
        match = self.cache.match(as_tokens(prompt), limit, salt)
        assert match.length == self.longest(prompt, salt)
        hits = [n for n in range(1, limit + 1) if (salt, *prompt[:n]) in self.states]
        hits = [n for n in hits if n <= len(prompt)]
        reach = min(match.length, limit)
        behind = {
            slot: common_prefix(as_tokens(end[1:]), as_tokens(prompt[:reach]))
            for slot, (anchor, end) in self.journals.items()
            if anchor == (salt, *prompt[: len(anchor) - 1]) and len(anchor) - 1 <= reach
        }
        best = max([*hits, *behind.values()], default=0)
        assert match.position == best == match.node.end
        if match.journal >= 0:
            assert best > max(hits, default=0) and behind[match.journal] == best
            assert match.anchor == len(self.journals[match.journal][0]) - 1
            assert match.kind == "journal"
            self.hit_at[match.journal] = match.position
        else:
            assert match.anchor == match.position == max(hits, default=0)
        assert match.state_slot == self.states.get((salt, *prompt[: match.anchor]), -1)
        expected = [self.kv[(salt, *prompt[: n + 1])] for n in range(match.position)]
        assert match.kv_slots.tolist() == expected
        return match

    def forget_what_went(self):
        """The dict cannot know what is evicted; but it must be closed, and keep what is locked."""
        nodes = list(self.cache.nodes())
        gone_kv = set(self.kv.values()) - {slot for node in nodes for slot in node.kv_slots}
        gone_states = set(self.states.values()) - {node.state_slot for node in nodes}
        self.kv = {key: slot for key, slot in self.kv.items() if slot not in gone_kv}
        self.states = {key: slot for key, slot in self.states.items() if slot not in gone_states}
        left = {journal.slot for node in nodes for journal in node.journals}
        for slot, (anchor, end) in list(self.journals.items()):
            while end not in self.kv:  # evicted KV shortens it
                end = end[:-1]
            if self.hit_at.get(slot, 0) > len(end) - 1:
                del self.hit_at[slot]
            self.journals[slot] = (anchor, end)
            assert (slot in left) == (anchor in self.states and len(end) > len(anchor))
        self.journals = {slot: each for slot, each in self.journals.items() if slot in left}
        for prefix in self.kv:
            assert len(prefix) == 2 or prefix[:-1] in self.kv
        for prefix in self.states:
            assert prefix in self.kv, "a state slot without the KV before it"
        for prefix, _ in self.locked:
            assert len(prefix) == 1 or prefix in self.kv, "a locked prefix was evicted"
        return len(gone_kv), len(gone_states)

    def node_of(self, prompt, size, salt):
        """A node that ends at ``size`` tokens, all of which are cached."""
        match = self.check_match(prompt[:size], size, salt)
        known = [self.kv[(salt, *prompt[: n + 1])] for n in range(match.position, size)]
        return self.cache.insert(
            match.node, as_tokens(prompt[match.position : size]), indices(known), salt
        ).node

    @rule(prompt=PROMPT, limit=st.integers(0, 9), salt=SALT)
    def match(self, prompt, limit, salt):
        self.check_match(prompt, limit, salt)

    @rule(prompt=PROMPT, salt=SALT)
    def insert(self, prompt, salt):
        match = self.check_match(prompt, len(prompt), salt)
        start = match.position
        slots = self.pool.allocate(len(prompt) - start)
        if slots is None:
            return
        done = self.cache.insert(match.node, as_tokens(prompt[start:]), slots, salt)
        had = self.longest(prompt, salt)
        assert done.taken == len(prompt) - max(had, start) and done.node.end == len(prompt)
        for n in range(had, len(prompt)):
            self.kv[(salt, *prompt[: n + 1])] = slots[n - start]
        self.pool.free(slots[: len(slots) - done.taken])

    @rule(prompt=PROMPT, position=st.integers(1, 9), spare=st.booleans(), salt=SALT)
    def attach_state(self, prompt, position, spare, salt):
        size = self.longest(prompt, salt)
        slots = self.state_slots.allocate(1)
        if slots is None:
            return
        if not 0 < position <= size:
            self.state_slots.free(slots)
            return
        node = self.node_of(prompt, size, salt)
        key = (salt, *prompt[:position])
        kind = "spare" if spare else "tail"
        taken = self.cache.attach_state(node, position, slots[0], kind)
        assert taken == (key not in self.states)
        if taken:
            self.states[key] = slots[0]
        else:
            self.state_slots.free(slots)

    @rule(prompt=PROMPT, position=st.integers(1, 9), salt=SALT)
    def attach_journal(self, prompt, position, salt):
        size = self.longest(prompt, salt)
        slots = self.journal_slots.allocate(1)
        if slots is None or position > size:
            self.journal_slots.free(slots or [])
            return
        node, anchor, end = self.node_of(prompt, size, salt), prompt[:position], prompt[:size]
        known = [
            ended[: size + 1] == (salt, *end)
            for began, ended in self.journals.values()
            if began == (salt, *anchor)
        ]
        useful = (salt, *anchor) in self.states and position < size and not any(known)
        assert self.cache.attach_journal(node, position, slots[0], size) == useful
        if not useful:
            self.journal_slots.free(slots)
            return
        left = {journal.slot for node in self.cache.nodes() for journal in node.journals}
        self.journals = {slot: each for slot, each in self.journals.items() if slot in left}
        self.journals[slots[0]] = ((salt, *anchor), (salt, *end))
        self.hit_at.pop(slots[0], None)

    @rule(keep=st.sets(st.integers(0, 5)))
    def evict_a_journal(self, keep):
        move = self.cache.journals.evict(keep)
        if move is not None:
            rows = move.journal
            anchor, end = self.journals.pop(rows.slot)
            last_hit = end[: self.hit_at.get(rows.slot, 0) + 1]
            wanted = last_hit if len(last_hit) > 1 and last_hit not in self.states else end
            assert (rows.start, rows.end) == (len(anchor) - 1, len(wanted) - 1)
            assert move.state_slot == self.states.pop(anchor) not in keep
            assert wanted not in self.states and wanted in self.kv
            self.states[wanted] = move.state_slot
        else:
            began = [anchor for anchor, _ in self.journals.values()]
            for anchor, end in self.journals.values():
                pinned = self.node_with(self.states[anchor]).state_pins
                assert (
                    self.states[anchor] in keep
                    or pinned
                    or began.count(anchor) > 1
                    or (end not in self.kv or end in self.states)
                )

    def node_with(self, state_slot):
        return next(node for node in self.cache.nodes() if node.state_slot == state_slot)

    @rule(prompt=PROMPT, salt=SALT, above=st.integers(0, 4), seconds=st.integers(1, 9))
    def pin(self, prompt, salt, above, seconds):
        size = self.longest(prompt, salt)
        if size == 0:
            return
        node, positions = self.node_of(prompt, size, salt), [size, max(1, size - above)]
        before = self.cache.pins.kv, self.cache.pins.states
        if not self.cache.pin(node, positions, self.now + seconds):
            assert before == (self.cache.pins.kv, self.cache.pins.states)
        assert self.cache.pins.kv <= 20 and self.cache.pins.states <= 3

    @rule(seconds=st.integers(0, 9))
    def time_passes(self, seconds):
        self.now += seconds
        self.cache.pins.end(self.now)
        assert all(pin.until > self.now for pin in self.cache.pins._pins.values())

    @rule(prompt=PROMPT, salt=SALT)
    def lock(self, prompt, salt):
        match = self.check_match(prompt, len(prompt), salt)
        self.cache.lock(match.node)
        self.locked.append(((salt, *prompt[: match.position]), match.node))

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

    @rule(keep=st.sets(st.integers(0, 5)))
    def evict_the_state_of_the_lowest_score(self, keep):
        nodes = [node for node in self.cache.nodes() if node.state_slot >= 0]
        expected = min(
            (node for node in nodes if node.state_slot not in keep), key=score_by_scan, default=None
        )
        assert self.cache.evict_states(1, keep) == (expected is not None)
        self.forget_what_went()
        assert [node for node in nodes if node.state_slot < 0] == [expected] * bool(expected)

    @rule()
    def evict_the_leaf_that_is_least_of_use(self):
        leaves = [node for node in self.cache.nodes() if not node.children and not node.locks]
        expected = min(
            leaves,
            key=lambda leaf: (leaf.pins > 0, leaf.state_slot >= 0, leaf.used_at, leaf.kv_slots[0]),
            default=None,
        )
        freed = self.cache.evict_kv(1)
        assert freed == (len(expected.kv_slots) if expected else 0)
        assert expected not in self.cache.nodes()
        self.forget_what_went()

    @rule()
    def flush(self):
        if self.cache.evictable_kv == self.cache.num_kv:
            self.cache.flush()
            self.locked.clear()  # only the root can have been
            assert (self.cache.pins.kv, self.cache.pins.states) == (0, 0)
            self.kv, self.states, self.journals = {}, {}, {}
        else:
            with pytest.raises(RuntimeError, match="in use"):
                self.cache.flush()

    @invariant()
    def books_balance(self):
        self.cache.check_integrity()
        assert self.cache.num_kv == len(self.kv) == self.pool.total - self.pool.num_free
        held = self.state_slots.total - self.state_slots.num_free
        assert self.cache.num_states == len(self.states) == held
        held = self.journal_slots.total - self.journal_slots.num_free
        assert self.cache.num_journals == len(self.journals) == held
        locked = {prefix[:n] for prefix, _ in self.locked for n in range(2, len(prefix) + 1)}
        # Locks are of whole nodes, which end where a state slot is or was.
        assert self.cache.evictable_kv == len(self.kv) - len(locked)


TestRadixCacheAgainstDict = CacheAgainstDict.TestCase
TestRadixCacheAgainstDict.settings = settings(max_examples=60, stateful_step_count=40)


def score_by_scan(node) -> tuple[bool, bool, int, int]:
    """Pinned states last, spare ones first; then GreedyDual: inflation plus tokens saved."""
    above, first, reached = node.parent, node.tokens[0], [0]
    while above.parent is not None:
        if above.state_slot >= 0 and not above.spare:
            behind = [each.end for each in above.journals if each.tokens[0] == first]
            reached += [above.end, *(min(end, node.end) for end in behind)]
        above, first = above.parent, above.tokens[0]
    saved = max([node.end, *(journal.end for journal in node.journals)]) - max(reached)
    score = 0 if node.spare else node.inflation + saved
    return node.state_pins > 0, not node.spare, score, node.state_used_at


def cache_of(state_slots: int = 8, kv: int = 4000) -> RadixCache:
    return RadixCache(SlotAllocator(kv), SlotAllocator(state_slots))


def put(cache: RadixCache, prompt: list[int], *positions: int, spare: bool = False):
    """Inserts the prompt, with state slots there."""
    slots = cache.kv.allocate(len(prompt))
    done = cache.insert(cache.root, as_tokens(prompt), slots)
    cache.kv.free(slots[: len(slots) - done.taken])
    for position in positions:
        (slot,) = cache.state_slots.allocate(1)
        if not cache.attach_state(done.node, position, slot, "spare" if spare else "tail"):
            cache.state_slots.free([slot])
    return done.node


def hit(cache: RadixCache, prompt: list[int]) -> int:
    return cache.match(as_tokens(prompt), len(prompt)).position


def state_slots(cache: RadixCache) -> list[int]:
    return sorted(node.end for node in cache.nodes() if node.state_slot >= 0)


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


def test_common_prefix():
    rng = np.random.default_rng(0)
    for _ in range(200):
        a, b = (rng.integers(0, 2, rng.integers(0, 8)) for _ in range(2))
        naive = 0
        while naive < min(len(a), len(b)) and a[naive] == b[naive]:
            naive += 1
        assert common_prefix(a, b) == naive


def test_what_is_pinned_leaves_last_until_its_time_is_over():
    cache = cache_of()
    pinned = put(cache, [1] * 10, 4, 10)
    assert cache.pin(pinned, [4, 10], until=100.0)
    for base in (100, 200):
        put(cache, list(range(base, base + 50)), 50)
    cache.evict_states(2)
    assert hit(cache, [1] * 10) == 10 and state_slots(cache) == [4, 10]
    cache.evict_kv(60)
    assert cache.num_kv == 10 and hit(cache, [1] * 4) == 4
    put(cache, list(range(100, 150)), 50)
    cache.pins.end(99.0)
    assert (cache.pins.kv, cache.pins.states) == (10, 2)
    cache.pins.end(100.0)
    assert (cache.pins.kv, cache.pins.states) == (0, 0)
    cache.evict_kv(7)
    assert hit(cache, [1] * 10) == 0 and hit(cache, list(range(100, 150))) == 50
    cache.check_integrity()


def test_what_is_pinned_gives_way_when_all_else_is_gone():
    """Requests go on whatever is pinned."""
    cache = cache_of()
    assert cache.pin(put(cache, [1] * 10, 10), [10], until=100.0)
    assert cache.evict_states(1) == 1 and cache.evict_kv(1) == 10
    cache.check_integrity()
    put(cache, [1] * 10, 10)
    cache.pins.end(200.0)
    cache.check_integrity()


def test_no_more_than_half_can_be_pinned():
    cache = cache_of(state_slots=4, kv=100)
    nodes = [put(cache, [base] * 20, 20) for base in range(4)]
    assert cache.pin(nodes[0], [20], 9.0) and cache.pin(nodes[1], [20], 9.0)
    assert not cache.pin(nodes[2], [20], 9.0), "that would be three of four states"
    assert cache.pin(nodes[0], [20], 99.0), "the same again takes nothing"
    cache.pins.end(9.0)
    assert cache.pin(nodes[2], [20], 9.0)
    assert not cache.pin(put(cache, [9] * 15), [15], 9.0), "55 of 100 KV slots"
    cache.check_integrity()


def test_a_session_has_one_pin_which_moves_and_ends_with_it():
    """What others have pinned of the same prefix stays pinned."""
    cache = cache_of(state_slots=6, kv=100)
    shallow = put(cache, [1] * 10, 10)
    deep = put(cache, [1] * 20, 20)
    assert cache.pin(shallow, [10], 9.0, "chat") and cache.pin(deep, [20], 9.0, "chat")
    assert (cache.pins.kv, cache.pins.states) == (20, 1)
    assert cache.pin(deep, [20], 9.0, "fork") and not cache.pin(deep, [20], 5.0), "60 of 100"
    cache.pins.remove("chat")
    assert (cache.pins.kv, deep.state_pins, shallow.pins) == (20, 1, 1)
    cache.pins.remove("chat")  # nothing is left to end
    cache.pins.end(9.0)
    assert (cache.pins.kv, cache.pins.states, deep.pins) == (0, 0, 0)
    cache.check_integrity()
