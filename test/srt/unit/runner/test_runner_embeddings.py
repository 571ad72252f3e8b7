"""Embeddings are the hidden states of a full forward pass, however a prompt is run."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from runner_harness import Tiny, greedy, random_prompt
from thread_ranks import RunnerRanks

from mamba_eagle.layers.context import FullSequenceContext
from mamba_eagle.message import Plan, Release

torch.set_num_threads(1)
PROMPT = random_prompt(37, seed=1)


def hidden(tiny: Tiny, tokens: list[int]) -> torch.Tensor:
    """[n, hidden_size], after the final norm."""
    return tiny.plain.model(torch.tensor(tokens), FullSequenceContext(1, len(tokens)))


def assert_embeds(tiny: Tiny, found: bytes, tokens: list[int], pooling: str) -> None:
    states = hidden(tiny, tokens)
    wanted = states[-1] if pooling == "last" else states.mean(0)
    vector = np.frombuffer(found, "<f4")
    assert vector.shape == (64,) and np.abs(vector).max() > 0.1
    assert vector == pytest.approx(wanted.numpy(), abs=1e-4)


@pytest.mark.parametrize("settings", ["none", "tree", "tree-torch"])
def test_embeddings_do_not_depend_on_chunks_and_hits(tiny: Tiny, settings: str) -> None:
    engine = tiny.engine(settings)
    for pooling in ("last", "mean"):
        for cuts in ((), (1, 16, 36)):
            live = engine.generate(PROMPT, greedy(2), cuts=cuts, pooling=pooling)
            assert_embeds(tiny, live.embedding, PROMPT, pooling)
    saver = engine.start(PROMPT, greedy(2), saves=(20,))
    assert saver.embedding == b""
    live = engine.generate(PROMPT, greedy(2), hit=saver.saved[20], cuts=(30,), pooling="last")
    assert_embeds(tiny, live.embedding, PROMPT, "last")


def test_one_that_leaves_before_its_end_is_forgotten(tiny: Tiny) -> None:
    engine = tiny.engine("none")
    live = engine.admit(PROMPT, greedy(0), pooling="mean")
    engine.execute(prefill=[engine.chunk(live, 20)])
    pooling = engine.runner.prompts.pooling
    assert list(pooling._open) == [live.slot]
    engine.release(live)
    assert not pooling._open


@pytest.mark.parametrize("size, stages", [(2, 1), (1, 2)], ids=["tp-2", "pp-2"])
def test_ranks_and_stages_give_the_same(tiny: Tiny, size: int, stages: int) -> None:
    """Of a split model the rank that answers has the final norm's whole output."""
    engine = tiny.engine("none")
    config = replace(engine.config, tp_size=size, pp_size=stages)
    ranks = RunnerRanks(config, size, stages)
    for number, pooling in enumerate(("last", "mean")):
        live = engine.admit(PROMPT, greedy(1), pooling=pooling)
        item = engine.chunk(live, len(PROMPT))
        found = ranks.execute(Plan(step=2 * number, prefill=[item])).prefill[0].embedding
        assert_embeds(tiny, found, PROMPT, pooling)
        ranks.execute(Plan(step=2 * number + 1, releases=[Release(live.slot)]))
