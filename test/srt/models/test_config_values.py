"""Whatever config.json says, the answer is a model or a refusal that names key and value."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peer_models import PEERS, make_peer

from mamba_eagle.model_config import UnsupportedModel
from mamba_eagle.models.config_json import KIND_OF
from mamba_eagle.models.registry import model_class, parse_config, read_model_config

FAMILIES = ("nemotron-3-super", "mamba2", "bamba", "granite", "falcon-h1", "zamba2", "llama")
ODD: tuple[Any, ...] = (-1, 0, None, "x", 1.5, [], {}, True, 10**30, [None], {"a": 1})


def config_of(name: str) -> dict[str, Any]:
    values: dict[str, Any] = make_peer(name).config.to_dict()
    return {**values, "architectures": [f"{PEERS[name][0]}ForCausalLM"]}


def variants(values: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Each key that is checked with each odd value, those of inner objects too."""
    for key, value in values.items():
        if key in KIND_OF:
            yield from ({**values, key: odd} for odd in ODD)
        if isinstance(value, dict):
            yield from ({**values, key: inner} for inner in variants(value))


@pytest.mark.parametrize("name", FAMILIES)
def test_odd_values_are_refused_or_make_a_model(name: str) -> None:
    values = config_of(name)
    refused = 0
    for changed in variants(values):
        try:
            config = parse_config(changed)
            with torch.device("meta"):
                model_class(config)(config)
        except UnsupportedModel:
            refused += 1
    assert refused > 100


@pytest.mark.parametrize("odd", [-1, "64", 1.5, [], 2**31], ids=repr)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_wrong_value_is_named_with_its_file(tmp_path: Path, name: str, odd: Any) -> None:
    wrong = {"vocab_size": odd, "num_attention_heads": odd}
    (tmp_path / "config.json").write_text(json.dumps({**config_of(name), **wrong}))
    with pytest.raises(UnsupportedModel, match="must be a whole number from 1 to ") as refused:
        read_model_config(tmp_path)
    text = str(refused.value)
    assert text.startswith(f"{tmp_path / 'config.json'}: ")
    assert all(f"{key} = {json.dumps(odd)}: must" in text for key in wrong)


@pytest.mark.parametrize(
    ("method", "key", "odd"),
    [
        ("fp8", "weight_block_size", [0, 0]),
        ("fp8", "weight_block_size", 128),
        ("fp8", "weight_block_size", ["128", "128"]),
        ("gptq", "group_size", "128"),
        ("awq", "q_group_size", 64.0),
    ],
)
def test_groups_of_scales_that_cannot_be_are_named(method: str, key: str, odd: Any) -> None:
    quantization = {"quant_method": method, "bits": 4, key: odd}
    with pytest.raises(UnsupportedModel, match=f"quantization_config.{key} = .*must be "):
        parse_config({**config_of("llama"), "quantization_config": quantization})


@pytest.mark.parametrize("name", FAMILIES)
def test_null_is_a_key_that_is_missing(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**config_of(name), "vocab_size": None}))
    with pytest.raises(UnsupportedModel, match=re.escape("lacks 'vocab_size'")):
        read_model_config(tmp_path)
