"""Heads of every kind are trained for every family."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peer_models import PEERS, VOCAB, make_peer
from safetensors.torch import load_file

from mamba_eagle.bench.batch import BatchEngine, greedy
from mamba_eagle.config import EngineConfig
from mamba_eagle.resolve import resolve
from mamba_eagle.runner.assemble import assemble
from mamba_eagle.train import command
from mamba_eagle.train.batches import Answer, pad_answers
from mamba_eagle.train.heads.registry import TRAINABLE_HEADS
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
FOLDERS = tuple(f"{name}0" for name in BLOCKS_FOR)  # as pytest numbers them


@pytest.fixture(scope="module", params=PEERS)
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    make_peer(request.param).save_pretrained(folder)
    records = [{"token_ids": [k % VOCAB for k in range(i, i + 5)]} for i in range(3, 9)]
    (folder / "data.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return folder


@pytest.fixture(params=TRAINABLE_HEADS)
def algorithm(request: pytest.FixtureRequest, target: Path) -> str:
    if request.param in ("dflash", "dspark") and target.name not in FOLDERS:
        pytest.skip(f"block drafters are trained for {', '.join(BLOCKS_FOR)}")
    return request.param


def test_a_head_is_trained_and_served(algorithm: str, target: Path, tmp_path: Path) -> None:
    """Answers, one step, a folder that drafts: the text is the target's."""
    flags = ["--target", str(target), "--data", str(target / "data.jsonl"), "--device", "cpu"]
    flags += ["--output", str(tmp_path), "--algorithm", algorithm, "--depth", str(DEPTH)]
    flags += ["--held-out", "2", "--max-new-tokens", "12", "--steps", "1", *FLAGS[algorithm]]
    assert command.main(flags) == 0
    assert all(t.isfinite().all() for t in load_file(tmp_path / "model.safetensors").values())
    config = resolve(
        EngineConfig(
            model_path=str(target),
            device="cpu",
            speculative_algorithm=algorithm.upper(),
            speculative_draft_model_path=str(tmp_path),
            speculative_num_steps=DEPTH,
            max_running_requests=2,
            max_total_tokens=300,
        )
    )
    answer = json.loads((tmp_path / "answers.jsonl").read_text().splitlines()[0])
    driver = BatchEngine(config, assemble(config))
    made = driver.generate([answer["prompt"]], greedy(len(answer["answer"])))
    assert made.tokens == [answer["answer"]]


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
