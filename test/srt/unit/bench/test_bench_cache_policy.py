"""The simulator of eviction policies: its traces, its bound, and what it replays."""

from __future__ import annotations

import pytest

from benchmark.cache_policy import policies, simulate, traces


def test_traces_are_the_same_every_time_and_continue_themselves() -> None:
    first, again = (traces.trace("chats", 60, 5, seed=3) for _ in range(2))
    assert first == again and first != traces.trace("chats", 60, 5, seed=4)
    texts = [turn.prompt + turn.output for turn in first]
    follow_ups = [
        turn
        for i, turn in enumerate(first)
        if any(turn.prompt[: len(text)] == text for text in texts[:i])
    ]
    assert len(follow_ups) > 20


@pytest.mark.parametrize("name", ["chats", "agents", "documents", "few_shot", "mixed"])
def test_every_policy_stays_below_the_bound_and_memory_helps(name: str) -> None:
    turns = traces.trace(name, 40, 6, seed=0)
    most = simulate.bound(turns)
    for policy in policies.POLICIES.values():
        little = simulate.replay(turns, policy, 20_000, 8)
        much = simulate.replay(turns, policy, 400_000, 4_000)
        assert 0 <= little < much <= most


def test_without_eviction_all_policies_are_equal() -> None:
    turns = traces.trace("mixed", 30, 6, seed=1)
    found = {simulate.replay(turns, each, 400_000, 4_000) for each in policies.POLICIES.values()}
    assert len(found) == 1


def test_what_was_used_often_is_remembered_after_it_was_evicted() -> None:
    pools = simulate.SlotAllocator(1_000), simulate.SlotAllocator(2)
    cache = policies.with_policy(policies.RememberedUse, *pools)
    prompt = list(range(100))
    for _ in range(5):
        simulate.serve(cache, traces.Turn(prompt, [1, 2]))
    cache.evict_states(2)
    assert max(uses for uses, _ in cache.states.ghosts.values()) > 4
    simulate.serve(cache, traces.Turn(prompt, [1, 2]))
    assert max(uses for uses, _ in cache.states.uses.values()) > 4
