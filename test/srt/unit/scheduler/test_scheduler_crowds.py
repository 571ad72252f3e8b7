"""What many requests, or a cache of many small nodes, may take between two steps: operations are
counted, since a busy machine's seconds say nothing."""

from __future__ import annotations

import random
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import count, pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_runner import VOCAB, FakeRunner
from msgspec.structs import astuple

from mamba_eagle.cache import slot_pools
from mamba_eagle.cache.node import Node, as_tokens, common_prefix
from mamba_eagle.cache.radix import RadixCache
from mamba_eagle.cache.tiers.passage import MIN_FRESH, FromDevice
from mamba_eagle.cache.tiers.tier import Tier
from mamba_eagle.config import EngineConfig
from mamba_eagle.core import SamplingParams
from mamba_eagle.message import Abort, Generate, TierSizes
from mamba_eagle.scheduler import prefill, process
from mamba_eagle.scheduler.prefill import MAX_EVICTED
from mamba_eagle.scheduler.request import Request
from mamba_eagle.scheduler.scheduler import Scheduler

CONFIG = EngineConfig(speculative_algorithm="NONE")
ONE = SamplingParams(max_new_tokens=1)


def scheduler(kv_slots: int = 2000, requests: int = 8) -> Scheduler:
    return Scheduler(CONFIG, FakeRunner(kv_slots, 40, requests, 1000).ready)


def add(to: Scheduler, rid: str, prompt: list[int]) -> None:
    assert not to.add(Generate(rid=rid, token_ids=prompt, sampling=ONE))


def test_one_of_many_waiting_requests_is_found_without_asking_them_all(monkeypatch) -> None:
    """To abort 4,096 from the last on took 0.6 s."""
    compared = []
    monkeypatch.setattr(Request, "__eq__", lambda a, b: compared.append(0) or a is b)
    monkeypatch.setattr(Request, "__hash__", object.__hash__)
    for pause in (False, True):
        crowd = scheduler()
        if pause:
            crowd.pause("keep")
        for i in range(100):
            add(crowd, f"r{i}", [1, 2, 3])
        for i in reversed(range(100)):
            assert crowd.abort(f"r{i}")
        assert crowd.idle
    assert len(compared) < 1000


def test_what_waiting_requests_need_is_marked_once_in_a_plan(monkeypatch) -> None:
    """64 admitted prompts of 60,000 cached tokens each looked for those of all others."""
    crowd = scheduler(kv_slots=200, requests=16)
    slots = crowd.slots
    for first, prompt in enumerate([range(100), *([1000 + i] for i in range(100))]):
        node = slots.cache.insert(
            slots.cache.root, as_tokens(prompt), slots.kv.allocate(len(prompt))
        ).node
        if first == 0:
            (state,) = slots.states.allocate(1)
            assert slots.cache.attach_state(node, 100, state, "tail")
    looked = []
    match = slots.match
    monkeypatch.setattr(slots, "match", lambda *given: looked.append(given) or match(*given))
    for i in range(16):
        add(crowd, f"r{i}", [*range(100), 2000 + i])
    plan = crowd.plan()
    assert plan is not None and len(plan.prefill) == 16
    assert len(looked) <= 3 * 16


def test_prefixes_are_as_long_as_said_where_short_ones_are_of_no_use() -> None:
    dice = random.Random(1)
    for _ in range(2000):
        a = np.array([dice.randrange(20) == 0 for _ in range(dice.randrange(90))], dtype=np.int32)
        b, least = a[: dice.randrange(91)].copy(), dice.randrange(1, 90)
        if len(b):
            b[dice.randrange(len(b))] = dice.randrange(2)
        whole = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
        found = common_prefix(a, b, least)
        assert found == whole or (found == 0 and whole < least)


def test_plans_do_not_wait_until_no_more_requests_come(monkeypatch) -> None:
    """4,096 took 0.4 s, in which no step was planned."""
    clock, waiting = [0.0], deque(Abort(rid="none") for _ in range(100))

    def receive(timeout_ms: int) -> Abort | None:
        clock[0] += 0.001
        return waiting.popleft() if waiting else None

    monkeypatch.setattr(process.time, "monotonic", lambda: clock[0])
    busy = object.__new__(process.SchedulerProcess)
    busy.scheduler, busy.requests = scheduler(), SimpleNamespace(receive=receive)
    busy.receive_requests()
    assert 90 <= len(waiting) < 100
    while waiting:
        busy.receive_requests()


