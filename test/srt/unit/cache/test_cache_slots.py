"""The owner of slots: requests that come, prefill, decode, leave and come back, in any order.

Each slot of each kind has one owner after every operation: the free list, the cache, a request, or
a plan (the trees in flight, the states that a chunk saves).
"""

from __future__ import annotations

from collections import deque

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mamba_eagle.cache.node import as_tokens
from mamba_eagle.cache.slots import HeldSlots, Slots

PROMPT = st.lists(st.integers(0, 1), min_size=1, max_size=6)
PLACE = st.integers(0, 7)
KV, STATES, REQUESTS, NODES = 40, 5, 3, 4


class Sample:
    """A request: its tokens, and what the plans in flight have of it."""

    def __init__(self, tokens: list[int], held: HeldSlots) -> None:
        self.tokens, self.held = tokens, held
        self.prompt_len = len(tokens)
        self.trees: deque[list[int]] = deque()

    @property
    def decodes(self) -> bool:
        return self.held.inserted >= self.prompt_len


class OwnersOfSlots(RuleBasedStateMachine):
    use_cache = True

    def __init__(self) -> None:
        super().__init__()
        self.slots = Slots(KV, STATES, REQUESTS, self.use_cache)
        self.samples: list[Sample] = []
        self.written: dict[int, tuple[int, ...]] = {}  # KV slot -> the prefix it was written for

    def some(self, place: int, decodes: bool) -> Sample | None:
        found = [sample for sample in self.samples if sample.decodes == decodes]
        return found[place % len(found)] if found else None

    def write(self, sample: Sample, start: int) -> None:
        for position in range(start, len(sample.held.kv)):
            prefix = tuple(sample.tokens[: position + 1])
            self.written[sample.held.kv[position]] = prefix

    @rule(prompt=PROMPT, limit=st.integers(0, 6), headroom=st.integers(0, 9))
    def admit(self, prompt, limit, headroom):
        match = self.slots.cache.match(as_tokens(prompt), min(limit, len(prompt) - 1))
        before = self.slots.available_kv
        held = self.slots.admit(match, len(prompt), headroom)
        if held is None:
            enough = before - match.position >= len(prompt) - match.position + headroom
            free = self.slots.requests.num_free and self.slots.states.num_free
            assert not (enough and free)
            return
        assert len(held.kv) == len(prompt) and held.hit.position == held.inserted == match.position
        assert held.hit.state_slot != held.state_slot, "it reads what was evicted for it"
        for position in range(held.hit.position):
            assert self.written[held.kv[position]] == tuple(prompt[: position + 1])
        sample = Sample(list(prompt), held)
        self.samples.append(sample)
        self.write(sample, held.hit.position)

    @rule(place=PLACE, size=st.integers(1, 6), save=st.integers(0, 4), spare=st.booleans())
    def insert_a_chunk(self, place, size, save, spare):
        sample = self.some(place, decodes=False)
        if sample is None:
            return
        held = sample.held
        start, end = held.inserted, min(held.inserted + size, sample.prompt_len)
        position = start + save
        state = None
        if start < position <= end and self.slots.stores:
            state = self.slots.reserve_state(keep={held.hit.state_slot})
        self.slots.insert(held, as_tokens(sample.tokens[start:end]))
        assert held.inserted == held.folded == held.node.end == end or not self.slots.stores
        if state is not None:
            self.slots.attach_state(held, position, state, "spare" if spare else "branch")

    @rule(place=PLACE)
    def reserve_a_tree(self, place):
        sample = self.some(place, decodes=True)
        if sample is None or len(sample.trees) == 2:
            return
        available = self.slots.available_kv
        tree = self.slots.reserve_kv(NODES)
        assert (tree is None) == (available < NODES)
        if tree is not None:
            sample.trees.append(tree)

    @rule(place=PLACE, path=st.sets(st.integers(1, NODES - 1)), late=st.booleans())
    def settle(self, place, path, late):
        sample = self.some(place, decodes=True)
        if sample is None or not sample.trees:
            return
        tree, nodes = sample.trees.popleft(), [] if late else [0, *sorted(path)]
        free = self.slots.kv.num_free
        before = len(sample.held.kv)
        sample.tokens += [len(sample.tokens) % 2 for _ in nodes]
        self.slots.settle(sample.held, tree, nodes, folded=before)
        assert sample.held.kv[before:].tolist() == [tree[node] for node in nodes]
        assert self.slots.kv.num_free == free + NODES - len(nodes)
        self.write(sample, before)

    @precondition(lambda self: self.samples)
    @rule(place=PLACE, wanted=st.booleans())
    def release(self, place, wanted):
        """As finished or retracted (wanted), or as aborted."""
        sample = self.samples[place % len(self.samples)]
        if sample.trees:
            return
        self.samples.remove(sample)
        held = sample.held
        end = len(held.kv) if sample.decodes else held.inserted
        rest = as_tokens(sample.tokens[held.inserted : end]) if wanted and end > 0 else None
        stored = self.slots.release(held, rest)
        stored = stored.stored
        assert stored == (rest is not None and self.slots.stores)
        if stored:
            match = self.slots.cache.match(as_tokens(sample.tokens[:end]), end)
            assert match.position == match.length == end
            for position, slot in enumerate(match.kv_slots):
                assert self.written[slot] == tuple(sample.tokens[: position + 1])

    @precondition(lambda self: not self.samples)
    @rule()
    def flush(self):
        self.slots.cache.flush()
        assert self.slots.kv.num_free == KV and self.slots.states.num_free == STATES

    @invariant()
    def every_slot_has_one_owner(self):
        trees = [tree for sample in self.samples for tree in sample.trees]
        held = [sample.held for sample in self.samples]
        self.slots.check_integrity(held, trees)
        own = [slot for each in held for slot in each.kv[each.inserted :] + each.duplicates]
        own += [slot for tree in trees for slot in tree]
        cached, states = [], []
        if self.slots.stores:
            for node in self.slots.cache.nodes():
                cached += node.kv_slots
                states += [node.state_slot] if node.state_slot >= 0 else []
        free = [slot for slot in range(KV) if self.slots.kv._is_free[slot]]
        assert sorted(own + cached + free) == [*range(KV)]
        states += [each.state_slot for each in held]
        states += [slot for slot in range(STATES) if self.slots.states._is_free[slot]]
        assert sorted(states) == [*range(STATES)]
        assert len({each.slot for each in held}) == len(held)

    @invariant()
    def what_a_request_reads_is_its_own(self):
        for sample in self.samples:
            for position, slot in enumerate(sample.held.kv):
                assert self.written[slot] == tuple(sample.tokens[: position + 1])


