"""In bfloat16 texts with and without speculation part only at near-ties: here on the CPU with a few
prompts, in e2e/test_gpu_texts.py on a GPU through the server."""

from __future__ import annotations

import pytest
import torch
from near_ties import (
    Answer,
    Comparison,
    Parting,
    assert_only_near_ties,
    compare,
    problem_prompts,
)
from runner_harness import Engine, PlainModel, Settings, greedy

from mamba_eagle.embedded import EMBEDDED_HEADS, EMBEDDED_MODEL

PROBLEMS, BATCH = 6, 4
NEW_TOKENS = 48
TREE = Settings(topk=4, steps=5, nodes=16)
TREES = {"deferred": TREE, "snapshot": TREE._replace(scheme="snapshot")}

pytestmark = pytest.mark.skipif(
    not (EMBEDDED_HEADS["EAGLE"] / "model.safetensors").exists(),
    reason="the embedded weights are missing",
)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return problem_prompts(PROBLEMS)


@pytest.fixture(scope="module")
def exact() -> PlainModel:
    return PlainModel(EMBEDDED_MODEL)


def answers(settings: Settings, prompts: list[list[int]]) -> list[Answer]:
    engine = Engine(
        EMBEDDED_MODEL, EMBEDDED_HEADS["EAGLE"], settings, dtype="bfloat16", max_total_tokens=4000
    )
    lives = []
    for first in range(0, len(prompts), BATCH):
        batch = [
            engine.start(prompt, greedy(NEW_TOKENS), return_logprob=True, top_logprobs=4)
            for prompt in prompts[first : first + BATCH]
        ]
        engine.finish(batch)
        for live in batch:
            engine.release(live)
        lives += batch
    return [Answer(live.output, [each.top for each in live.logprobs]) for live in lives]


@pytest.fixture(scope="module")
def plain(prompts: list[list[int]]) -> list[Answer]:
    return answers(Settings("NONE"), prompts)


@pytest.mark.parametrize("mode", TREES)
def test_texts_part_only_at_near_ties(
    mode: str, prompts: list[list[int]], plain: list[Answer], exact: PlainModel
) -> None:
    comparison = compare(exact.logits, prompts, plain, answers(TREES[mode], prompts))
    print(comparison.report(mode))
    assert_only_near_ties(comparison)


def test_a_parting_at_a_wide_gap_is_found() -> None:
    """What the comparison is for: a token that rounding cannot explain."""
    exact = torch.tensor([[0.0, 3.0, 1.0]]).expand(9, -1)
    sure = [(-0.1, 1), (-2.1, 2)]
    plain, other = Answer([1, 1, 1], [sure] * 3), Answer([1, 2, 1], [sure] * 3)
    comparison = compare(lambda tokens: exact[: len(tokens)], [[0]], [plain], [other])
    assert comparison.partings == [Parting(0, 1, (1, 2), gap=2.0, plain_gap=2.0)]
    with pytest.raises(AssertionError, match="gaps above"):
        assert_only_near_ties(comparison)


def test_a_run_that_rounds_worse_is_found() -> None:
    errors = torch.linspace(0, 0.1, 100)
    with pytest.raises(AssertionError, match="errors at"):
        assert_only_near_ties(Comparison(1, [], errors, 2 * errors, spacing=0.1))
    with pytest.raises(AssertionError):
        assert_only_near_ties(Comparison(1, [], errors, errors, spacing=0.01))
