"""Trees of EAGLE-3 heads and multi-token-prediction modules through the runner, against full passes
of the network. (Texts: test_drafters.py.)"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from runner_harness import (
    SETTINGS,
    Engine,
    Live,
    Settings,
    accepted,
    greedy,
    random_prompt,
    sampled,
)
from test_runner_drafts import assert_trees_are_the_heads
from tiny_drafters import DRAFTERS
from tiny_heads import GrowingSequence, log_probs, write_eagle3_head
from tiny_model import write_model
from torch import Tensor

from mamba_eagle.config import ConfigError
from mamba_eagle.drafting.network import DraftNetwork
from mamba_eagle.layers.context import FullSequenceContext
from mamba_eagle.model_config import UnsupportedModel

torch.set_num_threads(1)

HEADS = ["eagle3", "mtp", "mtp-mamba", "mtp-modules"]


class PlainDrafts:
    """The network that a runner loaded, over whole sequences."""

    def __init__(self, engine: Engine) -> None:
        self.target = engine.runner.model
        self.network: DraftNetwork = engine.runner.drafter.network

    @torch.inference_mode()
    def log_probs(self, tokens: list[int], drafted: int) -> Tensor:
        """What it says about the token behind ``tokens``, whose last ``drafted`` are its own
        guesses. [V]"""
        network, root = self.network, len(tokens) - drafted
        known = torch.tensor(tokens[:root])
        features = self.target(known, FullSequenceContext(1, root))
        before = torch.cat([torch.zeros_like(features[:1]), features[:-1]])
        ctx = GrowingSequence(torch.arange(root))
        carry = torch.zeros(1, network.carry_size)
        entries = network.entry_features(before)[None]
        outputs = network.run_entries(known[None], entries, carry, ctx)[0, -1:]
        for depth, token in enumerate(tokens[root:], start=1):
            at = ctx.then(root + depth - 1)
            outputs = network.lanes(depth, torch.tensor([token]), outputs, at)
        return log_probs(network, drafted, outputs)[0]


def start_some(engine: Engine) -> list[Live]:
    return [
        engine.start(random_prompt(19, 1), sampled(9, 1)),
        engine.start(random_prompt(1, 2), greedy(9)),
        engine.start(random_prompt(26, 3), greedy(9), cuts=(5, 6, 20)),
    ]


@pytest.mark.parametrize("settings", ["tree", "chain", "tree-torch", "tree-snapshot"])
@pytest.mark.parametrize("drafter", HEADS)
def test_trees_are_scored_as_full_passes_of_the_network_score_them(
    model: Path, tmp_path: Path, drafter: str, settings: str
) -> None:
    """In a batch, over accepted drafts, from prompts in chunks."""
    engine = DRAFTERS[drafter].engine(tmp_path, model, SETTINGS[settings])
    lives = start_some(engine)
    engine.finish(lives)
    assert settings == "chain" or max(accepted(lives)) > 1
    for live in lives:
        assert_trees_are_the_heads(live, PlainDrafts(engine))


@pytest.mark.parametrize("drafter", HEADS)
def test_a_cached_prefix_is_there_for_the_drafter(
    model: Path, tmp_path: Path, drafter: str
) -> None:
    engine = DRAFTERS[drafter].engine(tmp_path, model, SETTINGS["tree"])
    first = engine.start(random_prompt(24, 6), greedy(12))
    engine.finish([first])
    prefix = engine.release(first, fold_to=first.processed)
    assert prefix is not None
    live = engine.start([*prefix.tokens, *random_prompt(5, 7)], greedy(12), hit=prefix)
    engine.finish([live])
    assert_trees_are_the_heads(live, PlainDrafts(engine))


def test_a_drafter_that_does_not_fit_is_refused_at_start_up(model: Path, tmp_path: Path) -> None:
    head = write_eagle3_head(tmp_path / "head", model)
    other = write_model(tmp_path / "other", vocab_size=128, hidden_size=80)
    with pytest.raises(ConfigError, match="vocab_size 96, the target 128(.|\n)*hidden_size 64"):
        Engine(other, head, Settings("EAGLE3"))
    with pytest.raises(UnsupportedModel, match="num_nextn_predict_layers is None"):
        Engine(model, None, Settings("NEXTN"))
