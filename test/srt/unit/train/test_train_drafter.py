"""``train-drafter`` on a tiny target: what heads learn, and that a server sees the same."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from train_rig import (
    ALGORITHMS,
    DEPTH,
    HELD_OUT,
    NEW_TOKENS,
    Rig,
    algorithm,
    losses,
    make_rig,
    read_record,
)

from mamba_eagle.bench.batch import BatchEngine
from mamba_eagle.config import EngineConfig
from mamba_eagle.core import SamplingParams
from mamba_eagle.resolve import resolve
from mamba_eagle.runner.assemble import assemble
from mamba_eagle.train.batches import pad_answers, split_held_out, usable_answers
from mamba_eagle.train.heads import TRAINABLE_HEADS
from mamba_eagle.train.settings import TrainSettings
from mamba_eagle.train.target import load_target, run_target
from mamba_eagle.train.trainer import Trainer

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Rig:
    return make_rig(tmp_path_factory.mktemp("rig"))


@pytest.fixture(scope="module")
def head(rig: Rig, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """By name: the folder of a head after some steps, made when it is asked for first."""
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp("heads") / name
            rig.train(made[name], name, "--steps", "40", "--lr", "0.01")
        return made[name]

    return get


@pytest.mark.parametrize("name", ALGORITHMS)
def test_steps_lower_the_loss_and_raise_acceptance(
    name: str, rig: Rig, head: Callable[[str], Path], tmp_path: Path, capsys
) -> None:
    before = rig.train(tmp_path, name, "--steps", "1", "--lr", "1e-9")["acceptance"]
    capsys.readouterr()
    folder = head(name)
    if shown := losses(capsys.readouterr().out):  # else another test has made this head
        assert shown[-1] < shown[0] - 0.5
    after = read_record(folder)["acceptance"]
    # of 31 answers, a block drafter's attention learns less than a Markov head or EAGLE's layer
    gain = 0.05 if name in ("dflash", "dspark") else 0.3
    assert after["by_depth"][0] > before["by_depth"][0] + gain
    assert after["length"] > before["length"] + gain
    assert after["by_depth"] == sorted(after["by_depth"], reverse=True)


def test_the_command_that_serves_it_can_be_pasted(
    tmp_path: Path, rig: Rig, capsys: pytest.CaptureFixture[str]
) -> None:
    rig.train(tmp_path / "a head", "eagle", "--steps", "1")
    command = capsys.readouterr().out.partition("serve it: ")[2]
    assert shlex.split(command)[-1] == str(tmp_path / "a head")


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_served_chain_is_accepted_as_the_training_has_measured(
    name: str, rig: Rig, head: Callable[[str], Path]
) -> None:
    """Within 2 %: the same answers in float32, but a server's sums have another order."""
    config = resolve(
        EngineConfig(
            model_path=str(rig.target),
            device="cpu",
            speculative_algorithm=algorithm(name).upper(),
            speculative_draft_model_path=str(head(name)),
            speculative_num_steps=DEPTH,
            speculative_eagle_topk=1,
            speculative_num_draft_tokens=DEPTH + 1,
            speculative_draft_p_min=0.0,
            speculative_draft_model_quantization="auto",
            max_running_requests=HELD_OUT,
            max_total_tokens=1000,
        )
    )
    held_out = split_held_out(usable_answers(rig.answered(), 2048), HELD_OUT, 0).held_out
    sampling = SamplingParams(max_new_tokens=NEW_TOKENS, temperature=0.0)
    prompts = [answer.tokens[: answer.prompt_len] for answer in held_out]
    made = BatchEngine(config, assemble(config)).generate(prompts, sampling)
    assert made.tokens == [answer.tokens[answer.prompt_len :] for answer in held_out]
    measured = read_record(head(name))["acceptance"]["length"]
    assert made.accept_length == pytest.approx(measured, rel=0.02)


class Waits(TorchDispatchMode):
    """Counts what makes the host wait for a GPU: numbers read back, sizes that depend on values."""

    NAMES = ("_local_scalar_dense", "nonzero", "masked_select")

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        name = function.overloadpacket.__name__
        masks = args[1] if name in ("index", "index_put_") else []
        if name in self.NAMES or any(m is not None and m.dtype == torch.bool for m in masks):
            self.seen.append(name)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_step_does_not_wait_for_the_gpu(
    name: str, rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, seen = Trainer._step, []

    def watched(trainer: Trainer) -> torch.Tensor:
        with Waits() as waits:
            loss = step(trainer)
        seen.append(waits.seen)
        return loss

    monkeypatch.setattr(Trainer, "_step", watched)
    rig.train(tmp_path, name, "--steps", "2")
    assert seen == [[], []]


@pytest.mark.parametrize("name", ["eagle", "eagle-mamba", "eagle3", "mtp", "dspark"])
def test_mixed_precision_gives_nearly_the_same_loss(name: str, rig: Rig) -> None:
    """What a GPU does: target in bfloat16, head in float32 with products in bfloat16."""
    part = usable_answers(rig.answered()[:8], 2048)
    pattern = "M-" if name == "eagle-mamba" else "*-"
    settings = TrainSettings(target=str(rig.target), draft_vocab_size=60, head_pattern=pattern)
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        model = load_target(rig.target, torch.device("cpu")).to(dtype)
        head = TRAINABLE_HEADS[algorithm(name)](settings, model, part)
        padded = pad_answers(part, DEPTH, torch.device("cpu"))
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            loss = head.loss(padded, run_target(model, padded), [100] * DEPTH)
        loss.backward()
        assert all(p.dtype == p.grad.dtype == torch.float32 for p in head.module.parameters())
        found.append(loss.item())
    assert found[0] == pytest.approx(found[1], rel=0.02)
