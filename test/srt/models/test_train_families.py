"""Heads of every kind are trained for every family."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peer_models import PEERS, VOCAB, make_peer
from safetensors.torch import load_file

from mamba_eagle.bench.batch import BatchEngine, Generation, greedy
from mamba_eagle.config import EngineConfig
from mamba_eagle.resolve import resolve
from mamba_eagle.runner.assemble import assemble
from mamba_eagle.train import command
from mamba_eagle.train.batches import Answer, pad_answers
from mamba_eagle.train.heads import TRAINABLE_HEADS
from mamba_eagle.train.settings import TrainSettings
from mamba_eagle.train.target import load_target, run_target

pytestmark = pytest.mark.usefixtures("one_thread")

DEPTH = 3
FLAGS = {
    "eagle": [],
    "eagle3": ["--draft-vocab-size", "50"],
    "mtp": ["--mtp-modules", str(DEPTH)],
    "dflash": ["--draft-layers", "2"],
    "dspark": ["--draft-layers", "1", "--markov-rank", "8"],
}


# Block drafters read hidden states and nothing else of a family: one of each kind is enough.
BLOCKS_FOR = ("nemotron-3.5-lightning", "mamba2-groups", "falcon-h1")
# Variants of a family differ inside of layers: EAGLE-3, which reads what they give, is enough.
FIRST_OF_FAMILY = {family: name for name, (family, _) in reversed(PEERS.items())}.values()


@pytest.fixture(scope="module", params=PEERS)
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    make_peer(request.param).save_pretrained(folder)
    records = [{"token_ids": [k % VOCAB for k in range(i, i + 5)]} for i in range(3, 9)]
    (folder / "data.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return folder


@pytest.fixture(params=TRAINABLE_HEADS)
def algorithm(request: pytest.FixtureRequest, target: Path) -> str:
    family = request.node.callspec.params["target"]
    if request.param in ("dflash", "dspark") and family not in BLOCKS_FOR:
        pytest.skip(f"block drafters are trained for {', '.join(BLOCKS_FOR)}")
    if request.param in ("eagle", "mtp") and family not in FIRST_OF_FAMILY:
        pytest.skip("trained for the first variant of each family")
    return request.param


def test_a_head_is_trained_and_served(algorithm: str, target: Path, tmp_path: Path) -> None:
    """Answers, one step, a folder that drafts: the text is the target's."""
    train(algorithm, target, tmp_path, steps=1)
    assert all(t.isfinite().all() for t in load_file(tmp_path / "model.safetensors").values())
    answers = read_answers(tmp_path)[:1]
    made = served(algorithm, target, tmp_path, answers)
    assert made.tokens == [answers[0]["answer"]]


def train(algorithm: str, target: Path, folder: Path, steps: int) -> None:
    flags = ["--target", str(target), "--data", str(target / "data.jsonl"), "--device", "cpu"]
    flags += ["--output", str(folder), "--algorithm", algorithm, "--depth", str(DEPTH)]
    flags += ["--held-out", "2", "--max-new-tokens", "12", "--steps", str(steps), *FLAGS[algorithm]]
    assert command.main(flags) == 0


def read_answers(folder: Path) -> list[dict[str, list[int]]]:
    return [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]


def served(
    algorithm: str, target: Path, folder: Path, answers: list[dict[str, list[int]]], **shape: Any
) -> Generation:
    """The answers' prompts, with this head."""
    config = resolve(
        EngineConfig(
            model_path=str(target),
            device="cpu",
            speculative_algorithm=algorithm.upper(),
            speculative_draft_model_path=str(folder),
            speculative_num_steps=DEPTH,
            max_running_requests=len(answers),
            max_total_tokens=300,
            **shape,
        )
    )
    prompts = [answer["prompt"] for answer in answers]
    driver = BatchEngine(config, assemble(config))
    return driver.generate(prompts, greedy(len(answers[0]["answer"])))


@pytest.mark.parametrize("target", ["qwen3.5"], indirect=True)
def test_what_a_head_has_learnt_is_accepted_from_a_delta_rule(
    algorithm: str, target: Path, tmp_path: Path
) -> None:
    """Of chains and trees, and the texts are those without drafts."""
    train(algorithm, target, tmp_path, steps=10)
    answers = read_answers(tmp_path)
    for topk, nodes, mode in ((1, 4, "deferred"), (3, 8, "snapshot")):
        shape = {"speculative_eagle_topk": topk, "speculative_num_draft_tokens": nodes}
        made = served(algorithm, target, tmp_path, answers, mamba_verify_mode=mode, **shape)
        assert made.tokens == [answer["answer"] for answer in answers]
        assert made.accept_length > 1.2


def test_every_weight_of_a_head_gets_a_gradient(algorithm: str, target: Path) -> None:
    """And the target none."""
    settings = TrainSettings(
        target=str(target),
        algorithm=algorithm,
        depth=DEPTH,
        draft_vocab_size=50,
        mtp_modules=DEPTH,
        head_pattern="M*-",
    )
    model = load_target(target, torch.device("cpu"))
    tokens = torch.randint(0, VOCAB, (2, 20), generator=torch.Generator().manual_seed(1)).tolist()
    answers = [Answer(tokens[0], 4), Answer(tokens[1][:15], 2)]
    head = TRAINABLE_HEADS[algorithm](settings, model, answers)
    padded = pad_answers(answers, DEPTH, torch.device("cpu"))
    guesses = [sum(answer.num_drafts(d) for answer in answers) for d in range(DEPTH)]
    head.loss(padded, run_target(model, padded), guesses).backward()
    for name, parameter in head.module.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().max() > 0, name
    assert all(parameter.grad is None for parameter in model.parameters())
