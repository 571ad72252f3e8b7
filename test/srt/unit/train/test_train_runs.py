"""Runs of ``train-drafter``: answers, stopping and going on, several processes, bad input."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from train_rig import DEPTH, NEW_TOKENS, PROMPTS, Rig, losses, make_rig, read_record, read_weights

from mamba_eagle.bench.batch import BatchEngine
from mamba_eagle.config import EngineConfig
from mamba_eagle.core import SamplingParams
from mamba_eagle.resolve import resolve
from mamba_eagle.runner.assemble import assemble
from mamba_eagle.train import answers, command, run
from mamba_eagle.train.trainer import Trainer

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Rig:
    return make_rig(tmp_path_factory.mktemp("rig"))


# --- answers -------------------------------------------------------------------------------------


def test_answers_are_those_of_the_target(rig: Rig) -> None:
    done = rig.answered()
    assert [answered.line for answered in done] == list(range(1, PROMPTS + 1))
    config = EngineConfig(model_path=str(rig.target), device="cpu", speculative_algorithm="NONE")
    driver = BatchEngine(resolve(config), assemble(resolve(config)))
    prompts = [json.loads(line)["token_ids"] for line in rig.data.read_text().splitlines()]
    sampling = SamplingParams(max_new_tokens=NEW_TOKENS, temperature=0.0)
    made = driver.generate(prompts[:5], sampling)
    assert [answered.answer for answered in done[:5]] == made.tokens
    assert [answered.prompt for answered in done[:5]] == prompts[:5]


def test_a_killed_run_asks_only_for_the_answers_that_it_lacks(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = rig.answers.read_text().splitlines(keepends=True)
    (tmp_path / "answers.jsonl").write_text("".join(lines[:25]) + lines[25][:17])
    (tmp_path / "answers.1.jsonl").write_text(lines[26])  # of a run with two processes
    asked = []
    generate = answers.generate
    monkeypatch.setattr(
        answers, "generate", lambda c, prompts, b: asked.extend(prompts) or generate(c, prompts, b)
    )
    assert command.main(rig.arguments(tmp_path, "eagle", "--steps", "1")) == 0
    assert len(asked) == PROMPTS - 26
    written = (tmp_path / "answers.jsonl").read_text().splitlines(keepends=True)
    assert sorted(written + [lines[26]]) == sorted(lines)


def test_ctrl_c_while_answering_is_no_traceback(
    rig: Rig, tmp_path: Path, monkeypatch, capsys
) -> None:
    def interrupted(*others: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(answers.AnswerFile, "append", interrupted)
    assert command.main(rig.arguments(tmp_path, "eagle")) == command.INTERRUPTED
    assert "run the same command again" in capsys.readouterr().err


def test_answers_of_the_file_need_no_engine(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "answer_all", None)
    path = tmp_path / "own.jsonl"
    records = [json.loads(line) for line in rig.answers.read_text().splitlines()]
    records = [{"token_ids": r["prompt"], "answer_ids": r["answer"]} for r in records]
    path.write_text("\n".join(map(json.dumps, records)))
    output = tmp_path / "head"
    flags = ("--skip-generation", "--steps", "1")
    assert command.main(rig._replace(data=path).arguments(output, "eagle", *flags)) == 0
    assert not (output / "answers.jsonl").exists()


# --- going on ------------------------------------------------------------------------------------


def test_a_run_that_was_stopped_ends_with_the_weights_of_one_that_was_not(
    rig: Rig, tmp_path: Path, monkeypatch, capsys
) -> None:
    others = ("--steps", "7", "--eval-every", "2", "--epochs", "1")
    whole = rig.train(tmp_path / "whole", "eagle", *others)
    step = Trainer._step

    def kill_at_three(trainer: Trainer) -> float:
        if trainer.number == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(trainer)

    output = rig.folder(tmp_path / "stopped")
    argv = rig.arguments(output, "eagle", *others)
    monkeypatch.setattr(Trainer, "_step", kill_at_three)
    assert command.main(argv) == command.STOPPED
    assert "stopped after step 3" in capsys.readouterr().out
    assert not read_record(output)["finished"]
    monkeypatch.setattr(Trainer, "_step", step)
    assert command.main(argv) == 0
    assert "training.pt, step 3" in capsys.readouterr().out
    first, second = read_weights(tmp_path / "whole"), read_weights(output)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name
    ended = read_record(output)
    assert ended["acceptance"] == whole["acceptance"]
    assert ended["trained_tokens"] == whole["trained_tokens"] > 0
    assert sorted(path.name for path in output.iterdir()) == [
        "answers.jsonl",
        "config.json",
        "model.safetensors",
        "training.json",
    ]
    assert command.main(argv) == 0
    assert "nothing to do" in capsys.readouterr().out


def test_a_folder_is_not_gone_on_with_by_other_settings(rig: Rig, tmp_path: Path, capsys) -> None:
    rig.train(tmp_path, "eagle", "--steps", "1")
    other = tmp_path / "other.jsonl"
    other.write_text(rig.data.read_text() + json.dumps({"token_ids": [5]}))
    argv = rig._replace(data=other).arguments(tmp_path, "mtp", "--steps", "2")
    assert command.main(argv) == 1
    said = capsys.readouterr().err
    for part in ("--algorithm mtp", "started with eagle", "--steps 2", "another content"):
        assert part in said


def test_two_processes_train_as_one_does(rig: Rig, tmp_path: Path, capsys) -> None:
    """The same batch in two halves. The order of sums differs, and Adam makes a whole step of the
    smallest gradient: 2 % of the way that the weights have gone is allowed."""
    others = ("--steps", "4", "--micro-tokens", "100")
    rig.train(tmp_path / "one", "eagle", *others)
    one = losses(capsys.readouterr().out)
    rig.train(tmp_path / "begin", "eagle", "--steps", "1", "--lr", "1e-9")
    output = tmp_path / "two"
    output.mkdir()
    lines = rig.answers.read_text().splitlines(keepends=True)
    (output / "answers.jsonl").write_text("".join(lines[:30]))  # the others are made by both
    both = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    both += ["-m", "mamba_eagle.train.command"]
    ended = subprocess.run(
        [*both, *rig.arguments(output, "eagle", *others)], stdout=subprocess.PIPE, text=True
    )
    assert ended.returncode == 0
    # one of them speaks
    assert losses(ended.stdout) == pytest.approx(one, rel=1e-3)
    assert len((output / "answers.1.jsonl").read_text().splitlines()) == 5
    begin, single, double = (read_weights(tmp_path / name) for name in ("begin", "one", "two"))
    way = sum(float((single[n] - begin[n]).float().square().sum()) for n in begin)
    apart = sum(float((single[n] - double[n]).float().square().sum()) for n in begin)
    assert apart**0.5 < 0.02 * way**0.5
    assert read_record(output)["processes"] == 2


@pytest.mark.parametrize("name", ["eagle", "eagle3", "mtp", "dspark"])
def test_a_head_may_go_on_from_another_ones_weights(rig: Rig, tmp_path: Path, name: str) -> None:
    """At a learning rate that moves nothing it stays that head, its own tokens included."""
    before = rig.train(tmp_path / "first", name, "--steps", "2", "--lr", "0.01")
    others = ("--steps", "1", "--lr", "1e-12", "--seed", "9", "--held-out", "12")
    after = rig.train(tmp_path / "second", name, "--init-from", str(tmp_path / "first"), *others)
    first, second = read_weights(tmp_path / "first"), read_weights(tmp_path / "second")
    assert first.keys() == second.keys()
    assert all(torch.equal(tensor, second[key]) for key, tensor in first.items())
    assert before["answers"] != after["answers"]  # an eagle3 head would choose other tokens


def test_a_head_does_not_go_on_from_one_of_other_sizes(rig: Rig, tmp_path: Path, capsys) -> None:
    rig.train(tmp_path / "first", "eagle", "--steps", "1")
    argv = rig.arguments(rig.folder(tmp_path / "second"), "eagle", "--head-pattern", "*")
    assert command.main([*argv, "--init-from", str(tmp_path / "first")]) == 1
    said = capsys.readouterr().err
    assert f"--init-from {tmp_path / 'first'}: its hybrid_override_pattern is *-" in said
    assert command.main([*argv, "--init-from", str(tmp_path / "none")]) == 2
    assert "there is no such folder" in capsys.readouterr().err


# --- bad input -----------------------------------------------------------------------------------


def test_all_bad_settings_are_listed_at_once(tmp_path: Path, capsys) -> None:
    flags = ["--target", str(tmp_path / "none"), "--data", "x", "--depth", "0"]
    flags += ["--head-pattern", "*Q", "--prompt-template", "no place"]
    assert command.main(flags) == 2
    said = capsys.readouterr().err
    for part in ("--output", "--target", "--depth 0", "'*Q'", "--prompt-template 'no place'"):
        assert part in said
    assert command.main([*flags, "--head-pattern", ""]) == 2
    assert "--head-pattern '': must consist of" in capsys.readouterr().err


def test_an_output_that_cannot_be_is_named(rig: Rig, tmp_path: Path, capsys) -> None:
    (tmp_path / "file").write_text("")
    assert command.main(rig.arguments(tmp_path / "file", "eagle")) == 1
    assert f"--output {tmp_path / 'file'}: cannot create this folder" in capsys.readouterr().err


def test_too_few_answers_or_none_that_fit(rig: Rig, tmp_path: Path, capsys) -> None:
    assert command.main(rig.arguments(tmp_path / "a", "eagle", "--max-length", "4")) == 1
    assert "all 40 prompts have 3 tokens or more" in capsys.readouterr().err
    assert command.main(rig.arguments(tmp_path / "b", "eagle", "--held-out", "40")) == 1
    assert "lower --held-out" in capsys.readouterr().err
    assert not (tmp_path / "b").exists(), "no prompt is answered in vain"
    flags = ("--algorithm", "mtp", "--mtp-modules", "2")
    assert command.main(rig.arguments(tmp_path / "c", "mtp", *flags)) == 1
    assert f"--mtp-modules 2 with --depth {DEPTH}" in capsys.readouterr().err


def test_a_gradient_that_is_no_number_changes_nothing_and_then_ends_the_run(
    rig: Rig, tmp_path: Path, monkeypatch, capsys
) -> None:
    begin = rig.train(tmp_path / "a", "eagle", "--steps", "1", "--lr", "1e-9")
    backward = Trainer._backward

    def broken(trainer: Trainer, *others: Any) -> torch.Tensor:
        loss = backward(trainer, *others)
        trainer.parameters[0].grad.fill_(float("nan"))
        return loss

    monkeypatch.setattr(Trainer, "_backward", broken)
    after = rig.train(tmp_path / "b", "eagle", "--steps", "3", "--lr", "1")
    assert after["acceptance"] == begin["acceptance"]
    output = rig.folder(tmp_path / "c")
    assert command.main(rig.arguments(output, "eagle", "--steps", "30")) == 1
    assert "lower --lr" in capsys.readouterr().err
