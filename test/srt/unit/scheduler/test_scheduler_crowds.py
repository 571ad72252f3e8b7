"""What many requests, or a cache of many small nodes, may take between two steps: operations are
counted, since a busy machine's seconds say nothing."""

from __future__ import annotations

import random

import numpy as np
from fake_runner import FakeRunner

from mamba_eagle.cache.node import as_tokens, common_prefix
from mamba_eagle.config import EngineConfig
from mamba_eagle.core import SamplingParams
from mamba_eagle.message import Generate
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
