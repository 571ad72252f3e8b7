"""Slots have one owner at a time; free + cached + held = total (docs/design/invariants.md, 6)."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mamba_eagle.cache.allocator import SlotAllocator, SlotError
from mamba_eagle.cache.node import as_tokens
from mamba_eagle.cache.slots import Slots


@settings(max_examples=50)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 6)), max_size=40))
def test_no_slot_has_two_owners(operations):
    allocator, held = SlotAllocator(10), []
    for take, count in operations:
        if take:
            slots = allocator.allocate(count)
            assert (slots is None) == (count > 10 - len(held))
            held += slots or []
        else:
            allocator.free(held[:count])
            del held[:count]
        assert len(held) == len(set(held)) and set(held) <= set(range(10))
        assert allocator.num_free == 10 - len(held)


@pytest.mark.parametrize("slots", [[3, 3], [0], [99], [-1]], ids=str)
def test_what_is_not_out_cannot_be_given_back(slots):
    allocator = SlotAllocator(5, "KV slot")
    allocator.free(set(allocator.allocate(5)) - {3})
    with pytest.raises(SlotError, match="KV slot"):
        allocator.free(slots)


def test_free_cached_and_held_add_up_to_the_total():
    slots = Slots(10, 2, 2)
    kv = slots.kv.allocate(4)
    slots.cache.insert(slots.cache.root, as_tokens([1, 2, 3]), kv[:3])
    slots.check_integrity(trees=[kv[3:]])
    with pytest.raises(RuntimeError, match="6 free \\+ 3 cached \\+ 0 held by requests != 10"):
        slots.check_integrity()


def test_taking_slots_evicts_but_never_what_is_locked():
    slots = Slots(10, 2, 2)
    kv = slots.kv.allocate(9)
    locked = slots.cache.insert(slots.cache.root, as_tokens([1, 2, 3]), kv[:3]).node
    slots.cache.insert(slots.cache.root, as_tokens([5, 6, 7, 8, 9, 10]), kv[3:])
    slots.cache.lock(locked)
    assert slots.available_kv == 7
    assert slots.reserve_kv(8) is None and slots.cache.num_kv == 9, "then nothing is evicted"
    assert len(slots.reserve_kv(7)) == 7 and slots.cache.num_kv == 3
