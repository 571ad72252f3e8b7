"""Pipeline stages that work at the same time: what they answer is what one stage answers, and what
is wrong with a plan or a message shows.

MAMBA_EAGLE_CASES gives the number of random engines whose requests are served live (CI: 3).
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import test_runner_stages
import torch
from grammar_rig import EOS, text_of, under, vocabulary
from runner_harness import Settings, random_prompt
from test_runner_ranks import Case, case_of, serve
from test_runner_stages import (
    REQUESTS,
    Recorder,
    Step,
    capture_again,
    come_late,
    drop_a_node,
    engine_of,
)
from thread_ranks import WorkingRanks, comparable
from tiny_model import VOCAB

from mamba_eagle.constrain.matchers import Matchers
from mamba_eagle.core import SamplingParams
from mamba_eagle.message import Generate
from mamba_eagle.parallel.groups import Channel
from mamba_eagle.runner import stages
from mamba_eagle.runner.assemble import assemble
from mamba_eagle.runner.model_runner import ModelRunner
from mamba_eagle.runner.steps.graphs import GraphedRun, GraphedSteps
from mamba_eagle.runner.turns import PlanTooEarly

torch.set_num_threads(1)
folders = test_runner_stages.folders
CASES = int(os.environ.get("MAMBA_EAGLE_CASES", "3"))
FIRST = int(os.environ.get("MAMBA_EAGLE_FIRST_CASE", "0"))


class Overlapping(Recorder):
    """One stage with the plans of several: one is made before the last one is answered."""

    overlaps = True

    def __init__(self, runner: ModelRunner, cohorts: int) -> None:
        super().__init__(runner)
        self.ready = msgspec.structs.replace(runner.ready, cohorts=cohorts)


def make_case(number: int, folders: Any, check_ranks: int = 0) -> tuple[Case, int]:
    """Engine ``number``, and how many stages it gets."""
    rng, engine = random.Random(number), engine_of(number)
    own = folders(engine.model, engine.drafter)
    tight = number % 2 == 0
    case = case_of(rng, engine.drafter, own, tight, count=2 * REQUESTS if tight else REQUESTS)
    return case._replace(config=replace(case.config, check_ranks=check_ranks)), engine.stages


@contextmanager
def working(case: Case, stages: int, **others: Any) -> Iterator[WorkingRanks]:
    ranks = WorkingRanks(replace(case.config, pp_size=stages), stages, **others)
    try:
        yield ranks
    finally:
        ranks.close()


@pytest.fixture(scope="module")
def recorded(folders) -> tuple[Case, list[Step]]:
    """The plans of three cohorts, and one stage's answers."""
    case, _ = make_case(0, folders)
    recorder = Overlapping(assemble(case.config), 3)
    serve(case, recorder)
    return case, recorder.steps


def replay(steps: list[Step], ranks: WorkingRanks) -> None:
    """All plans are there at once. Raises: AssertionError at the first other answer."""
    answers = [ranks.launch(plan) for plan, _ in steps]
    for (plan, expected), answer in zip(steps, answers):
        assert comparable(answer.result()) == comparable(expected), f"step {plan.step} differs"


def test_recorded_plans_give_the_answers_of_one_stage(recorded) -> None:
    """Bit for bit, with trees of later plans drafted before earlier ones are verified."""
    case, steps = recorded
    assert sum(plan.after < plan.step - 1 for plan, _ in steps) > len(steps) // 3
    with working(case, 3) as ranks:
        replay(steps, ranks)
        assert ranks.drafted > len(steps) // 3 and min(ranks.begun[:2]) > 1, ranks.begun


def test_live_requests_get_the_texts_of_one_stage(folders) -> None:
    """Messages and plans take any time; arrivals, retraction, aborts and cache hits in between."""
    total: Counter[str] = Counter()
    for number in range(FIRST, FIRST + CASES):
        case, stages = make_case(number, folders, check_ranks=random.Random(number).choice([0, 9]))
        expected, _ = serve(case, assemble(case.config))
        with working(case, stages, delays=random.Random(number)) as ranks:
            texts, seen = serve(case, ranks)
            total += seen + Counter(drafted=ranks.drafted, begun=max(ranks.begun))
        for rid, tokens in expected.items():
            n = min(len(tokens), len(texts[rid])) if rid in case.aborts else None
            assert texts[rid][:n] == tokens[:n], f"case {number}, request {rid}, {stages} stages"
    names = ("hits", "retracted", "drafts", "logprobs", "drafted", "begun")
    assert min(total[name] for name in names) > 0, total


