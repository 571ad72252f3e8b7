"""Pauses and changes of the model: no text mixes weights, nothing is lost, all end."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import fake_runner
import pytest
from fake_runner import VOCAB, FakeRunner, Server, expected_text, noise
from fake_tiers import TieredRunner

from mamba_eagle.config import EngineConfig
from mamba_eagle.core import SamplingParams
from mamba_eagle.message import (
    AskRanks,
    ChangeModel,
    Done,
    ExportPrefix,
    ImportPrefix,
    LoadAdapter,
    RequestOutput,
    SumWeights,
    TierSizes,
    Weights,
)
from mamba_eagle.scheduler.answers import Answers

TREE = EngineConfig(
    speculative_algorithm="EAGLE",
    speculative_num_steps=3,
    speculative_eagle_topk=2,
    speculative_num_draft_tokens=6,
    chunked_prefill_size=32,
)
PROMPT = list(range(20))


def sampling(length: int, seed: int = 1) -> SamplingParams:
    return SamplingParams(max_new_tokens=length, seed=seed, ignore_eos=True)


def new_runner() -> FakeRunner:
    return FakeRunner(600, 12, 4, 400, journals=4)


class Trainer(Server):
    """Pauses and changes the model, as the loop of the scheduler process does."""

    def __init__(self, *arguments, **others) -> None:
        super().__init__(*arguments, **others)
        self.asked: dict[str, tuple[list[int], SamplingParams]] = {}

    def settle(self) -> None:
        """Until the pause is in force."""
        while not self.scheduler.paused:
            self.step()

    def change(self, **what) -> str:
        """What the runner is told makes all slots worthless."""
        asked = ChangeModel(call_id=1, **what)
        if problem := self.scheduler.pauses.problem(asked):
            return problem
        self.scheduler.begin_change(asked)
        while not self.scheduler.holds_nothing:
            self.step()
        self.scheduler.flush()
        step, self.runner = self.runner.last_step, new_runner()
        self.runner.last_step = step
        self.scheduler.pauses.changed(worked=True)
        return ""


class Versioned(Trainer):
    """The model's tokens depend on the version of the weights as well."""

    def next_token(self, prefix: tuple[int, ...], sampling: SamplingParams, num_output: int) -> int:
        return noise(prefix, sampling.seed, self.scheduler.pauses.version) % VOCAB

    def take(self, outputs: list[RequestOutput]) -> None:
        super().take(outputs)
        for output in outputs:
            prompt, limits = self.asked[output.rid]
            text = self.texts[output.rid]
            for place in range(len(text) - len(output.token_ids), len(text)):
                prefix = (*prompt, *text[:place])
                wanted = noise(prefix, limits.seed, output.weight_version) % VOCAB
                assert text[place] == wanted, (output.rid, place)


@pytest.fixture
def trainer() -> Trainer:
    return Trainer(TREE, new_runner())


def steps(trainer: Trainer, number: int) -> None:
    for _ in range(number):
        trainer.step()


@pytest.mark.parametrize("mode", ["keep", "retract"])
def test_a_pause_changes_no_text(trainer: Trainer, mode) -> None:
    trainer.add("a", PROMPT, sampling(60))
    steps(trainer, 5)
    trainer.scheduler.pause(mode)
    trainer.settle()
    before = len(trainer.texts["a"])
    trainer.add("b", PROMPT, sampling(9))
    steps(trainer, 5)
    assert len(trainer.texts["a"]) == before and not trainer.texts.get("b")
    assert trainer.scheduler.holds_nothing == (mode == "retract")
    trainer.scheduler.resume()
    trainer.finish()
    assert trainer.texts["a"] == expected_text(PROMPT, sampling(60))
    assert trainer.texts["b"] == expected_text(PROMPT, sampling(9))
    assert trainer.last["a"].retractions == (mode == "retract")


def test_a_pause_that_waits_ends_who_runs_and_holds_who_comes(trainer: Trainer) -> None:
    trainer.add("a", PROMPT, sampling(60))
    trainer.scheduler.pause("wait")
    trainer.add("b", PROMPT, sampling(9))
    trainer.settle()
    assert trainer.texts["a"] == expected_text(PROMPT, sampling(60))
    assert "b" not in trainer.texts and not trainer.scheduler.needs_cache
    trainer.scheduler.resume()
    trainer.finish()
    assert trainer.texts["b"] == expected_text(PROMPT, sampling(9))


