"""Kimi Linear, Ling 3 and LFM2: what their config.json may say."""

from __future__ import annotations

from typing import Any

import pytest

from mamba_eagle.model_config import ModelConfig, UnsupportedModel
from mamba_eagle.models.registry import parse_config

KIMI = {  # as published, with fewer layers
    "architectures": ["KimiLinearForCausalLM"],
    "model_type": "kimi_linear",
    "vocab_size": 163840,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 5,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "mla_use_nope": True,
    "linear_attn_config": {
        "full_attn_layers": [4, 5],
        "kda_layers": [1, 2, 3],
        "head_dim": 128,
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
    "model_max_length": 1048576,
    "moe_intermediate_size": 1024,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_expert_group": 1,
    "num_shared_experts": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.446,
    "rms_norm_eps": 1e-5,
}
LFM2 = {
    "architectures": ["Lfm2ForCausalLM"],
    "model_type": "lfm2",
    "vocab_size": 65536,
    "hidden_size": 2048,
    "block_ff_dim": 12288,
    "block_multiple_of": 256,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": True,
    "conv_L_cache": 3,
    "conv_bias": False,
    "full_attn_idxs": [2, 5],
    "num_hidden_layers": 6,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 128000,
    "norm_eps": 1e-5,
}


def parsed(values: dict[str, Any], **changes: object) -> ModelConfig:
    return parse_config({**values, **changes})


def test_kimi_linear_as_published_is_read() -> None:
    config = parsed(KIMI)
    assert config.blocks == ("recurrent",) * 3 + ("attention",) * 2
    assert config.max_position_embeddings == 1048576
    assert config.attention is not None and config.attention.kv_size == 576
    assert config.moe is not None and config.moe.shared_intermediate_size == 1024


def test_lfm2_as_published_is_read() -> None:
    """An MLP has two thirds of the channels that are stated."""
    config = parsed(LFM2)
    assert config.blocks == ("recurrent",) * 2 + ("attention",) + ("recurrent",) * 2 + (
        "attention",
    )
    assert config.intermediate_size == 8192 and config.tie_word_embeddings
    assert config.attention is not None and config.attention.rope is not None
    assert config.attention.rope.theta == 1e6


@pytest.mark.parametrize(
    ("values", "changes", "message"),
    [
        (KIMI, {"q_lora_rank": 1536}, "q_lora_rank 1536 is not supported; known: None"),
        (KIMI, {"mla_use_nope": False}, "mla_use_nope False is not supported; known: True"),
        (KIMI, {"num_key_value_heads": 8}, "num_key_value_heads 8 is not supported; known: 32"),
        (KIMI, {"moe_router_activation_func": "softmax"}, "'softmax' is not supported"),
        (KIMI, {"kv_lora_rank": 0}, "kv_lora_rank = 0: must be a whole number from 1"),
        (
            KIMI,
            {"layer_types": ["full_attention"] * 4 + ["swa"]},
            r"\['swa'\].*num_hidden_layers 5",
        ),
        (KIMI, {"linear_attn_config": {}}, "lacks 'kda_layers'"),
        (LFM2, {"full_attn_idxs": ["2"]}, "full_attn_idxs = .*must be a list of layer numbers"),
        (LFM2, {"full_attn_idxs": None}, "lacks 'full_attn_idxs'"),
        (LFM2, {"layer_types": ["conv"] * 5}, "5 entries, none.*num_hidden_layers 6"),
        (LFM2, {"use_expert_bias": False}, "use_expert_bias False is not supported; known: True"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    values: dict[str, Any], changes: dict[str, object], message: str
) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        parsed(values, **changes)
