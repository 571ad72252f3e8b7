"""What a trainer computes for packed sequences is what a server has sampled with, to the bit."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from runner_harness import PLAIN, TREE, Engine, Live, greedy, random_prompt, sampled
from tiny_model import write_model

from mamba_eagle.config import ConfigError
from mamba_eagle.embedded import EMBEDDED_HEADS, EMBEDDED_MODEL
from mamba_eagle.packed import PackedForward

DEVICES = {
    "cpu": {"device": "cpu"},
    "cuda": {"device": "cuda", "dtype": "bfloat16", "exact": True},
}
ON_EACH = [
    pytest.param("cpu"),
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.timeout(600)]),
]
PACKINGS = [(1, 1), (7, 3), (64, 2), (100, 32)]  # tokens and sequences in a pass


def texts(engine: Engine) -> list[Live]:
    """Greedy and sampled, made side by side."""
    asks: dict[str, Any] = {"return_logprob": True}
    lives = [
        engine.start(random_prompt(1, 0), greedy(20), **asks),
        engine.start(random_prompt(70, 1), greedy(33), cuts=(64,), **asks),
        engine.start(random_prompt(150, 2), sampled(25, 3), **asks),
        engine.start(random_prompt(12, 3), sampled(40, 4, temperature=1.5, top_k=9), **asks),
    ]
    engine.finish(lives)
    for live in lives:
        engine.release(live)
    return lives


@pytest.mark.parametrize("where", ON_EACH)
def test_logprobs_are_those_of_decoding_and_of_scored_prompts(where: str) -> None:
    """With trees and without, whatever shares a pass and wherever sequences are cut."""
    settings = DEVICES[where]
    trees = Engine(EMBEDDED_MODEL, EMBEDDED_HEADS["EAGLE"], TREE, **settings)
    lives = [*texts(trees), *texts(Engine(EMBEDDED_MODEL, None, PLAIN, **settings))]
    assert any(len(step.tokens) > 2 for live in lives for step in live.steps)
    sequences = [live.tokens for live in lives]
    forward = PackedForward(**settings)
    found = [logprobs.tolist() for logprobs in forward.logprobs(sequences)]
    for live, logprobs in zip(lives, found, strict=True):
        assert logprobs[live.prompt_len - 1 :] == [each.logprob for each in live.logprobs]
        scored = trees.start(live.tokens, greedy(1), logprob_start=0, cuts=(1, 50, 77))
        trees.release(scored)
        assert logprobs == [each.logprob for each in scored.input_logprobs[1:]]
    rng, longest = random.Random(5), max(map(len, sequences))
    for tokens, most in PACKINGS:
        # the circle of KV slots is as small as it can be, and is gone round several times
        sizes = {"chunked_prefill_size": tokens, "max_running_requests": most}
        forward = PackedForward(context_length=longest, **sizes, **settings)
        for _ in range(2):
            order = rng.sample(range(len(sequences)), len(sequences))
            again = forward.logprobs([sequences[number] for number in order])
            assert [each.tolist() for each in again] == [found[number] for number in order]


@pytest.fixture(scope="module")
def forward(model: Path) -> PackedForward:
    return PackedForward(str(model), device="cpu")


def test_logprobs_may_be_those_at_a_temperature(model: Path, forward: PackedForward) -> None:
    asks = {"return_logprob": True, "logprob_temperature": 0.6}
    live = Engine(model, None, PLAIN).generate(random_prompt(9, 1), sampled(20, 2), **asks)
    (logprobs,) = forward.logprobs([live.tokens], temperature=0.6)
    assert logprobs.tolist()[8:] == [each.logprob for each in live.logprobs]
    assert logprobs.tolist() != forward.logprobs([live.tokens])[0].tolist()
    with pytest.raises(ValueError, match=r"temperature 0: must be above 0"):
        forward.logprobs([live.tokens], temperature=0)


def test_logits_are_those_that_tokens_are_chosen_from(model: Path, forward: PackedForward) -> None:
    lives = [Engine(model, None, PLAIN).generate(random_prompt(n, n), greedy(9)) for n in (3, 30)]
    for live, logits in zip(lives, forward.logits([live.tokens for live in lives]), strict=True):
        assert logits.shape == (len(live.tokens), 96)
        assert logits[live.prompt_len - 1 : -1].argmax(1).tolist() == live.output


def test_autograd_takes_the_results(forward: PackedForward) -> None:
    """Though they are made in inference mode."""
    (logprobs,) = forward.logprobs([random_prompt(5, 1)])
    weights = torch.ones(4, requires_grad=True)
    (weights * logprobs).exp().sum().backward()
    assert torch.equal(weights.grad, logprobs * logprobs.exp())


def test_new_weights_give_what_a_start_with_them_gives(model: Path, tmp_path: Path) -> None:
    other, wrong = write_model(tmp_path / "other", seed=1), tmp_path / "wrong"
    write_model(wrong, intermediate_size=80)
    forward, sequences = PackedForward(str(model), device="cpu"), [random_prompt(20, 1)]
    (before,) = forward.logprobs(sequences)
    with pytest.raises(ValueError, match="is that of another model"):
        forward.update_weights_from_disk(str(wrong))
    assert torch.equal(forward.logprobs(sequences)[0], before)
    forward.update_weights_from_disk(str(other))
    (after,) = forward.logprobs(sequences)
    assert torch.equal(after, PackedForward(str(other), device="cpu").logprobs(sequences)[0])
    assert not torch.equal(after, before)
    forward.close()
    with pytest.raises(ValueError, match="there are no weights"):
        forward.logprobs(sequences)


@pytest.mark.parametrize(
    "sequences, problem",
    [
        ([[1, 2], []], r"sequences\[1\]: is empty; leave it out"),
        ([[1, 2], [3, 96]], r"sequences\[1\]\[1\] = 96: must be a token id, .* 0 and 95"),
        ([[-1]], r"sequences\[0\]\[0\] = -1: must be a token id"),
        ([[1, 2.0]], r"sequences\[0\]\[1\] = 2\.0: must be a token id"),
        ([1, 2], r"sequences\[0\] = 1: must be a list of token ids"),
        (torch.ones(1, 2).long(), r"sequences\[0\] = .*tensor.*: must be a list of token ids"),
        ([[1] * 513], r"sequences\[0\]: has 513 tokens, and the context 512: shorten it"),
    ],
)
def test_what_the_model_cannot_take_is_refused(
    sequences: Any, problem: str, forward: PackedForward
) -> None:
    with pytest.raises(ValueError, match=problem):
        forward.logprobs(sequences)
    assert forward.logprobs([]) == [] and [len(each) for each in forward.logprobs([[1]])] == [0]


def test_wrong_settings_are_refused_by_name(model: Path) -> None:
    with pytest.raises(ConfigError, match="PackedForward .* 'tree_size'"):
        PackedForward(str(model), tree_size=3)
    with pytest.raises(ConfigError, match="--quantization 'fp4': must be one of auto, fp8"):
        PackedForward(model, quantization="fp4")
    with pytest.raises(ConfigError, match="PackedForward has one device"):
        PackedForward(str(model), tp_size=2)
    with pytest.raises(ConfigError, match="supports at most 512 tokens"):
        PackedForward(str(model), device="cpu", context_length=513)
