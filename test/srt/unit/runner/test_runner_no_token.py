"""Requests for which no token can be sampled: they get none, and others get their own texts."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from runner_harness import Engine, Live, PlainModel, Settings, greedy, random_prompt, sampled
from safetensors.torch import load_file, save_file
from tiny_drafters import DRAFTERS
from tiny_model import VOCAB, write_model

from mamba_eagle.core import SamplingParams
from mamba_eagle.cpu.state import CpuDeferred

torch.set_num_threads(1)

TREE = Settings(topk=3, steps=3, nodes=9)
SETTINGS = {
    "tree": TREE,
    "chain": Settings(topk=1, steps=3, nodes=4),
    "tree-snapshot": TREE._replace(scheme="snapshot"),
    "tree-torch": TREE._replace(fused=False),
}
CASES = [(drafter, "tree") for drafter in DRAFTERS]
CASES += [("eagle", settings) for settings in SETTINGS if settings != "tree"]
CASES += [("standalone", "chain"), ("dflash", "chain")]

ALL_BANNED = {"min_new_tokens": 20, "stop_token_ids": [*range(VOCAB)]}
CAUSES = {
    "greedy": greedy(20, **ALL_BANNED),
    "sampled": sampled(20, 1, **ALL_BANNED),
    "filtered": sampled(20, 1, top_p=0.5, min_p=0.1, presence_penalty=0.5, **ALL_BANNED),
    "top-k": sampled(20, 1, top_k=5, **ALL_BANNED),
    "infinite-temperature": sampled(20, 1, temperature=1e39),
    "infinite-temperature-and-a-ban": sampled(
        20, 1, temperature=1e39, min_new_tokens=4, ignore_eos=False
    ),
    "not-a-number": greedy(20),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), mamba_head_dim=16)


def failed_request(engine: Engine, sampling: SamplingParams, nan: bool) -> Live:
    """nan: its state is spoiled between two chunks of its prompt, and so is all that follows."""
    live = engine.admit(random_prompt(30, 2), sampling, return_logprob=True)
    for end in (16, 30):
        item = engine.chunk(live, end)
        engine.after_chunk(live, item, engine.execute(prefill=[item]).prefill[0])
        if nan:
            engine.runner.pool.ssm[:, live.state_slot] = math.nan
    return live


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("drafter, settings", CASES)
def test_a_request_without_a_token_disturbs_no_other(
    target: Path, tmp_path: Path, drafter: str, settings: str, device: str
) -> None:
    """Plans in flight still have the request; the next one gets its slots."""
    plain = PlainModel(target)
    how = SETTINGS[settings]
    engine = DRAFTERS[drafter].engine(tmp_path, target, how, device=device, dtype="float32")
    prompt = random_prompt(19, 1)
    for cause, sampling in CAUSES.items():
        nan = cause == "not-a-number"
        if nan and not how.fused:
            continue  # the readable path multiplies what stale rows hold by 0
        other = engine.start(prompt, sampled(16, 7))
        failed = failed_request(engine, sampling, nan)
        assert failed.output == [-1]
        for _ in range(3):
            engine.execute(decode=[failed, other])
            assert not failed.steps[-1].tokens and not failed.steps[-1].nodes
        engine.overwrites = not nan  # what it has written stays
        engine.release(failed)
        for free in (engine.free_kv, engine.free_states, engine.free_slots):
            free.reverse()  # what was freed last is taken first
        after = engine.start(prompt[:7], sampled(9, 8))
        assert (after.slot, after.state_slot) == (failed.slot, failed.state_slot)
        assert set(after.kv[:7]) <= set(failed.kv)
        engine.finish([other, after])
        for live in (other, after):
            assert live.output == plain.choices(live), cause
            engine.release(live)


@pytest.mark.parametrize("number", [math.nan, math.inf])
@pytest.mark.parametrize("settings", ["plain", "tree"])
def test_weights_that_are_not_finite_fold_no_row_that_is_not_there(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: str, number: float
) -> None:
    """A step accepts none of its tokens then; rows that were folded in spite of that lay before
    the first one, and where nothing is mapped there the process ended."""
    folder = shutil.copytree(target, tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    filled = {name: torch.full_like(each, number) for name, each in weights.items()}
    save_file(filled, folder / "model.safetensors")
    fold = CpuDeferred._fold

    def checked(self: CpuDeferred, slots: np.ndarray, lengths: np.ndarray) -> None:
        assert (lengths <= self._journal_len[slots]).all()
        fold(self, slots, lengths)

    monkeypatch.setattr(CpuDeferred, "_fold", checked)
    how = Settings("NONE") if settings == "plain" else Settings("NGRAM", topk=3, steps=3, nodes=9)
    for _ in range(2):
        engine = Engine(folder, None, how)
        live = engine.start(random_prompt(30, 2), greedy(4))
        assert live.output == [-1]
        engine.execute(decode=[live])
        assert not live.steps[-1].tokens
        with pytest.raises(ValueError, match="keep .* exceeds"):
            engine.release(live, fold_to=31)
