"""Prefixes that other requests have run: from a state slot on, nothing may differ.

Text and draft trees with a hit equal those without one: a cache hit must not leave the drafter
blind to the prefix (docs/design/invariants.md).
"""

from __future__ import annotations

import pytest
import torch
from runner_harness import (
    Engine,
    Live,
    Prefix,
    Tiny,
    approximately,
    greedy,
    random_prompt,
    sampled,
)
from tiny_model import CHUNK

from mamba_eagle.core import SamplingParams

torch.set_num_threads(1)

PROMPT = random_prompt(3 * CHUNK + 3, seed=1)
TAIL = random_prompt(6, seed=2)
SCHEMES = ["none", "tree", "tree-snapshot"]


def assert_same(live: Live, fresh: Live) -> None:
    """Texts, draft trees, and what was accepted, step by step."""
    assert live.output == fresh.output
    steps = [step.nodes for step in live.steps if step.nodes]
    assert steps == [step.nodes for step in fresh.steps if step.nodes]
    count = len(steps)
    assert live.proposals[:count] == approximately(fresh.proposals[:count])


class Fresh:
    """Each prompt served once on an engine that has seen nothing else, and checked."""

    def __init__(self, tiny: Tiny) -> None:
        self.tiny, self.known = tiny, {}

    def __call__(self, settings: str, prompt: list[int], sampling: SamplingParams) -> Live:
        # what is drafted and accepted does not depend on how states are kept
        trees = "tree" if settings.startswith("tree") else settings
        key = (trees, tuple(prompt), sampling.seed, sampling.max_new_tokens)
        if key not in self.known:
            live = self.known[key] = self.tiny.engine(trees).generate(prompt, sampling)
            assert live.output == self.tiny.plain.choices(live)
        return self.known[key]


@pytest.fixture(scope="module")
def fresh(tiny: Tiny) -> Fresh:
    return Fresh(tiny)


# Where the scan passes anyway, a multiple of CHUNK from where it began, and where it is cut short:
# a cut begins a grid of its own.
SAVES = {
    "on-the-grid": (16, 32, 48),
    "off-the-grid": (1, 3, 4, 15, 25, 50, 51),
    "both": (2, 16, 18, 34, 35, 51),
}
CUTS = [(), (20,), (CHUNK, 2 * CHUNK), (9, 10, 33)]


@pytest.mark.parametrize("saves", SAVES)
@pytest.mark.parametrize(
    "settings, cuts",
    [("tree", cuts) for cuts in CUTS] + [("tree-snapshot", (20,)), ("none", (9, 10, 33))],
    ids=str,
)
def test_a_state_inside_a_prompt_serves_another_request(
    tiny: Tiny, fresh: Fresh, settings: str, cuts: tuple[int, ...], saves: str
) -> None:
    """Wherever it lies, and wherever the prompt was cut into plans."""
    engine, how = tiny.engine(settings), sampled(6, 7)
    saver = engine.start(PROMPT, how, cuts=cuts, saves=SAVES[saves])
    engine.finish([saver])
    assert_same(saver, fresh(settings, PROMPT, how))
    for position in SAVES[saves]:
        prompt = PROMPT[:position] + TAIL
        hit = engine.generate(prompt, how, hit=saver.saved[position])
        assert_same(hit, fresh(settings, prompt, how))


@pytest.mark.parametrize("settings", SCHEMES)
def test_a_hit_and_prompt_chunks_behind_it(tiny: Tiny, fresh: Fresh, settings: str) -> None:
    engine, how = tiny.engine(settings), sampled(8, 7)
    saver = engine.start(PROMPT, how, saves=(21,))
    again = engine.start(PROMPT, how, hit=saver.saved[21], cuts=(22, 30, 37), saves=(29, 37))
    engine.finish([saver, again])
    third = engine.generate(PROMPT, how, hit=again.saved[29])
    for live in (saver, again, third):
        assert_same(live, fresh(settings, PROMPT, how))


@pytest.mark.parametrize(
    "settings", [*SCHEMES, "tree-fewest-rows", "chain", "star", "tree-torch", "tree-snapshot-torch"]
)
def test_a_conversation_continues_from_the_last_turns_state(
    tiny: Tiny, fresh: Fresh, settings: str
) -> None:
    """Each turn is folded to all that was run. Steps in flight when a turn ends change nothing."""
    engine = tiny.engine(settings)
    tokens, hit = list(PROMPT[:20]), None
    for turn, late_steps in enumerate((0, 2, 1, 0)):
        live = engine.start(tokens, sampled(14, turn), hit=hit)
        engine.finish([live])
        for _ in range(late_steps):
            engine.execute(decode=[live])
        assert_same(live, fresh(settings, tokens, sampled(14, turn)))
        hit = engine.release(live, fold_to=live.processed)
        assert hit is not None and len(hit.tokens) == len(live.tokens) - 1
        tokens = live.tokens + random_prompt(5, seed=turn)


@pytest.mark.parametrize("settings", ["tree", "tree-snapshot", "tree-torch", "chain"])
def test_a_request_released_after_several_tokens_at_once_leaves_no_gap_for_the_drafter(
    tiny: Tiny, fresh: Fresh, settings: str
) -> None:
    """Its head has not run the last step's tokens yet; whoever continues finds them there."""
    engine, several = tiny.engine(settings), 0
    for count in range(6, 16):
        live = engine.start(PROMPT[:20], sampled(count, 7))
        engine.finish([live])
        if len(live.steps[-1].tokens) == 1:
            engine.release(live)
            continue
        several += 1
        prefix = engine.release(live, fold_to=live.processed)
        assert prefix is not None
        prompt = prefix.tokens + TAIL
        hit = engine.generate(prompt, sampled(5, 3), hit=prefix)
        assert_same(hit, fresh(settings, prompt, sampled(5, 3)))
        drop(engine, prefix)
    assert several >= 2


