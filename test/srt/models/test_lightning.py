"""Nemotron 3.5 Lightning: its config.json, and a small model of its form that drafts for itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peer_models import VOCAB, make_peer
from safetensors.torch import load_file, save_file

from mamba_eagle.bench.batch import BatchEngine, greedy
from mamba_eagle.config import EngineConfig
from mamba_eagle.model_config import UnsupportedModel
from mamba_eagle.models import mtp, nemotron_h
from mamba_eagle.models.config_json import read_values
from mamba_eagle.models.loader import random_weights
from mamba_eagle.models.mtp import MtpHead
from mamba_eagle.models.registry import parse_config
from mamba_eagle.resolve import resolve
from mamba_eagle.runner.assemble import assemble

pytestmark = pytest.mark.usefixtures("one_thread")

PATTERN = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
NAMES = {"M": "mamba", "E": "moe", "*": "attention"}
PUBLISHED: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "layers_block_type": [NAMES[letter] for letter in PATTERN],
    "num_hidden_layers": 52,
    "mtp_layers_block_type": ["attention", "moe"],
    "num_nextn_predict_layers": 1,
    "vocab_size": 131072,
    "hidden_size": 2688,
    "max_position_embeddings": 1048576,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "attention_bias": False,
    "sliding_window": None,
    "rope_theta": 10000,
    "partial_rotary_factor": 1.0,
    "mamba_num_heads": 64,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "ssm_state_size": 128,
    "conv_kernel": 4,
    "chunk_size": 128,
    "use_conv_bias": True,
    "use_bias": False,
    "mamba_proj_bias": False,
    "mamba_hidden_act": "silu",
    "mamba_ssm_cache_dtype": "float32",
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "moe_shared_expert_overlap": True,
    "moe_latent_size": None,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "mlp_hidden_act": "relu2",
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}


def test_the_published_config_is_read() -> None:
    config = parse_config(PUBLISHED)
    kinds = [config.blocks.count(kind) for kind in ("recurrent", "moe", "attention")]
    assert kinds == [23, 23, 6]
    places = [i for i, kind in enumerate(config.blocks) if kind == "attention"]
    assert places == [5, 12, 19, 26, 33, 42]
    assert config.recurrence is not None and config.moe is not None and config.attention is not None
    assert (config.recurrence.inner_size, config.recurrence.conv_dim) == (4096, 6144)
    assert (config.moe.num_experts, config.moe.top_k, config.moe.scaling) == (128, 6, 2.5)
    assert config.moe.latent_size == 0 and config.attention.rope is None
    assert config.dtype == "bfloat16"
    assert parse_config({**PUBLISHED, "layers_block_type": None, "layer_types": None,
                         "hybrid_override_pattern": PATTERN}).blocks == config.blocks  # fmt: skip


def test_the_modules_of_multi_token_prediction_are_read() -> None:
    assert mtp.parse_config(PUBLISHED).blocks == ("attention", "moe")
    pattern = {**PUBLISHED, "mtp_hybrid_override_pattern": "*-"}
    assert mtp.parse_config(pattern).blocks == ("attention", "mlp"), "says more than the default"
    both = {**pattern, "mtp_layers_block_type": ["full_attention", "mlp", "mlp"]}
    assert mtp.parse_config(both).blocks == ("attention", "mlp", "mlp"), "the list wins"


def test_older_names_win() -> None:
    older = {"mamba_n_groups": 4, "mamba_d_conv": 3, "mamba_chunk_size": 64,
             "mamba_conv_bias": False, "mamba_dt_limit": [0.1, 2.0]}  # fmt: skip
    mamba = nemotron_h.parse_config({**PUBLISHED, **older}).recurrence
    assert mamba is not None
    assert (mamba.num_groups, mamba.conv_kernel, mamba.chunk_size) == (4, 3, 64)
    assert (mamba.conv_bias, mamba.time_step_limit) == (False, (0.1, 2.0))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"layers_block_type": ["mamba", "hyena"]}, r"layer kinds \[\'hyena\'\] are not supported"),
        ({"sliding_window": 4096}, "sliding_window 4096 is not supported"),
        ({"n_shared_experts": 2}, "n_shared_experts 2 is not supported"),
        ({"mlp_hidden_act": "silu"}, "mlp_hidden_act .silu. is not supported"),
        ({"mamba_hidden_act": "gelu"}, "mamba_hidden_act .gelu. is not supported"),
    ],
)
def test_what_is_unknown_is_refused_by_name(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        parse_config({**PUBLISHED, **values})


def test_unknown_blocks_of_a_module_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedModel, match="hyena"):
        mtp.parse_config({**PUBLISHED, "mtp_layers_block_type": ["attention", "hyena"]})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model of this form with its module of multi-token prediction, in one folder."""
    folder = tmp_path_factory.mktemp("lightning")
    make_peer("nemotron-3.5-lightning").save_pretrained(folder)
    head = MtpHead(mtp.parse_config(read_values(folder)))
    random_weights(head, 3)
    path = folder / "model.safetensors"
    save_file({**load_file(path), **head.published_weights()}, path, metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def generate(folder: Path) -> Callable[[str], list[list[int]]]:
    tokens = torch.randint(0, VOCAB, (2, 20), generator=torch.Generator().manual_seed(5)).tolist()

    def generate(algorithm: str) -> list[list[int]]:
        config = resolve(
            EngineConfig(
                model_path=str(folder),
                device="cpu",
                speculative_algorithm=algorithm,
                speculative_num_steps=3,
                max_running_requests=2,
                max_total_tokens=300,
            )
        )
        return BatchEngine(config, assemble(config)).generate(tokens, greedy(16)).tokens

    return generate


def test_its_own_modules_draft_and_change_no_text(generate: Callable[[str], list]) -> None:
    assert generate("MTP") == generate("NONE")


def test_what_is_saved_has_the_published_form(folder: Path) -> None:
    """As transformers writes it: a list of kinds, no pattern."""
    values = json.loads((folder / "config.json").read_text())
    assert isinstance(values["layers_block_type"], list) and "layer_types" not in values
    assert "hybrid_override_pattern" not in values
    names = load_file(folder / "model.safetensors")
    assert "mtp.layers.1.mixer.experts.7.down_proj.weight" in names
