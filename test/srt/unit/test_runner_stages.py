"""Pipeline stages: the recorded plans of one stage, executed by several, give its results bit for
bit, whatever the family, the drafter and the verify mode; and what is wrong with a stage shows.

MAMBA_EAGLE_CASES gives the number of random engines (CI: 4), each with a dozen requests.
"""

from __future__ import annotations

import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_runner_ranks import Case, random_case, serve
from thread_ranks import RunnerRanks, comparable
from tiny_drafters import DRAFTERS
from tiny_model import write_model

from mamba_eagle.message import Plan, StepResult
from mamba_eagle.runner.model_runner import ModelRunner

torch.set_num_threads(1)
CASES = int(os.environ.get("MAMBA_EAGLE_CASES", "4"))
FIRST_SEED = 1

LAYERS = "M*M-MM-*M"
MODELS: dict[str, dict[str, Any]] = {
    "hybrid": {"hybrid_override_pattern": LAYERS},
    "experts": {
        "hybrid_override_pattern": "MEM*MEM",
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "moe_shared_expert_intermediate_size": 40,
    },
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory):
    root, made = tmp_path_factory.mktemp("stages"), {}

    def folder(model: str, drafter: str) -> tuple[Path, Path | None]:
        target = root / model
        if not target.exists():
            write_model(target, **MODELS[model])
        if drafter != "none" and (model, drafter) not in made:
            made[model, drafter] = DRAFTERS[drafter].write(root / f"{model}-{drafter}", target)
        return target, made.get((model, drafter))

    return folder


class Recorder:
    """A runner that keeps what it was asked and what it answered."""

    overlaps = False

    def __init__(self, runner: Any) -> None:
        self.runner, self.ready = runner, runner.ready
        self.steps: list[tuple[Plan, StepResult]] = []

    def launch(self, plan: Plan) -> Any:
        launched = self.runner.launch(plan)
        self.steps.append((plan, launched.result()))
        return launched


def recorded(case: Case) -> tuple[list[tuple[Plan, StepResult]], Any]:
    recorder = Recorder(ModelRunner(case.config))
    _, seen = serve(case, recorder)
    return recorder.steps, seen


def replay(steps: list[tuple[Plan, StepResult]], runner: RunnerRanks) -> None:
    """Raises: AssertionError at the first result that is not the recorded one, bit for bit."""
    for plan, expected in steps:
        assert exact(runner.execute(plan)) == exact(expected), f"step {plan.step}"


def exact(result: StepResult) -> Any:
    return comparable(result)


def test_plans_of_one_stage_give_its_results_on_several(folders) -> None:
    for number in range(FIRST_SEED, FIRST_SEED + CASES):
        rng = random.Random(number)
        case = random_case(rng, folders, tight=number % 2 == 0, models=MODELS)
        steps, _ = recorded(case)
        stages = 2 + number % 3
        config = replace(case.config, pp_size=stages)
        replay(steps, RunnerRanks(config, 1, stages))
