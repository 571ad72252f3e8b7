"""A model that drafts for itself is always right: any mistake in its caches would show at once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from runner_harness import (
    Engine,
    Live,
    PlainModel,
    Settings,
    accepted,
    greedy,
    random_prompt,
    sampled,
)
from tiny_model import write_model

from mamba_eagle.core import TreeShape
from mamba_eagle.drafting.waiting import MAX_PENDING

torch.set_num_threads(1)

PLAIN_STEP = TreeShape()
PATTERNS = {"hybrid": "M*-M", "mamba": "MM-", "attention": "*-*-"}
CHAIN = Settings("STANDALONE", topk=1, steps=4, nodes=5)
SHAPES = {
    "chain": CHAIN,
    "chain-torch": CHAIN._replace(fused=False),
    "chain-snapshot": CHAIN._replace(scheme="snapshot"),
    "single-step": CHAIN._replace(steps=1, nodes=2),
}


@pytest.fixture(scope="module", params=PATTERNS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    return write_model(folder, hybrid_override_pattern=PATTERNS[request.param])


TREE = CHAIN._replace(topk=3, nodes=11)


def engine_of(model: Path, shape: str) -> Engine:
    return Engine(model, model, SHAPES[shape])


def assert_all_drafts_were_accepted(lives: list[Live], engine: Engine) -> None:
    """Every step but a request's last went as deep as the tree."""
    for live in lives:
        depths = accepted([live])
        assert depths[:-1] == [engine.shape.depth + 1] * (len(depths) - 1)
        assert len(depths) > 2, "steps enough to mean something"


def test_the_memory_plan_has_room_for_the_drafters_rows(model: Path) -> None:
    runner = engine_of(model, "chain").runner
    requests = runner.table.processed.shape[0]
    held = runner.scheme.num_bytes + runner.drafter.scheme.num_bytes
    assert runner.memory.request_bytes * requests == held


@pytest.mark.parametrize("shape", SHAPES)
def test_a_model_drafts_all_of_its_own_greedy_text(model: Path, shape: str) -> None:
    """In a batch, from prompts in chunks, over folds of the drafter's own state."""
    engine = engine_of(model, shape)
    lives = [
        engine.start(random_prompt(19, 1), greedy(70)),
        engine.start(random_prompt(1, 2), greedy(40)),
        engine.start(random_prompt(26, 3), greedy(55), cuts=(5, 6, 20)),
    ]
    engine.finish(lives)
    assert_all_drafts_were_accepted(lives, engine)
    plain = PlainModel(model)
    assert [live.output for live in lives] == [plain.choices(live) for live in lives]


@pytest.mark.parametrize("shape", ["chain", "chain-torch"])
def test_a_model_drafts_its_own_samples_with_the_targets_noise(model: Path, shape: str) -> None:
    engine = engine_of(model, shape)
    lives = [engine.start(random_prompt(12, seed), sampled(45, seed)) for seed in range(3)]
    lives.append(engine.start(random_prompt(12, 7), greedy(45)))
    engine.finish(lives)
    assert_all_drafts_were_accepted(lives, engine)


@pytest.mark.parametrize("shape", ["chain", "chain-torch", "chain-snapshot"])
def test_drafts_go_on_after_plain_steps(model: Path, shape: str) -> None:
    """As many as fill the room of pending entries, and more."""
    engine = engine_of(model, shape)
    for plain_steps in (1, 3, MAX_PENDING - 1, MAX_PENDING, MAX_PENDING + 1, 2 * MAX_PENDING):
        live = engine.start(random_prompt(17, plain_steps), greedy(plain_steps + 40))
        engine.execute(decode=[live])
        for _ in range(plain_steps):
            engine.execute(decode=[live], shape=PLAIN_STEP)
        live.steps.clear()
        engine.finish([live])
        assert_all_drafts_were_accepted([live], engine)
        engine.release(live)


@pytest.mark.parametrize("shape", ["chain", "chain-torch", "chain-snapshot"])
def test_a_request_that_has_ended_does_not_disturb_the_drafter(model: Path, shape: str) -> None:
    """It is in one more batch than it should be, and is continued from its state slot."""
    engine = engine_of(model, shape)
    first = engine.start(random_prompt(20, 1), greedy(13))
    other = engine.start(random_prompt(9, 2), greedy(60))
    engine.finish([first])
    engine.execute(decode=[first, other])
    prefix = engine.release(first, fold_to=first.processed)
    assert prefix is not None
    turn = engine.start(first.tokens + random_prompt(5, 3), greedy(40), hit=prefix)
    engine.finish([turn, other])
    assert_all_drafts_were_accepted([turn, other], engine)


@pytest.mark.parametrize("shape", ["chain", "chain-torch"])
@pytest.mark.parametrize("cut", [0, 1, 2, 3])
def test_the_drafter_knows_a_prefix_from_the_cache(model: Path, shape: str, cut: int) -> None:
    """A state slot saved inside a prompt, and that of a request which left; with a text cut
    short there as by a stop string."""
    engine = engine_of(model, shape)
    prompt = random_prompt(30, 4)
    first = engine.start(prompt, greedy(22), cuts=(9,), saves=(5, 21))
    engine.finish([first])
    for position in (5, 21):
        hit = first.saved[position]
        second = engine.start(prompt[:position] + random_prompt(8, 5), greedy(30), hit=hit)
        engine.finish([second])
        assert_all_drafts_were_accepted([second], engine)
        engine.release(second)
    end = max(first.processed - cut, first.folded)
    left = engine.release(first, fold_to=end)
    assert left is not None
    third = engine.start(first.tokens[:end] + random_prompt(6, 6), greedy(30), hit=left)
    engine.finish([third])
    assert_all_drafts_were_accepted([third], engine)


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "torch"])
def test_trees_of_changing_shapes_have_the_models_own_scores(model: Path, fused: bool) -> None:
    engine = Engine(model, model, TREE._replace(fused=fused))
    plain = PlainModel(model)
    lives = [engine.start(random_prompt(11, seed), greedy(40)) for seed in (8, 9)]
    shapes = [TreeShape(3, 4, 11), TreeShape(1, 2, 3), PLAIN_STEP, TreeShape(2, 3, 6)]
    for step in range(9):
        before = [list(live.tokens) for live in lives]
        shape = shapes[step % len(shapes)]
        engine.execute(decode=lives, shape=shape)
        for tokens, live in zip(before, lives):
            if shape.nodes == 1:
                continue
            tree, paths, scores = live.proposals[-1], [list[int]()], [0.0]
            for token, parent in zip(tree.tokens[1:], tree.parents[1:]):
                log_probs = plain.logits(tokens + paths[parent])[-1].log_softmax(0)
                paths.append([*paths[parent], token])
                scores.append(scores[parent] + float(log_probs[token]))
            assert tree.scores == pytest.approx(scores, abs=1e-3)
            assert len(live.tokens) > len(tokens) + 1, "the model's best token is in the tree"
    assert [live.output for live in lives] == [plain.choices(live) for live in lives]
