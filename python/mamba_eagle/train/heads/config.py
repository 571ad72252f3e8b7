"""config.json of a new head. Sizes are those of the target where it has such layers; otherwise they
are derived from its hidden size."""

from typing import Any

from mamba_eagle.model_config import AttentionConfig, Mamba2Config, ModelConfig
from mamba_eagle.train.settings import TrainSettings

MLP_EXPANSION = 3  # intermediate size of an MLP layer / hidden size
BLOCK_MLP_EXPANSION = 2  # the same of a block drafter; published ones have 2.3 to 3
DEFAULT_POSITIONS = 32768  # where the target gives no limit


def head_attention(target: ModelConfig) -> AttentionConfig:
    """The target's attention sizes, without position encoding. For a target without attention, or
    with latent attention: query heads of 64 or 128 channels, in groups of four per KV head where
    their number allows."""
    a = target.attention
    if a is not None and a.latent is None:
        return AttentionConfig(a.num_heads, a.num_kv_heads, a.head_dim)
    head_dim = 128 if target.hidden_size >= 2048 else 64
    heads = max(1, target.hidden_size // head_dim)
    return AttentionConfig(heads, heads // 4 if heads % 4 == 0 else heads, head_dim)


def head_mamba(target: ModelConfig) -> Mamba2Config:
    """The target's Mamba2 sizes. For a target without Mamba2 layers: an inner width of twice the
    hidden size, in heads of 64 channels."""
    if isinstance(target.recurrence, Mamba2Config):
        return target.recurrence
    return Mamba2Config(
        num_heads=max(1, 2 * target.hidden_size // 64),
        head_dim=64,
        state_size=64,
        num_groups=1,
        conv_kernel=4,
        conv_bias=True,
        time_step_limit=(0.0, float("inf")),
        chunk_size=64,
    )


def _of_all(architecture: str, layers: int, target: ModelConfig) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "torch_dtype": "bfloat16",
        "vocab_size": target.vocab_size,
        "hidden_size": target.hidden_size,
        "num_hidden_layers": layers,
        "max_position_embeddings": target.max_position_embeddings,
        "eos_token_id": list(target.eos_token_ids),
    }


def _of_attention(target: ModelConfig) -> dict[str, int]:
    sizes = head_attention(target)
    return {
        "num_attention_heads": sizes.num_heads,
        "num_key_value_heads": sizes.num_kv_heads,
        "head_dim": sizes.head_dim,
    }


def head_config(architecture: str, pattern: str, target: ModelConfig) -> dict[str, Any]:
    """config.json of a head with the layers of ``pattern``, in Nemotron-H's fields."""
    mamba, config = head_mamba(target), _of_all(architecture, len(pattern), target)
    config |= {"hybrid_override_pattern": pattern, "layer_norm_epsilon": target.norm_eps}
    if "*" in pattern:
        config |= _of_attention(target)
    if "-" in pattern:
        config["intermediate_size"] = MLP_EXPANSION * target.hidden_size
        config["mlp_hidden_act"] = "relu2"
    if "M" in pattern:
        config["mamba_num_heads"] = mamba.num_heads
        config["mamba_head_dim"] = mamba.head_dim
        config["ssm_state_size"] = mamba.state_size
        config["n_groups"] = mamba.num_groups
        config["conv_kernel"] = mamba.conv_kernel
        config["use_conv_bias"] = mamba.conv_bias
        config["chunk_size"] = mamba.chunk_size
    return config


def attention_head_config(
    architecture: str, layers: int, expansion: int, target: ModelConfig
) -> dict[str, Any]:
    """What heads of rotated attention and gated MLPs have in common, in Llama's fields. expansion:
    intermediate size / hidden size."""
    return {
        **_of_all(architecture, layers, target),
        **_of_attention(target),
        "intermediate_size": expansion * target.hidden_size,
        "hidden_act": "silu",
        "rms_norm_eps": target.norm_eps,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    }


def block_draft_config(
    architecture: str, settings: TrainSettings, taps: list[int], target: ModelConfig
) -> dict[str, Any]:
    """config.json of a block drafter, in the fields of published ones.

    Args:
        taps: layers of the target whose outputs are read, from 0.
    """
    dspark = architecture.endswith("DSparkModel")
    config = attention_head_config(architecture, settings.draft_layers, BLOCK_MLP_EXPANSION, target)
    config |= {
        "model_type": "qwen3",
        "max_position_embeddings": target.max_position_embeddings or DEFAULT_POSITIONS,
        "block_size": settings.depth if dspark else settings.depth + 1,
        "mask_token_id": 0,
        "target_layer_ids": taps,
        "dflash_config": {"causal": dspark},
    }
    if dspark:
        config |= {
            "sample_from_anchor": True,
            "markov_rank": settings.markov_rank,
            "markov_head_type": settings.markov_head,
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
        }
    return config


def eagle3_config(draft_vocab_size: int, taps: list[int], target: ModelConfig) -> dict[str, Any]:
    """config.json of an EAGLE-3 head, in the fields of published heads.

    Args:
        taps: the layer ids that the config stores for its three features.
    """
    return {
        **attention_head_config("LlamaForCausalLMEagle3", 1, MLP_EXPANSION, target),
        "model_type": "llama",
        "draft_vocab_size": draft_vocab_size,
        "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": taps},
    }
