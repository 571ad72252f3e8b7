"""Draft trees through the runner, against full forward passes of the head.

The text does not depend on drafts, so nothing else would notice a head that reads the wrong prefix.
"""

from __future__ import annotations

import pytest
import torch
from runner_harness import SETTINGS, Live, Tiny, greedy, random_prompt, sampled, write_tiny
from tiny_model import load_head
from torch import Tensor

from mamba_eagle.layers.context import FullSequenceContext
from mamba_eagle.models.eagle import EagleHead

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return write_tiny(tmp_path_factory.mktemp("tiny"))


class PlainDrafts:
    """The head over whole sequences, no cache and no lanes."""

    def __init__(self, tiny: Tiny) -> None:
        self.target, self.head = tiny.plain.model, load_head(tiny.head, tiny.model)

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


def assert_trees_are_the_heads(live: Live, plain: PlainDrafts) -> None:
    tokens = live.tokens[: live.prompt_len + 1]
    for proposal, step in zip(live.proposals, live.steps):
        paths: list[list[int]] = [[]]
        assert proposal.tokens[0] == tokens[-1], "the root is the last token, not run yet"
        scores = [0.0]
        for token, parent in zip(proposal.tokens[1:], proposal.parents[1:]):
            log_probs = plain.log_probs(tokens + paths[parent], len(paths[parent]))
            paths.append([*paths[parent], token])
            scores.append(scores[parent] + float(log_probs[token]))
        assert proposal.scores == pytest.approx(scores, abs=1e-3)
        best = plain.log_probs(tokens, 0)
        assert paths[1] == [int(best.argmax())], "the best guess is in the tree"
        tokens = tokens + step.tokens


@pytest.mark.parametrize("settings", ["tree", "chain", "star", "tree-torch", "chain-torch"])
def test_trees_are_scored_as_full_passes_of_the_head_score_them(tiny: Tiny, settings: str) -> None:
    """In a batch, over accepted drafts, from prompts in chunks."""
    engine = tiny.engine(settings)
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