@pytest.mark.parametrize("nodes", [process.MAX_CHECKED, process.MAX_CHECKED + 1])
def test_an_idle_process_does_not_check_a_cache_that_takes_long(nodes: int, monkeypatch) -> None:
    """A million small nodes took 5.6 s, and who came meanwhile waited."""
    crowd = scheduler(kv_slots=nodes)
    many_leaves(crowd.slots.cache, nodes)
    idle = object.__new__(process.SchedulerProcess)
    idle.scheduler, idle.answers = crowd, SimpleNamespace(answer_waiting=lambda: None)
    idle.changed, idle.checked_at = True, -process.CHECK_SECONDS
    checks = []
    monkeypatch.setattr(crowd, "check_integrity", lambda: checks.append(0))
    idle.when_idle()
    assert len(checks) == (nodes <= process.MAX_CHECKED)


def many_leaves(cache: RadixCache, count: int, prompt: Sequence[int] = ()) -> None:
    """Each of one token, behind a prompt."""
    for i in range(count):
        tokens = as_tokens([*prompt, 1000 + i])
        kv = cache.kv.allocate(len(tokens))
        assert kv is not None
        done = cache.insert(cache.root, tokens, kv)
        cache.kv.free(kv[: len(kv) - done.taken])


class Children(dict):
    """Counts those that are looked at."""

    looked = 0

    def values(self):
        for child in super().values():
            self.looked += 1
            yield child


def test_a_state_above_many_nodes_is_attached_without_looking_at_all() -> None:
    """30,000 nodes took 10 ms for each state that came and went above them."""
    cache = scheduler(kv_slots=5000).slots.cache
    many_leaves(cache, 2000, [1])
    top = cache.root.children[1]
    top.children = Children(top.children)
    below = list(top.children.values())[:20]
    for node in below:
        (slot,) = cache.state_slots.allocate(1)
        assert cache.attach_state(node, node.end, slot, "tail")
    top.children.looked = 0
    (slot,) = cache.state_slots.allocate(1)
    assert cache.attach_state(top, 1, slot, "tail")
    assert top.children.looked < 1000
    assert {cache.states.score(node) for node in below} == {1}
    cache.check_integrity()  # all ranks have fallen


def test_what_goes_down_later_is_forgotten_with_its_state() -> None:
    """Nodes without one were kept as long as more came than went down."""
    slots = scheduler().slots
    sizes = TierSizes(host_units=100, state_units=1)
    passage = FromDevice(slots, Tier(1, 100, sizes, False), count(1), 1, eager=True)
    slots.cache.below = passage
    for i in range(1000):
        node = slots.cache.insert(slots.cache.root, as_tokens([i]), slots.kv.allocate(1)).node
        state = slots.reserve_state()
        assert slots.cache.attach_state(node, 1, state, "tail")
    assert len(passage.fresh) <= 2 * slots.states.total + MIN_FRESH + 1
    kept = [node for node in slots.cache.nodes() if node.state_slot >= 0]
    assert len(kept) == slots.states.total and all(node in passage.fresh for node in kept)


def test_a_long_path_of_small_nodes_below_can_be_forgotten() -> None:
    """A copy that failed ended the scheduler: Python has a thousand frames."""
    tier = Tier(2, 3000, TierSizes(host_units=1, disk_units=3000), False)
    cache = tier.cache
    node = top = cache.root
    for i in range(2000):
        cache.lock(node)
        above, node = node, cache.insert(node, as_tokens([i]), tier.kv.allocate(1)).node
        cache.unlock(above)
        top = node if i == 0 else top
    tier.forget(top)
    assert cache.num_nodes == 0 and tier.units.num_free == 3000
    tier.check_integrity(0)


def test_a_prompt_that_many_leaves_are_evicted_for_waits_some_plans() -> None:
    """65,536 leaves took 0.4 s, and a running request waited."""
    crowd = scheduler(kv_slots=3 * MAX_EVICTED)
    slots, runner = crowd.slots, FakeRunner(3 * MAX_EVICTED, 40, 8, 1000)
    crowd.runner.context_length = 3 * MAX_EVICTED
    long = SamplingParams(max_new_tokens=100, ignore_eos=True)
    assert not crowd.add(Generate(rid="runs", token_ids=[1, 2, 3], sampling=long))
    many_leaves(slots.cache, slots.kv.num_free - 110)
    plans = [crowd.plan()]
    crowd.process(runner.execute(plans[0]))
    prompt = list(range(2 * MAX_EVICTED + 100))
    first = Generate(rid="new", token_ids=prompt, sampling=ONE, priority=1)
    assert not crowd.add(first)
    evicted = [slots.cache.evicted_kv]
    while not crowd.prefill.chunked and len(plans) < 9:
        plan = crowd.plan()
        if plan is not None:
            evicted.append(slots.cache.evicted_kv)
            plans.append(plan)
            assert plan.decode is not None and not crowd.stats.num_retracted
            crowd.process(runner.execute(plan))
    assert 3 <= len(evicted) <= 5
    assert all(after - before <= MAX_EVICTED for before, after in pairwise(evicted))
    crowd.check_integrity()