def test_captured_steps_of_cohorts_leave_each_other_alone(
    recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs of all kinds have the same memory: whatever a step does not save, the next one
    spoils."""
    capture_again(monkeypatch)
    monkeypatch.setattr(stages, "mail_for", lambda *_: object())
    occupy, switches = GraphedSteps.occupy, [0]

    def spoil(self: GraphedSteps, run: GraphedRun | None) -> None:
        before = self.occupant
        occupy(self, run)
        if run is before or run is None:
            return
        switches[0] += before is not None
        for graph in self.graphs.values():
            for part in graph.memory(has_verified=True) if graph is not run.graph else ():
                part.fill_(77)

    monkeypatch.setattr(GraphedSteps, "occupy", spoil)
    case, steps = recorded
    with working(case, 3) as ranks:
        replay(steps[:40], ranks)
        assert isinstance(ranks.steps, GraphedSteps) and switches[0] > 10


def test_grammars_are_followed_by_trees_that_are_drafted_ahead(folders) -> None:
    model, head = folders("hybrid", "eagle3")
    config = Settings("EAGLE3").config(model, head, speculative_adaptive=False)
    matchers = Matchers(vocabulary, VOCAB, (EOS,))
    asked = [under("schema", 20), under("open", 20, seed=3), under("schema", 20, seed=4)]
    requests = [
        Generate(rid=str(i), token_ids=random_prompt(9, i), sampling=sampling)
        for i, sampling in enumerate(asked)
    ]
    case = Case(config, requests, [0, 1, 1], {})
    runner = assemble(config)
    runner.constraints.matchers = matchers
    expected, _ = serve(case, runner)
    with working(case, 3) as ranks:
        ranks.constraints.matchers = matchers
        texts, seen = serve(case, ranks)
        assert ranks.drafted > 0
    assert texts == expected and text_of(texts["0"]).startswith("{") and seen["drafts"] > 0


@pytest.mark.parametrize("ahead", [True, False], ids=["of-the-last-stage", "of-the-first-stage"])
def test_a_plan_that_does_not_wait_is_found(recorded, ahead: bool) -> None:
    """By the stage that would draft from tables that are not up to date, or verify with them."""
    case, steps = recorded
    forgetful = [(msgspec.structs.replace(plan, after=0), expected) for plan, expected in steps]
    with working(case, 2) as ranks:
        ranks.runners[1].drafts_ahead = ahead
        with pytest.raises(PlanTooEarly, match="comes after step 0, but names request slot"):
            replay(forgetful, ranks)


@pytest.mark.parametrize("wrong", [drop_a_node, come_late])
def test_a_turn_that_is_wrong_is_noticed(recorded, wrong: Callable[..., Any]) -> None:
    """By the answers alone."""
    case, steps = recorded
    before: list[Any] = []

    def tamper(stage: int, kind: Channel, x: torch.Tensor) -> torch.Tensor:
        return wrong(x, before) if kind == Channel.TOKENS and x.shape[1] > 1 else x

    with working(case, 2) as ranks:
        ranks.ranks.posts[0].tamper = tamper
        with pytest.raises(AssertionError, match="step [0-9]+ differs"):
            replay(steps, ranks)


def test_stages_take_turns_where_drafts_depend_on_other_requests(folders) -> None:
    model, _ = folders("hybrid", "none")
    settings = Settings("NGRAM", topk=2, steps=3, nodes=8)
    config = settings.config(model, None, speculative_adaptive=False)
    long = SamplingParams(max_new_tokens=30, ignore_eos=True, temperature=0.0)
    asked = [Generate(rid=str(i), token_ids=[5] * 9, sampling=long) for i in range(2)]
    case = Case(config, asked, [0, 20], {})  # the second one writes what the first one has written
    with working(case, 2) as ranks:
        assert ranks.ready.cohorts == 1
        assert not any(each.defers or each.drafts_ahead for each in ranks.runners)
        texts, seen = serve(case, ranks)
    assert seen["drafts"] > 0 and texts == serve(case, assemble(config))[0]
