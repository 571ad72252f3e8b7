"""Stages at work at the same time: who decodes in which plan, and what plans wait for."""

from __future__ import annotations

import random

import msgspec
import pytest
from fake_runner import EarlierStage, FakeRunner, Server, expected_text

from mamba_eagle.config import EngineConfig
from mamba_eagle.core import SamplingParams
from mamba_eagle.message import Plan

SIZES = (2000, 40, 8, 400)
LONG = SamplingParams(max_new_tokens=40, ignore_eos=True)


def serve(cohorts: int, lengths: list[int], **settings: object) -> list[Plan]:
    """The plans for prompts of these lengths that come at once; texts are checked."""
    config = EngineConfig(speculative_algorithm="NONE", **settings)
    earlier = EarlierStage(*SIZES)
    server = Server(config, FakeRunner(*SIZES, cohorts=cohorts), earlier=earlier)
    plans: list[Plan] = []
    take = earlier.take
    earlier.take = lambda plan: (plans.append(plan), take(plan))
    for number, length in enumerate(lengths):
        server.add(f"r{number}", [number] * length, LONG)
    server.finish()
    for number, length in enumerate(lengths):
        assert server.texts[f"r{number}"] == expected_text([number] * length, LONG)
    return plans


@pytest.mark.parametrize("cohorts", [2, 3])
def test_groups_alternate_and_wait_for_none_but_themselves(cohorts: int) -> None:
    plans = serve(cohorts, [5] * 7)
    steady = plans[cohorts + 2 : 30]
    groups = [frozenset(plan.decode.slots) for plan in steady if plan.decode]
    assert len(set(groups)) == cohorts and sum(map(len, set(groups))) == 7
    assert {len(group) for group in groups} == {7 // cohorts, -(-7 // cohorts)}
    assert all(a == b for a, b in zip(groups, groups[cohorts:]))
    assert {plan.step - plan.after for plan in steady} == {cohorts}
    assert all(a.after <= b.after for a, b in zip(plans, plans[1:]))


def test_requests_whose_prompts_have_just_ended_do_not_make_their_group_wait() -> None:
    """Prompts of many requests and steps of others are in flight together all the time."""
    plans = serve(2, [20] * 40, chunked_prefill_size=24)
    both = [plan for plan in plans[4:] if plan.prefill and plan.decode]
    assert len(both) > 10
    assert {plan.step - plan.after for plan in both} == {2}


def test_a_single_request_gets_the_plans_of_one_stage() -> None:
    """Only its chunks wait for less."""
    several, one = (serve(cohorts, [90], chunked_prefill_size=16) for cohorts in (4, 1))
    assert [msgspec.structs.replace(plan, after=0) for plan in several] == [
        msgspec.structs.replace(plan, after=0) for plan in one
    ]


def test_chunks_of_a_prompt_follow_each_other() -> None:
    """They need no step before them; the first token needs the last one."""
    plans = serve(3, [200], chunked_prefill_size=16)
    chunks = [plan for plan in plans if plan.prefill]
    assert len(chunks) == 13
    assert all(plan.step - plan.after >= 3 for plan in chunks[3:])
    first = plans[len(chunks)]
    assert first.decode is not None and first.after == chunks[-1].step


@pytest.mark.parametrize(("cohorts", "most"), [(1, 1024), (3, 341), (8, 256)])
def test_stages_share_the_prompt_tokens_of_a_step(cohorts: int, most: int) -> None:
    """Else one would wait for the pass of another; but very short passes are not worth it."""
    config, runner = EngineConfig(), FakeRunner(*SIZES, cohorts=cohorts)
    assert Server(config, runner).scheduler.prefill.pace.tokens(decodes=False, waiting=0) == most
    config = EngineConfig(chunked_prefill_size=700)
    assert Server(config, runner).scheduler.prefill.pace.tokens(decodes=False, waiting=0) == 700


def test_groups_stay_equal_when_requests_leave() -> None:
    """Whoever is left is shared out again."""
    config = EngineConfig(speculative_algorithm="NONE")
    server = Server(config, FakeRunner(*SIZES, cohorts=2), earlier=EarlierStage(*SIZES))
    rng = random.Random(3)
    for number in range(30):
        how = SamplingParams(max_new_tokens=rng.choice([1, 4, 40]), ignore_eos=True)
        server.add(f"r{number}", [number] * 5, how)
    while not server.scheduler.idle:
        server.step()
        sizes = [0, 0]
        for group in server.scheduler.cohorts._group_of.values():
            sizes[group] += 1
        assert abs(sizes[0] - sizes[1]) <= 1
    server.finish()
