"""The simulator of eviction policies: its traces, its bound, and what it replays."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[3] / "benchmark" / "cache_policy"


@pytest.fixture(scope="module")
def modules():
    sys.path.insert(0, str(FOLDER))
    try:
        import policies
        import simulate
        import traces
    finally:
        sys.path.remove(str(FOLDER))
    return simulate, policies, traces


def test_traces_are_the_same_every_time_and_continue_themselves(modules) -> None:
    _, _, traces = modules
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
def test_every_policy_stays_below_the_bound_and_memory_helps(modules, name: str) -> None:
    simulate, policies, traces = modules
    turns = traces.trace(name, 40, 6, seed=0)
    most = simulate.bound(turns)
    for policy in policies.POLICIES.values():
        little = simulate.replay(turns, policy, 20_000, 8)
        much = simulate.replay(turns, policy, 400_000, 4_000)
        assert 0 <= little < much <= most


def test_without_eviction_all_policies_are_equal(modules) -> None:
    simulate, policies, traces = modules
    turns = traces.trace("mixed", 30, 6, seed=1)
    found = {simulate.replay(turns, each, 400_000, 4_000) for each in policies.POLICIES.values()}
    assert len(found) == 1


def test_what_was_used_often_is_remembered_after_it_was_evicted(modules) -> None:
    simulate, policies, _ = modules
    Turn = sys.modules["traces"].Turn
    cache = policies.RememberedUse(simulate.SlotAllocator(1_000), simulate.SlotAllocator(2))
    prompt = list(range(100))
    for _ in range(5):
        simulate.serve(cache, Turn(prompt, [1, 2]))
    cache.evict_states(2)
    assert max(uses for uses, _ in cache.ghosts.values()) > 4
    simulate.serve(cache, Turn(prompt, [1, 2]))
    assert max(uses for uses, _ in cache.uses.values()) > 4