@pytest.mark.parametrize(
    ("asked", "least", "most"),
    [
        ({}, 512, 512),
        ({"top_logprobs": 64, "logprob_start": 0}, 50, 128),
        ({"token_ids_logprob": [1] * 999, "logprob_start": 0}, 1, 9),
        ({"top_logprobs": 64, "logprob_start": 600}, 512, 512),
    ],
)
def test_a_step_makes_no_more_logprobs_than_it_has_time_for(
    asked: dict[str, Any], least: int, most: int
) -> None:
    """8,192 tokens with 64 logprobs each took the runner 0.16 s and the scheduler 0.11."""
    crowd = scheduler()
    crowd.prefill.pace.most = 512
    for i in range(2):
        given = Generate(
            rid=f"r{i}", token_ids=[i] * 900, sampling=ONE, return_logprob=True, **asked
        )
        assert not crowd.add(given)
    plan = crowd.plan()
    assert plan is not None
    assert least <= sum(len(item.token_ids) for item in plan.prefill) <= most


@pytest.mark.parametrize("policy", ["fcfs", "lpm"])
def test_a_plan_looks_up_no_more_prompts_than_it_has_time_for(policy: str, monkeypatch) -> None:
    """64 prompts whose path had 2,900 nodes took 0.3 s."""
    monkeypatch.setattr(prefill, "MAX_WALKED", 1000)
    config = EngineConfig(speculative_algorithm="NONE", schedule_policy=policy)
    runner = FakeRunner(3000, 40, 16, 1000)
    crowd = Scheduler(config, runner.ready)
    cache, path = crowd.slots.cache, [i % VOCAB for i in range(300)]
    for i in range(len(path)):
        prompt = [*path[:i], 1000 + i]
        kv = cache.kv.allocate(len(prompt))
        for position, slot in enumerate(kv):
            runner.kv[slot] = prompt[position], position
        done = cache.insert(cache.root, as_tokens(prompt), kv)
        cache.kv.free(kv[: len(kv) - done.taken])
    for i in range(32):
        add(crowd, f"r{i}", [*path, i])
    plans = []
    while not crowd.idle:
        before = cache.num_walked
        plan = crowd.plan()
        assert cache.num_walked - before <= 3 * 1300
        if plan is not None:
            plans.append(plan)
        crowd.process(runner.execute(plans.pop(0)))
    crowd.check_integrity()


def test_a_waiting_request_has_no_list_of_its_prompt() -> None:
    """4,096 of 65,536 tokens would take 10 GB."""
    crowd, asked = scheduler(), Generate(rid="r", token_ids=[*range(1000, 1500)], sampling=ONE)
    assert not crowd.add(asked)
    (waits,) = crowd.prefill.waiting
    assert waits.tokens.tolist() == asked.token_ids  # the caller's is as it was
    held = [*vars(waits).values(), *astuple(waits.asked)]
    assert not [each for each in held if isinstance(each, list) and len(each) >= 500]


class Slices(array):
    """Counts its copies."""

    made = 0

    def __getitem__(self, place):
        Slices.made += isinstance(place, slice)
        return super().__getitem__(place)


def test_waiting_requests_copy_no_text_of_those_that_leave() -> None:
    """64 that waited for what 64 of 60,000 tokens leave behind took 0.1 s."""
    crowd, runner = scheduler(requests=4), FakeRunner(2000, 40, 4, 1000)
    for i in range(4):
        add(crowd, f"leaves{i}", [1, 2, i, *range(50)])
    plan = crowd.plan()
    crowd.process(runner.execute(plan))
    leaving = list(crowd._admitted)
    for request in leaving:
        assert request.leaving
        request.tokens = Slices("i", request.tokens)
    for i in range(20):
        add(crowd, f"r{i}", [1, 2, i % 4, *range(40), 9])
    waiting, saves = list(crowd.prefill.waiting), crowd.prefill.saves
    Slices.made = 0
    found = [
        saves.hit_is_coming(one, crowd.prefill.catch_up.start(one).match, leaving)
        for one in waiting
    ]
    assert len(found) == 20 and Slices.made == 0


def test_a_look_at_the_cache_does_not_look_at_all_children_of_a_node(monkeypatch) -> None:
    """30,000 took 22 ms."""
    crowd, looked = scheduler(kv_slots=9000), []
    many_leaves(crowd.slots.cache, 9000)
    largest = slot_pools.heapq.nlargest

    def counted(most: int, nodes: Iterable[Node], key: Callable[[Node], int]) -> list[Node]:
        return largest(most, nodes, key=lambda node: looked.append(node) or key(node))

    monkeypatch.setattr(slot_pools.heapq, "nlargest", counted)
    found = slot_pools.top_nodes(crowd.slots.cache.root, max_nodes=3, max_tokens=1)
    assert [node.token_ids for node in found] == [[9999], [9998], [9997]]
    assert len(looked) <= 8192