class OwnersWithoutACache(OwnersOfSlots):
    use_cache = False


TestOwnersOfSlots = OwnersOfSlots.TestCase
TestOwnersOfSlots.settings = settings(max_examples=100, stateful_step_count=60)
TestOwnersWithoutACache = OwnersWithoutACache.TestCase
TestOwnersWithoutACache.settings = settings(max_examples=20, stateful_step_count=40)


def test_of_two_equal_prompts_at_once_the_cache_keeps_one_state_and_one_kv_slot_per_token():
    """The second request keeps its own slots as duplicates until it leaves."""
    slots = Slots(KV, STATES, REQUESTS)
    prompt = as_tokens([0, 1, 1, 0])
    matches = [slots.cache.match(prompt, 3) for _ in range(2)]
    first, second = (slots.admit(match, 4, headroom=0) for match in matches)
    for held in (first, second):
        state = slots.reserve_state()
        slots.insert(held, prompt)
        slots.attach_state(held, 3, state, "tail")
    assert slots.cache.num_kv == 4 and slots.cache.num_states == 1
    assert not first.duplicates and second.duplicates == second.kv
    slots.check_integrity([first, second])
    assert slots.release(second, prompt[4:]).stored and not slots.release(first, None).stored
    slots.check_integrity()
    assert slots.kv.num_free == KV - 4 and slots.states.num_free == STATES - 2
