"""Logprobs are those of full forward passes, however the tokens came about."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from runner_harness import Live, Tiny, greedy, random_prompt, sampled

from mamba_eagle.message import TokenLogprob

torch.set_num_threads(1)

PROMPT = random_prompt(37, seed=1)
SETTINGS = ["none", "tree", "tree-snapshot", "tree-fewest-rows", "chain", "tree-torch"]


def assert_logprobs(
    tiny: Tiny,
    found: list[TokenLogprob],
    tokens: list[int],
    first: int,
    temperature: float = 1.0,
    named: Sequence[int] = (),
) -> None:
    """found: of tokens[first:]."""
    assert [each.token_id for each in found] == tokens[first:]
    logprobs = (tiny.plain.logits(tokens[:-1]) / temperature).log_softmax(1)
    for position, each in enumerate(found, start=first):
        if position == 0:
            assert each.logprob is None and each.named == []
            continue
        row = logprobs[position - 1]
        assert each.logprob == pytest.approx(float(row[tokens[position]]), abs=2e-4)
        assert each.named == pytest.approx([float(row[token]) for token in named], abs=2e-4)
        values, ids = row.topk(len(each.top)) if each.top else ([], [])
        assert [token for _, token in each.top] == [int(token) for token in ids]
        assert [value for value, _ in each.top] == pytest.approx(list(map(float, values)), abs=2e-4)


@pytest.mark.parametrize("settings", SETTINGS)
def test_output_logprobs_are_the_plain_models(tiny: Tiny, settings: str) -> None:
    """Before any filter or temperature. Only those who ask get them."""
    engine = tiny.engine(settings)
    lives = [
        engine.start(
            PROMPT, greedy(15), return_logprob=True, top_logprobs=4, token_ids_logprob=[7, 50]
        ),
        engine.start(PROMPT[:5], sampled(12, 3, top_k=5, temperature=2.0), return_logprob=True),
        engine.start(PROMPT[:9], sampled(12, 4), top_logprobs=2),
    ]
    engine.finish(lives)
    for live, named in zip(lives[:2], ([7, 50], [])):
        assert_logprobs(tiny, live.logprobs, live.tokens, live.prompt_len, named=named)
    assert len(lives[0].logprobs[0].top) == 4 and lives[1].logprobs[0].top == []
    assert lives[2].logprobs == [] and lives[2].steps[0].logprobs == []


@pytest.mark.parametrize("settings", SETTINGS)
def test_output_logprobs_may_be_those_at_the_temperature(tiny: Tiny, settings: str) -> None:
    """With drafts and without."""
    engine = tiny.engine(settings)
    asks = {"return_logprob": True, "top_logprobs": 3, "logprob_temperature": 0.6}
    live = engine.start(PROMPT, sampled(15, 3, temperature=0.6), **asks)
    engine.finish([live])
    assert_logprobs(tiny, live.logprobs, live.tokens, live.prompt_len, temperature=0.6)


@pytest.mark.parametrize("settings", SETTINGS)
def test_logprobs_of_a_stopped_output_end_with_it(tiny: Tiny, settings: str) -> None:
    engine = tiny.engine(settings)
    plain = engine.generate(PROMPT, greedy(8)).output
    for at in (4, 5, 6):
        live = engine.generate(PROMPT, greedy(8, stop_token_ids=[plain[at]]), return_logprob=True)
        assert len(live.logprobs) == len(live.output) <= at + 1
        assert_logprobs(tiny, live.logprobs, live.tokens, live.prompt_len)


CUTS = [(), (1,), (10,), (16, 32), (5, 6, 7, 36)]


@pytest.mark.parametrize("cuts", CUTS, ids=lambda cuts: f"cut-at-{cuts}")
def test_input_logprobs_do_not_depend_on_chunks(tiny: Tiny, cuts: tuple[int, ...]) -> None:
    engine = tiny.engine("tree")
    for first in (0, 1, 10, 16, 36):
        asks = {"return_logprob": True, "logprob_start": first, "top_logprobs": 2}
        live = engine.generate(PROMPT, greedy(2), cuts=cuts, token_ids_logprob=[3], **asks)
        assert_logprobs(tiny, live.input_logprobs, PROMPT, first, named=[3])
    unasked: Live = engine.generate(PROMPT, greedy(2), cuts=cuts, return_logprob=True)
    assert unasked.input_logprobs == []


@pytest.mark.parametrize("settings", ["none", "tree", "tree-snapshot"])
def test_input_logprobs_after_a_cache_hit_are_the_same(tiny: Tiny, settings: str) -> None:
    """The token right behind the state slot, too: from the state slot's feature."""
    engine = tiny.engine(settings)
    saver = engine.start(PROMPT, greedy(15), saves=(1, 16, 20, 36))
    engine.finish([saver])
    for position, saved in saver.saved.items():
        for first in {position, min(position + 3, 36)}:
            asks = {"return_logprob": True, "logprob_start": first, "top_logprobs": 3}
            live = engine.generate(PROMPT, greedy(2), hit=saved, cuts=(30,), **asks)
            assert_logprobs(tiny, live.input_logprobs, PROMPT, first)
    # from a state slot that a fold has written
    tokens = saver.tokens + PROMPT[:4]
    folded = engine.release(saver, fold_to=saver.processed)
    asks = {"return_logprob": True, "logprob_start": saver.processed}
    live = engine.generate(tokens, greedy(2), hit=folded, **asks)
    assert_logprobs(tiny, live.input_logprobs, tokens, saver.processed)
