"""After an update nothing of a runner is made of the old weights, whatever form it has them in."""

from pathlib import Path

import pytest
from derived_weights import Seen, made_of_weights, weights_in
from runner_harness import TREE
from tiny_model import write_head, write_model

from mamba_eagle.drafting.rounded_head import rounded_head
from mamba_eagle.runner.assemble import assemble
from mamba_eagle.runner.renewal import Renewal

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_drafters_copies_of_the_target_are_renewed(tmp_path: Path) -> None:
    """lm_head in eight bits is one."""
    folders = [write_model(tmp_path / name, seed) for seed, name in enumerate("AB")]
    head = write_head(tmp_path / "head", folders[0])
    bits = {"speculative_draft_model_quantization": "int8", "speculative_adaptive": False}
    configs = [TREE.config(folder, head, **bits) for folder in folders]
    runners = [assemble(config) for config in configs]
    first, wanted = [Seen(*pair) for pair in zip(configs, runners)]
    ways = made_of_weights(first, wanted)
    assert any("drafter.network.output" in way for way in ways), rounded_head
    assert first.texts != wanted.texts
    renewal = Renewal(runners.pop(0))
    assert not renewal.change(weights_in(folders[1]), lambda: None)
    after = Seen(configs[1], renewal.runner)
    assert after.texts == wanted.texts
    assert [way for way in ways if after.sums.get(way) != wanted.sums[way]] == []
