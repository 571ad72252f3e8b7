"""Draft trees through the runner, against full forward passes of the head.

The text does not depend on drafts, so nothing else would notice a head that reads the wrong prefix.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from runner_harness import SETTINGS, Engine, Live, Tiny, greedy, random_prompt, sampled
from tiny_model import HEAD_CONFIG, MODEL_CONFIG, load_head, write_head
from torch import Tensor

from mamba_eagle.core import SamplingParams
from mamba_eagle.kernels.sampling_noise.torch import gumbel
from mamba_eagle.layers.context import FullSequenceContext
from mamba_eagle.models.eagle import EagleHead

torch.set_num_threads(1)


class PlainDrafts:
    """The head over whole sequences, no cache and no lanes."""

    def __init__(self, tiny: Tiny) -> None:
        self.target, self.head = tiny.plain.model, load_head(tiny.head)

    def log_probs(self, tokens: list[int], drafted: int) -> Tensor:
        """What the head says about the token behind ``tokens``, whose last ``drafted`` are its own
        guesses: their features are the head's, those of the others the target's. [V]"""
        known = torch.tensor(tokens[: len(tokens) - drafted])
        features = self.target(known, FullSequenceContext(1, len(known)))
        features = torch.cat([torch.zeros_like(features[:1]), features[:-1]])
        out = run(self.head, self.target.embed(known), features)
        for i in range(len(known), len(tokens)):
            features = torch.cat([features, out[-1:]])
            embeddings = self.target.embed(torch.tensor(tokens[: i + 1]))
            out = torch.cat([out, run(self.head, embeddings, features)[-1:]])
        return self.target.compute_logits(out[-1:])[0].log_softmax(0)


def run(head: EagleHead, embeddings: Tensor, features: Tensor) -> Tensor:
    return head(embeddings, features, FullSequenceContext(1, len(embeddings)))


def with_noise(log_probs: Tensor, sampling: SamplingParams, position: int) -> Tensor:
    """What the head says about the sample at ``position``. [V]"""
    if sampling.greedy:
        return log_probs
    noise = gumbel(torch.tensor([sampling.seed]), torch.tensor([position]), len(log_probs))[0]
    return (log_probs / sampling.temperature + noise).log_softmax(0)


def assert_trees_are_the_heads(live: Live, plain: PlainDrafts) -> None:
    def guess(tokens: list[int], drafted: int) -> Tensor:
        return with_noise(plain.log_probs(tokens, drafted), live.sampling, len(tokens))

    tokens = live.tokens[: live.prompt_len + 1]
    for proposal, step in zip(live.proposals, live.steps):
        paths: list[list[int]] = [[]]
        assert proposal.tokens[0] == tokens[-1], "the root is the last token, not run yet"
        scores, guesses = [0.0], dict[int, Tensor]()  # by parent
        for token, parent in zip(proposal.tokens[1:], proposal.parents[1:]):
            if parent not in guesses:
                guesses[parent] = guess(tokens + paths[parent], len(paths[parent]))
            paths.append([*paths[parent], token])
            scores.append(scores[parent] + float(guesses[parent][token]))
        assert proposal.scores == pytest.approx(scores, abs=1e-3)
        assert paths[1] == [int(guesses[0].argmax())], "the best guess is in the tree"
        tokens = tokens + step.tokens


@pytest.mark.parametrize("settings", ["tree", "chain", "star", "tree-torch", "chain-torch"])
def test_trees_are_scored_as_full_passes_of_the_head_score_them(tiny: Tiny, settings: str) -> None:
    """In a batch, over accepted drafts, from prompts in chunks."""
    assert_trees_follow_the_head(tiny, tiny.engine(settings), settings)


@pytest.mark.parametrize("settings", ["tree", "chain", "tree-torch", "tree-snapshot"])
@pytest.mark.parametrize("pattern", ["M-", "*M"])
def test_a_head_may_have_mamba2_layers(
    tiny: Tiny, tmp_path: Path, pattern: str, settings: str
) -> None:
    mamba = {name: MODEL_CONFIG[name] for name in MODEL_CONFIG if name not in HEAD_CONFIG}
    head = write_head(tmp_path, tiny.model, hybrid_override_pattern=pattern, **mamba)
    tiny = tiny._replace(head=head)
    assert_trees_follow_the_head(tiny, tiny.engine(settings), settings)


@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_trees_end_where_the_head_doubts(tiny: Tiny, shape: str) -> None:
    """Without the nodes whose rank it gives less than that, on average over the batch. One draft
    is always verified; the text stays what it is."""
    texts = {}
    doubting = f"{shape}-doubting"
    for name in ("none", shape, doubting):
        engine = tiny.engine(name)
        lives = [engine.start(random_prompt(n, n), greedy(12)) for n in (19, 26)]
        engine.finish(lives)
        texts[name] = [live.output for live in lives]
        if name == doubting:
            drafted = [live.proposals for live in lives]
    assert texts["none"] == texts[shape] == texts[doubting]
    kept = SETTINGS[doubting]
    sizes = set()
    for together in zip(*drafted):
        (size,) = {len(proposal.tokens) for proposal in together}
        sizes.add(size)
        likely = sum(math.exp(min(proposal.scores)) for proposal in together)
        assert size == 2 or likely >= kept.p_min * len(together)
    assert 2 in sizes and len(sizes) > 1


def assert_trees_follow_the_head(tiny: Tiny, engine: Engine, settings: str) -> None:
    lives = [
        engine.start(random_prompt(19, 1), sampled(7, 1)),
        engine.start(random_prompt(1, 2), greedy(7)),
        engine.start(random_prompt(26, 3), greedy(7), cuts=(5, 6, 20)),
    ]
    engine.finish(lives)
    steps = [len(step.tokens) for live in lives for step in live.steps]
    assert SETTINGS[settings].topk == 1 or max(steps) > 1
    for live in lives:
        assert_trees_are_the_heads(live, PlainDrafts(tiny))