@pytest.mark.parametrize(
    "settings, count",
    [
        ("none", 31),
        ("tree", 14),
        ("tree", 31),
        ("tree-of-one-row-more", 12),
        ("chain", 31),
        ("tree-torch", 31),
    ],
)
def test_a_request_released_inside_its_chain_leaves_the_state_there(
    tiny: Tiny, fresh: Fresh, settings: str, count: int
) -> None:
    """A stop string cuts the output at some token since the last fold."""
    how = sampled(count, 7)
    whole = fresh(settings, PROMPT[:20], how)
    engine = tiny.engine(settings)
    inside = 0
    for back in (0, 1, 3, 8):
        live = engine.start(PROMPT[:20], how)
        engine.finish([live])
        assert live.output == whole.output
        if live.processed - back < live.folded:
            engine.release(live)
            break
        inside += back > 0
        prefix = engine.release(live, fold_to=live.processed - back)
        assert prefix is not None
        prompt = prefix.tokens + TAIL
        hit = engine.generate(prompt, sampled(6, 3), hit=prefix)
        assert_same(hit, fresh(settings, prompt, sampled(6, 3)))
        drop(engine, prefix)
    assert inside >= 1


@pytest.mark.parametrize("settings", SCHEMES)
def test_a_request_that_ended_with_its_first_token_leaves_its_prompts_state(
    tiny: Tiny, fresh: Fresh, settings: str
) -> None:
    """Nothing was decoded; a step in flight may have named it."""
    engine = tiny.engine(settings)
    for late_steps in (0, 1):
        live = engine.start(PROMPT[:20], sampled(1, 0))
        for _ in range(late_steps):
            engine.execute(decode=[live])
        prefix = engine.release(live, fold_to=20)
        assert prefix is not None
        hit = engine.generate(PROMPT[:20] + TAIL, sampled(8, 3), hit=prefix)
        assert_same(hit, fresh(settings, PROMPT[:20] + TAIL, sampled(8, 3)))
        drop(engine, prefix)


@pytest.mark.parametrize("settings", SCHEMES)
def test_a_retracted_request_comes_back_through_its_own_state(tiny: Tiny, settings: str) -> None:
    """Only its last token is run again; its output so far counts as output."""
    how = sampled(24, 6, frequency_penalty=0.7, repetition_penalty=1.2, min_new_tokens=20)
    engine = tiny.engine(settings)
    whole = engine.generate(PROMPT[:20], how)
    live = engine.start(PROMPT[:20], how)
    for steps in (1, 3, 4):
        for _ in range(steps):
            engine.execute(decode=[live])
        prefix = engine.release(live, fold_to=live.processed)
        live = engine.start(live.tokens, how, hit=prefix, prompt_len=20)
    engine.finish([live])
    assert live.output == whole.output


def drop(engine: Engine, prefix: Prefix) -> None:
    engine.free(prefix.kv_slots)
    engine.free_state(prefix.state_slot)


@pytest.mark.parametrize("settings", SCHEMES)
def test_requests_from_one_state_do_not_touch_it(tiny: Tiny, settings: str) -> None:
    """Its owner runs on, two others start from it in one plan, and later a third."""
    engine = tiny.engine(settings)
    owner = engine.start(PROMPT, sampled(12, 0), saves=(40,))
    saved = owner.saved[40]
    before = [part[:, saved.state_slot].clone() for part in (engine.runner.pool.ssm,)]
    prompts = [PROMPT[:40] + random_prompt(n, seed=n) for n in (3, 9)]
    pair = [engine.admit(prompt, sampled(9, i), hit=saved) for i, prompt in enumerate(prompts)]
    items = [engine.chunk(live, len(live.tokens)) for live in pair]
    results = engine.execute(prefill=items, decode=[owner]).prefill
    for live, item, result in zip(pair, items, results):
        engine.after_chunk(live, item, result)
    engine.finish([owner, *pair])
    third = engine.generate(PROMPT[:40] + TAIL, sampled(9, 2), hit=saved)
    for live in (owner, *pair, third):
        assert live.output == tiny.plain.choices(live)
    assert torch.equal(engine.runner.pool.ssm[:, saved.state_slot], before[0])


@pytest.mark.parametrize("settings", ["tree", "chain"])
def test_a_drafter_without_its_prefix_would_draft_other_trees(tiny: Tiny, settings: str) -> None:
    """The comparisons above can fail: the head reads the prefix it is given."""
    engine = tiny.engine(settings)
    saver = engine.start(PROMPT, greedy(12), saves=(50,))
    engine.finish([saver])
    pool = engine.runner.drafter.kv
    pool.v[:, saver.saved[50].kv_slots] = 0.0
    blind = engine.generate(PROMPT, greedy(12), hit=saver.saved[50])
    assert blind.output == saver.output
    assert blind.proposals != approximately(saver.proposals)


@pytest.mark.parametrize("settings", SCHEMES)
def test_a_states_feature_is_the_last_tokens(tiny: Tiny, settings: str) -> None:
    """What a head needs to go on from there, and what gives the next token's logprob."""
    engine = tiny.engine(settings)
    live = engine.start(PROMPT, sampled(20, 1), saves=(7, 32, 51), cuts=(11,))
    engine.finish([live])
    prefix = engine.release(live, fold_to=live.processed)
    for position, saved in {**live.saved, live.processed: prefix}.items():
        feature = engine.runner.pool.feature[saved.state_slot]
        logits = engine.runner.model.compute_logits(feature[None])[0]
        expected = tiny.plain.logits(live.tokens[:position])[-1]
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-3)
