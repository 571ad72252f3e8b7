"""What is read of RoPE scalings in config.json; test_parity.py compares what they do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from peer_models import YARN_ROPE, make_peer

from mamba_eagle.config import ConfigError, EngineConfig
from mamba_eagle.model_config import ModelConfig, UnsupportedModel, YarnScaling
from mamba_eagle.models.registry import parse_config
from mamba_eagle.runner.assemble import assemble

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 400,
    "rope_theta": 10000.0,
}


def parsed(**changes: Any) -> ModelConfig:
    return parse_config({**LLAMA, **changes})


def test_published_and_new_names_of_a_scaling_mean_the_same() -> None:
    yarn = {"factor": 4.0, "original_max_position_embeddings": 320}
    new = parsed(rope_parameters={"rope_type": "yarn", "rope_theta": 10000.0, **yarn})
    assert new.attention is not None and new.attention.rope is not None
    assert isinstance(new.attention.rope.scaling, YarnScaling)
    assert parsed(rope_scaling={"type": "yarn", **yarn}) == new
    assert parsed(rope_scaling={"rope_type": "yarn", **yarn}) == new


@pytest.mark.parametrize(
    ("scaling", "limit"),
    [
        # added to a config by hand, as Qwen3's model card tells users to
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 320}, 1280),
        # published with the config: the limit already counts the factor
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 100}, 400),
        ({"type": "yarn", "original_max_position_embeddings": 100}, 400),
        ({"type": "yarn", "factor": 4.0}, 1600),
        # its frequencies would depend on the length from here on
        ({"type": "dynamic", "factor": 4.0}, 400),
        ({}, 400),
    ],
    ids=["added", "published", "no-factor", "no-trained-length", "dynamic", "none"],
)
def test_yarn_makes_the_longest_context_longer(scaling: dict[str, Any], limit: int) -> None:
    assert parsed(rope_scaling=scaling).max_position_embeddings == limit


def test_a_context_longer_than_yarns_is_refused_with_the_numbers(tmp_path: Path) -> None:
    make_peer("qwen3-yarn").save_pretrained(tmp_path)
    settings = {"model_path": str(tmp_path), "speculative_algorithm": "NONE", "device": "cpu"}
    yarns = 4 * YARN_ROPE["original_max_position_embeddings"]
    assert assemble(EngineConfig(context_length=yarns, **settings)).ready.context_length == yarns
    with pytest.raises(ConfigError, match=f"--context-length {yarns + 1}: .* {yarns} tokens"):
        assemble(EngineConfig(context_length=yarns + 1, **settings))


@pytest.mark.parametrize("kind", ["longrope", "su", "mrope"])
def test_a_scaling_that_is_not_known_is_refused_by_name(kind: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"rope type '{kind}'.*llama3.*yarn"):
        parsed(rope_scaling={"type": kind, "factor": 4.0})


def test_a_scaling_that_lacks_a_number_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModel, match="lacks 'low_freq_factor'"):
        parsed(rope_scaling={"rope_type": "llama3", "factor": 8.0})
    values = {name: value for name, value in LLAMA.items() if name != "max_position_embeddings"}
    with pytest.raises(UnsupportedModel, match="lacks 'max_position_embeddings'"):
        parse_config({**values, "rope_scaling": {"type": "yarn", "factor": 4.0}})
