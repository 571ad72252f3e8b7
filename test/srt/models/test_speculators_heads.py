"""What speculators' heads may have beyond SafeAILab's: EAGLE 3.1's norms of the taps and drafts fed
back behind the head's norm (``norm_before_fc``, ``fc_norm``, ``norm_output``); Qwen3's layer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import plain_heads
import pytest
import torch
from head_rig import (
    CLOSE,
    LENGTH,
    TAPS,
    eagle3_network,
    random_tokens,
    roughen,
    run_drafts,
    tapped,
)
from safetensors.torch import load_file
from tiny_heads import EAGLE3_CONFIG, log_probs, write_eagle3_head
from tiny_model import VOCAB, write_model

from mamba_eagle.layers.context import FullSequenceContext
from mamba_eagle.models.eagle3 import outputs_normed
from mamba_eagle.models.registry import read_model_config

torch.set_num_threads(1)

FORMS: dict[str, dict[str, Any]] = {
    "before": {"norm_before_fc": True},
    "each": {"fc_norm": True},
    "output": {"norm_output": True},
    "all": {"norm_before_fc": True, "norm_output": True},
    "qwen3": {},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("form", FORMS)
def test_drafts_are_what_the_file_says(model: Path, tmp_path: Path, form: str) -> None:
    asked = FORMS[form]
    layer = {"model_type": "qwen3"} if form == "qwen3" else None
    ids = {"eagle_aux_hidden_state_layer_ids": list(TAPS)}
    folder = write_eagle3_head(
        tmp_path, model, eagle_config={**ids, **asked}, transformer_layer_config=layer
    )
    w, target = load_file(roughen(folder) / "model.safetensors"), tapped(model)
    assert ("midlayer.self_attn.q_norm.weight" in w) == (form == "qwen3")
    network = eagle3_network(folder, target)
    tokens, drafted = random_tokens(LENGTH), [5, 60, 7]
    features = target(tokens, FullSequenceContext(1, LENGTH))
    taps = features[:, 64:].unflatten(1, (3, 64))
    given = plain_heads.behind(plain_heads.eagle3_features(w, asked, taps))
    for depth, made in enumerate(run_drafts(network, tokens, features, drafted)):
        whole = torch.cat([tokens, torch.tensor(drafted[:depth], dtype=torch.int64)])
        ahead = plain_heads.eagle3(w, EAGLE3_CONFIG, target.embed(whole), given)[-1:]
        wanted = plain_heads.rms(ahead, w["norm.weight"]) if "norm_output" in asked else ahead
        torch.testing.assert_close(made[None], wanted, **CLOSE)
        exact = plain_heads.eagle3_log_probs(w, VOCAB, ahead)
        torch.testing.assert_close(log_probs(network, 0, made[None]), exact, **CLOSE)
        given = torch.cat([given, wanted])


def test_one_word_means_two_things(tmp_path: Path) -> None:
    """SpecForge's ``norm_output`` stands by itself in a flat config.json, and is about logits."""
    sizes = {name: value for name, value in EAGLE3_CONFIG.items() if name != "architectures"}
    for values, behind in (
        ({**EAGLE3_CONFIG, "norm_output": True}, False),
        ({"transformer_layer_config": sizes, "norm_output": True}, True),
        ({"transformer_layer_config": sizes, "norm_output": False}, False),
        ({**EAGLE3_CONFIG, "eagle_config": {"norm_output": True}}, True),
    ):
        (tmp_path / "config.json").write_text(json.dumps(values))
        assert outputs_normed(read_model_config(tmp_path, "eagle3")) == behind