def test_who_is_held_back_can_be_aborted(trainer: Trainer) -> None:
    trainer.scheduler.pause("keep")
    trainer.add("a", PROMPT, sampling(9))
    trainer.take(trainer.scheduler.abort("a"))
    trainer.scheduler.resume()
    trainer.finish()
    assert trainer.last["a"].finish.kind == "abort"


def test_memory_is_released_once_and_resumed_once(trainer: Trainer) -> None:
    trainer.add("a", PROMPT, sampling(60))
    steps(trainer, 5)
    assert trainer.change(release=["weights", "kv_cache"]) == ""
    assert "released already" in trainer.change(release=["weights"])
    assert trainer.change(resume=["weights"]) == ""
    steps(trainer, 5)
    assert trainer.last["a"].finish is None, "half of the memory is still away"
    assert "not released" in trainer.change(resume=["weights"])
    assert trainer.change(resume=["kv_cache"]) == ""
    trainer.finish()
    assert trainer.texts["a"] == expected_text(PROMPT, sampling(60))


def test_a_runner_without_memory_gets_no_plan(tmp_path: Path) -> None:
    """Nor a prefix, an adapter or a question about its weights. What is to be forgotten on disk is
    forgotten when its memory is back."""
    log = tmp_path / "log"
    log.touch()
    sizes = TierSizes(host_units=200, disk_units=900, kv_units=1, disk_log=str(log))
    runner = TieredRunner(600, 12, 4, 400, sizes=sizes, rng=random.Random(1))
    scheduler = Server(TREE, runner).scheduler
    replies: list[Any] = []
    answers = Answers(scheduler, replies.append, lambda order: None, lambda: None)

    def change(**what: list[str]) -> None:
        answers.take(ChangeModel(call_id=1, **what))
        answers.answer_waiting()

    change(release=["weights"])
    for answer in (Done(call_id=1), None):
        assert scheduler.plan() is None
        for asked in (
            ImportPrefix(path="?"),
            ExportPrefix(token_ids=PROMPT, salt="", path="?"),
            LoadAdapter(name="?", path="?"),
            AskRanks(task=SumWeights()),
        ):
            answers.take(asked)
            assert "released" in replies.pop().problem
        if answer is not None:
            answers.take_from_runner(answer)
    change(resume=["weights"])
    answers.take_from_runner(Done(call_id=1))
    assert scheduler.plan().empties_disk


def act(trainer: Versioned, rng: random.Random, number: int) -> None:
    """Something that a client or a trainer may do at any time."""
    kind = rng.choice(["add"] * 4 + ["step"] * 8 + ["pause", "resume", "abort", "change"])
    if kind == "add":
        prompt = PROMPT if rng.random() < 0.5 else rng.choices(range(50), k=rng.randint(1, 40))
        limits = sampling(rng.randint(1, 40), rng.randrange(99))
        trainer.asked[f"r{number}"] = prompt, limits
        trainer.add(f"r{number}", prompt, limits)
    elif kind == "step":
        steps(trainer, rng.randint(1, 3))
    elif kind == "pause":
        trainer.scheduler.pause(rng.choice(["keep", "retract", "wait"]))
    elif kind == "resume":
        trainer.scheduler.resume()
    elif kind == "abort":
        trainer.take(trainer.scheduler.abort(rng.choice([None, *trainer.asked])))
    else:
        other = Weights(target="other", version=f"v{number}")
        tags = ["weights"]
        trainer.change(**rng.choice([{"weights": other}, {"release": tags}, {"resume": tags}]))


def test_random_sequences_mix_no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token is that of the weights which its output names, whatever comes between."""
    spans = 0
    for seed in range(60):
        rng = random.Random(seed)
        trainer = Versioned(TREE, new_runner(), rng)
        monkeypatch.setattr(fake_runner, "next_token", trainer.next_token)
        for number in range(60):
            act(trainer, rng, number)
        trainer.scheduler.resume()
        trainer.change(resume=["weights"])
        trainer.finish()
        assert trainer.asked.keys() == trainer.last.keys()
        spans += sum(output.retractions > 0 for output in trainer.last.values())
    assert spans > 60, "few requests have seen two versions"
