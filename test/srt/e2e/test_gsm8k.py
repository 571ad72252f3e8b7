"""The held-out problems through the real server: speculation changes no text and no accuracy."""

from __future__ import annotations

import pytest

from mamba_eagle.eval import gsm8k
from mamba_eagle.eval.few_shot_gsm8k import Outcome, measure

pytestmark = pytest.mark.e2e

NUM_QUESTIONS = 20
PARALLEL = 8
TREE = ["--speculative-eagle-topk", "2", "--no-speculative-adaptive"]
SETTINGS = {
    "none": ["--speculative-algorithm", "NONE"],
    "tree": ["--speculative-algorithm", "EAGLE", *TREE],
}


@pytest.fixture(scope="module")
def outcomes(server, start_server) -> dict[str, Outcome]:
    """The same questions to one server after the other."""
    task = gsm8k.load_task(gsm8k.EMBEDDED_PROBLEMS, 0, NUM_QUESTIONS)

    def ask(asked) -> Outcome:
        return measure(asked.base_url, task, max_new_tokens=256, parallel=PARALLEL)

    found = {"default": ask(server)}
    for name, flags in SETTINGS.items():
        own = start_server(*flags)
        found[name] = ask(own)
        own.stop()
    return found


def test_speculation_changes_no_text(outcomes: dict[str, Outcome]) -> None:
    texts = {name: [reply.text for reply in outcome.replies] for name, outcome in outcomes.items()}
    assert texts["tree"] == texts["default"] == texts["none"]
    assert outcomes["tree"].score.accuracy == outcomes["none"].score.accuracy


def test_embedded_model_solves_problems_it_has_not_seen(outcomes: dict[str, Outcome]) -> None:
    score = outcomes["none"].score
    assert score.accuracy >= 0.5
    assert score.invalid <= 0.1


def test_drafts_are_accepted(outcomes: dict[str, Outcome]) -> None:
    assert outcomes["none"].score.accept_length == 0  # not reported without speculation
    assert outcomes["tree"].score.accept_length > 1.5
