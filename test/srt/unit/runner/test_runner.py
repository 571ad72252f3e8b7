"""Texts through ModelRunner.execute: the plain model's, whatever drafts, schemes and batches.

Invariants 4 and 5 of docs/design/invariants.md, on the CPU in float32, token for token.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from runner_harness import (
    PLAIN,
    SETTINGS,
    TREE,
    Engine,
    Live,
    PlainModel,
    Tiny,
    accepted,
    approximately,
    greedy,
    random_prompt,
    sampled,
)
from tiny_model import CHUNK, EOS, write_head, write_model

from mamba_eagle.bench.batch import BatchEngine
from mamba_eagle.core import SamplingParams, TreeShape
from mamba_eagle.message import Release

torch.set_num_threads(1)

LENGTHS = (1, 2, 5, 21, 40)
PROMPTS = [random_prompt(length, seed) for seed, length in enumerate(LENGTHS)]
BOTH_SCHEMES = ["tree", "tree-snapshot"]


def texts(engine: Engine, sampling: list[SamplingParams]) -> list[Live]:
    """All PROMPTS in one batch."""
    lives = [engine.start(prompt, how) for prompt, how in zip(PROMPTS, sampling)]
    engine.finish(lives)
    return lives


def test_the_tiny_models_text_depends_on_all_of_its_prompt(tiny: Tiny) -> None:
    """Else the tests below could not fail: through each mixer, and over some distance."""
    prompt = random_prompt(12, 0)
    logits = tiny.plain.logits(prompt)
    other = tiny.plain.logits([prompt[0] + 1, *prompt[1:]])
    assert (logits[-1] - other[-1]).abs().max() > 0.5
    best = logits.topk(2).values
    assert (best[:, 0] - best[:, 1]).median() > 0.3
    for layer in tiny.plain.model.backbone.layers:
        weight = layer.mixer.get_parameter(
            "out_proj.weight"
            if hasattr(layer.mixer, "out_proj")
            else "o_proj.weight"
            if hasattr(layer.mixer, "o_proj")
            else "down_proj.weight"
        )
        kept = weight.clone()
        weight.zero_()
        assert (tiny.plain.logits(prompt)[-1] - logits[-1]).abs().max() > 0.5
        weight.copy_(kept)


@pytest.mark.parametrize("settings", SETTINGS)
def test_greedy_text_is_the_plain_models(tiny: Tiny, settings: str) -> None:
    lives = texts(tiny.engine(settings), [greedy(24)] * 5)
    for live in lives:
        assert len(live.output) == 24
        assert live.output == tiny.plain.choices(live)
    if not settings.startswith("none"):
        counts = accepted(lives)
        deepest = min(SETTINGS[settings].steps, 2)
        assert 1 in counts and max(counts) > deepest, "drafts must be taken and refused"


@pytest.mark.parametrize(
    "settings", ["none", *BOTH_SCHEMES, "chain-snapshot", "large-tree", "tree-torch"]
)
def test_seeded_sampling_is_the_plain_models(tiny: Tiny, settings: str) -> None:
    """Temperature 1, noise keyed by (seed, position)."""
    lives = texts(tiny.engine(settings), [sampled(16, seed) for seed in (3, 3, 1, 2**62, 0)])
    for live in lives:
        assert live.output == tiny.plain.choices(live)


def test_filters_and_penalties_do_not_depend_on_drafts(tiny: Tiny) -> None:
    how = [
        sampled(16, 3, top_k=5),
        sampled(16, 4, top_p=0.7, temperature=1.5),
        sampled(16, 5, min_p=0.2, temperature=2.0),
        sampled(16, 6, frequency_penalty=1.5, presence_penalty=-0.5),
        greedy(16, repetition_penalty=1.8, logit_bias={7: 3.0, 11: -100.0}),
    ]
    expected = [live.output for live in texts(tiny.engine(PLAIN), how)]
    assert len({tuple(output) for output in expected}) == 5
    for settings in ("tree", "chain-snapshot"):
        assert [live.output for live in texts(tiny.engine(settings), how)] == expected


@pytest.mark.parametrize("settings", ["none", *BOTH_SCHEMES])
def test_alone_or_in_a_batch_the_text_is_the_same(tiny: Tiny, settings: str) -> None:
    how = [sampled(12, seed) for seed in range(4)] + [greedy(8)]
    together = texts(tiny.engine(settings), how)
    engine = tiny.engine(settings)
    for live, prompt, sampling in zip(together, PROMPTS, how):
        assert engine.generate(prompt, sampling).output == live.output


@pytest.mark.parametrize("settings", ["none", *BOTH_SCHEMES])
def test_a_states_noise_is_the_requests_own(tiny: Tiny, settings: str) -> None:
    """States in bfloat16, rounded by seed and position: in a batch and alone, in other slots, a
    request's states round alike (but where another order of sums moves a number over an edge), and
    so do its logprobs. With another seed they do not: the noise is there."""

    def logprobs(engine: Engine, prompts: list[list[int]], seeds: list[int]) -> torch.Tensor:
        lives = [
            engine.start(prompt, greedy(12, seed=seed), return_logprob=True)
            for prompt, seed in zip(prompts, seeds)
        ]
        engine.finish(lives)
        return torch.tensor([[entry.logprob for entry in live.logprobs] for live in lives])

    def engine() -> Engine:
        return tiny.engine(settings, mamba_ssm_dtype="bfloat16", speculative_adaptive=False)

    prompts = [PROMPTS[4]] * 2 + [PROMPTS[3]]
    together = logprobs(engine(), prompts, [5, 6, 7])
    alone = logprobs(engine(), prompts[:1], [5])
    moved = float((together[0] - alone[0]).abs().max())
    other_seed = float((together[0] - together[1]).abs().max())
    print(f"{moved:.1e} in a batch, {other_seed:.1e} with another seed")
    assert other_seed > 1e-4 and moved < other_seed / 4


def test_weights_that_bfloat16_would_round_are_not_rounded(tiny: Tiny, tmp_path: Path) -> None:
    model = write_model(tmp_path, seed=4, finer=True)
    engine, plain = Engine(model, tiny.head), PlainModel(model)
    for live in texts(engine, [sampled(12, 1)] * 5):
        assert live.output == plain.choices(live)


@pytest.mark.parametrize("settings", ["none", *BOTH_SCHEMES])
@pytest.mark.parametrize("what", ["dtype", "mamba_ssm_dtype"])
def test_bfloat16_leaves_the_plain_text_only_at_near_ties(
    tiny: Tiny, settings: str, what: str
) -> None:
    """Logits are 4 wide; each token is within 0.25 of the best one, given those before it."""
    for live in texts(tiny.engine(settings, **{what: "bfloat16"}), [greedy(16)] * 5):
        logits = tiny.plain.logits(live.tokens[:-1])[live.prompt_len - 1 :]
        chosen = logits.gather(1, torch.tensor(live.output)[:, None])[:, 0]
        assert (logits.max(1).values - chosen).max() < 0.25


def test_the_text_does_not_depend_on_the_head(tiny: Tiny, tmp_path: Path) -> None:
    random_head = write_head(tmp_path / "other", tiny.model, seed=9, hybrid_override_pattern="-*-*")
    one = texts(tiny.engine(), [sampled(20, 1)] * 5)
    other = texts(Engine(tiny.model, random_head), [sampled(20, 1)] * 5)
    assert [live.output for live in one] == [live.output for live in other]
    assert accepted(one) != accepted(other)


@pytest.mark.parametrize("settings", ["none", *BOTH_SCHEMES])
def test_a_prompt_in_odd_chunks_gives_the_same_text(tiny: Tiny, settings: str) -> None:
    prompt = random_prompt(3 * CHUNK + 5, 3)
    engine = tiny.engine(settings)
    expected = engine.generate(prompt, greedy(8))
    assert expected.output == tiny.plain.choices(expected)
    for cuts in [(1,), (15, 17), (7, 20, 33, 50), tuple(range(1, 53))]:
        live = engine.generate(prompt, greedy(8), cuts=cuts)
        assert live.output == expected.output, cuts
        assert live.proposals == approximately(expected.proposals), cuts


def test_the_batch_engine_gives_the_plain_models_text(tiny: Tiny) -> None:
    config = TREE.config(tiny.model, tiny.head, chunked_prefill_size=7)
    engine = Engine(tiny.model, tiny.head, TREE, chunked_prefill_size=7)
    made = BatchEngine(config, engine.runner).generate(PROMPTS, greedy(20))
    expected = texts(tiny.engine(PLAIN), [greedy(20)] * 5)
    assert made.tokens == [live.output for live in expected]


def test_prompts_and_trees_of_one_plan_do_not_mix(tiny: Tiny) -> None:
    """Requests come two at a time, in pieces, while those before them decode."""
    engine = tiny.engine(max_running_requests=8)
    lives: list[Live] = []
    for pair in (PROMPTS[1:3], PROMPTS[3:5], PROMPTS[4:2:-1]):
        new = [engine.admit(prompt, sampled(16, len(lives) + i)) for i, prompt in enumerate(pair)]
        for part in (1, 2):
            items = [engine.chunk(live, len(live.tokens) * part // 2) for live in new]
            decode = [live for live in lives if not engine.ended(live)]
            step = engine.execute(prefill=items, decode=decode)
            assert step.seconds > step.decode_seconds
            assert (step.decode_seconds > 0) == bool(decode), "prompts alone are no decoding"
            for live, item, result in zip(new, items, step.prefill):
                engine.after_chunk(live, item, result)
        lives += new
    engine.finish(lives)
    for live in lives:
        assert live.output == tiny.plain.choices(live)


@pytest.mark.parametrize("settings", ["none", *BOTH_SCHEMES, "tree-fewest-rows"])
def test_a_then_b_then_a_gives_the_first_answer(tiny: Tiny, settings: str) -> None:
    """One request slot, just enough of the others: everything is used again, and garbage before
    that. B leaves in the middle of a chain."""
    engine = tiny.engine(
        settings, max_running_requests=1, max_mamba_cache_size=1, max_total_tokens=120
    )
    first = engine.generate(PROMPTS[3], sampled(20, 1))
    b = engine.start(PROMPTS[4], sampled(40, 2, frequency_penalty=1.0, stop_token_ids=[50, 60]))
    for _ in range(3):
        engine.execute(decode=[b])
    engine.release(b)
    again = engine.generate(PROMPTS[3], sampled(20, 1))
    assert again.output == first.output == tiny.plain.choices(first)
    assert again.proposals == approximately(first.proposals)
    assert again.steps == first.steps


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "torch"])
def test_trees_may_change_from_step_to_step(tiny: Tiny, fused: bool) -> None:
    """Tree, chain, off: as the plan says, with any number of steps."""
    engine = tiny.engine(SETTINGS["large-tree"]._replace(fused=fused))
    lives = [engine.start(prompt, sampled(40, 4)) for prompt in PROMPTS]
    shapes = [
        TreeShape(6, 7, 40),
        TreeShape(),
        TreeShape(1, 3, 4),
        TreeShape(),
        TreeShape(4, 4, 12),
        TreeShape(1, 7, 8),
        TreeShape(3, 1, 3),
    ]
    for i in range(100):
        running = [live for live in lives if not engine.ended(live)]
        if not running:
            break
        engine.execute(decode=running, shape=shapes[i % len(shapes)])
    for live in lives:
        assert engine.ended(live) and live.output == tiny.plain.choices(live)


# ── how requests end ──


def first_outputs(tiny: Tiny, prompt: list[int], count: int) -> list[int]:
    return tiny.engine(PLAIN).generate(prompt, greedy(count)).output


@pytest.mark.parametrize(
    "settings", ["none", *BOTH_SCHEMES, "tree-fewest-rows", "chain", "tree-torch"]
)
def test_output_ends_behind_a_stop_token_and_then_nothing_comes(tiny: Tiny, settings: str) -> None:
    """Plans in flight still name a request that has ended; others go on beside it."""
    plain = first_outputs(tiny, PROMPTS[3], 30)
    engine = tiny.engine(settings)
    for at in (0, 5, 6, 13):
        stop = plain[at]
        end = plain.index(stop) + 1
        lives = [engine.start(PROMPTS[3], greedy(30, stop_token_ids=[stop]))]
        lives.append(engine.start(PROMPTS[4], greedy(50)))
        for _ in range(end + 4):
            engine.execute(decode=lives)
        stopped, other = lives
        assert stopped.output == plain[:end]
        empty = [step for step in stopped.steps if not step.tokens]
        assert len(empty) >= 4 and stopped.steps[-len(empty) :] == empty
        assert all(not step.nodes and not step.logprobs for step in empty)
        assert other.output == tiny.plain.choices(other)
        engine.release(stopped)
        engine.release(other)


@pytest.mark.parametrize("settings", ["none", *BOTH_SCHEMES])
def test_output_ends_at_max_new_tokens_and_then_nothing_comes(tiny: Tiny, settings: str) -> None:
    plain = first_outputs(tiny, PROMPTS[2], 20)
    engine = tiny.engine(settings)
    for most in (1, 2, 3, 9, 20):
        live = engine.start(PROMPTS[2], greedy(most))
        engine.finish([live])
        for _ in range(3):
            engine.execute(decode=[live])
        assert live.output == plain[:most]
        assert [step.tokens for step in live.steps[-3:]] == [[], [], []]
        engine.release(live)


@pytest.mark.parametrize("settings", ["none", "tree"])
def test_the_models_own_stop_token_ends_a_request_unless_ignored(tiny: Tiny, settings: str) -> None:
    engine = tiny.engine(settings)
    wished = {EOS: 1000.0}
    live = engine.generate(PROMPTS[2], greedy(9, ignore_eos=False, logit_bias=wished))
    assert live.output == [EOS]
    live = engine.generate(PROMPTS[2], greedy(9, logit_bias=wished))
    assert live.output == [EOS] * 9


@pytest.mark.parametrize("settings", ["none", *BOTH_SCHEMES])
def test_no_stop_token_comes_before_min_new_tokens(tiny: Tiny, settings: str) -> None:
    """The stop token is the best one from the beginning; it comes as soon as it may."""
    engine = tiny.engine(settings)
    for least in (1, 4, 9):
        how = greedy(
            20,
            min_new_tokens=least,
            stop_token_ids=[7],
            ignore_eos=False,
            logit_bias={7: 1000.0, EOS: 500.0},
        )
        live = engine.generate(PROMPTS[3], how)
        assert len(live.output) == least + 1 and live.output[-1] == 7
        assert 7 not in live.output[:-1] and EOS not in live.output


@pytest.mark.parametrize("settings", ["none", *BOTH_SCHEMES])
def test_a_request_may_fill_the_context(tiny: Tiny, settings: str) -> None:
    engine = tiny.engine(settings, context_length=40)
    live = engine.start(random_prompt(21, 0), greedy(19))
    engine.finish([live])
    engine.execute(decode=[live])
    assert len(live.tokens) == 40 and live.output == tiny.plain.choices(live)


@pytest.mark.parametrize("settings", ["none", *BOTH_SCHEMES])
def test_a_retracted_request_goes_on_with_the_same_text(tiny: Tiny, settings: str) -> None:
    """It comes back with the output it had made as a part of its prompt."""
    how = sampled(
        30,
        seed=5,
        top_k=20,
        frequency_penalty=0.7,
        repetition_penalty=1.2,
        min_new_tokens=12,
        stop_token_ids=list(range(3, 12)),
    )
    engine = tiny.engine(settings)
    whole = engine.generate(PROMPTS[3], how)
    for made in (1, 2, 11, 12):
        again = engine.start(PROMPTS[3] + whole.output[:made], how, prompt_len=len(PROMPTS[3]))
        engine.finish([again])
        assert again.output == whole.output
        engine.execute(decode=[again])
        assert again.output == whole.output
        engine.release(again)


def test_a_request_released_before_it_decodes_frees_its_slot(tiny: Tiny) -> None:
    """After its prompt, and between two chunks of it."""
    engine = tiny.engine(max_running_requests=1)
    expected = engine.generate(PROMPTS[3], greedy(10))
    live = engine.start(PROMPTS[4], greedy(10))
    engine.release(live)
    half = engine.admit(PROMPTS[4], greedy(10))
    item = engine.chunk(half, 20)
    engine.execute(prefill=[item])
    engine.execute(releases=[Release(half.slot)])
    engine.free_slots.append(half.slot)
    engine.free(half.kv)
    engine.free_state(half.state_slot)
    assert engine.generate(PROMPTS[3], greedy(10)).output == expected.output
