"""Small random models of every family, as transformers makes and saves them."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
import transformers
from torch import Tensor, nn

VOCAB = 96
CHUNK = 16
BASE = {"vocab_size": VOCAB, "hidden_size": 64, "max_position_embeddings": 512}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
BAMBA = {
    **BASE,
    **HEADS,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "mamba_n_heads": 8,
    "mamba_d_state": 24,
    "mamba_chunk_size": CHUNK,
}
NEMOTRON = {
    **BASE,
    **HEADS,
    "hybrid_override_pattern": "M*-M",
    "mamba_num_heads": 8,
    "mamba_head_dim": 12,
    "ssm_state_size": 24,
    "n_groups": 2,
    "chunk_size": CHUNK,
    "head_dim": 20,
    "intermediate_size": 112,
    # transformers clamps dt to it in its chunked scan and not in decode
    "time_step_min": 1e-9,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 28,
    "moe_shared_expert_intermediate_size": 40,
}
MAMBA2 = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_heads": 8,
    "head_dim": 16,
    "state_size": 24,
    "num_hidden_layers": 3,
    "n_groups": 1,
    "chunk_size": CHUNK,
}
GRANITE = {
    **BAMBA,
    "layer_types": ["mamba", "attention", "mamba", "attention"],
    "shared_intermediate_size": 40,
    "intermediate_size": 28,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.21,
    "residual_multiplier": 0.7,
    "logits_scaling": 1.7,
}
FALCON = {
    **BAMBA,
    "num_hidden_layers": 2,
    "mamba_d_ssm": 96,
    "embedding_multiplier": 1.6,
    "lm_head_multiplier": 0.6,
    "mlp_multipliers": [0.8, 1.3],
    "key_multiplier": 0.6,
    "attention_in_multiplier": 1.2,
    "attention_out_multiplier": 0.7,
    "ssm_multipliers": [0.7, 1.2, 0.8, 1.4, 0.9],
    "ssm_in_multiplier": 1.2,
    "ssm_out_multiplier": 0.6,
}
ZAMBA = {
    **BASE,
    "layers_block_type": ["mamba", "hybrid", "hybrid", "mamba", "hybrid", "hybrid"],
    "num_hidden_layers": 6,
    "mamba_d_state": 24,
    "n_mamba_heads": 8,
    "mamba_ngroups": 2,
    "chunk_size": CHUNK,
    "num_attention_heads": 4,
    "num_mem_blocks": 2,
    "adapter_rank": 8,
    "intermediate_size": 80,
    "time_step_min": 1e-9,
}
LLAMA = {**BASE, **HEADS, "intermediate_size": 80, "num_hidden_layers": 2}
QWEN_NEXT = {
    **BASE,
    **HEADS,
    "head_dim": 20,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 10,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 28,
    "shared_expert_intermediate_size": 40,
    "partial_rotary_factor": 0.4,
}
QWEN_3_5 = {k: v for k, v in QWEN_NEXT.items() if "expert" not in k and "moe" not in k}
OLMO = {
    **BASE,
    **HEADS,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 3,
    # equal: transformers saves a third of the convolution's channels for each of q, k and v
    "linear_key_head_dim": 14,
    "linear_value_head_dim": 14,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}

EXPERTS = {"moe_intermediate_size": 28, "num_experts": 8, "num_experts_per_tok": 3}
LATENT = {
    **BASE,
    **EXPERTS,
    "intermediate_size": 80,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "kv_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 20,
    "n_group": 1,
    "topk_group": 1,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LFM2 = {**BASE, **HEADS, "num_hidden_layers": 3, "intermediate_size": 80, "pad_token_id": None}

# what is tested -> (prefix of transformers' classes, settings)
PEERS: dict[str, tuple[str, dict[str, Any]]] = {
    "nemotron-h": ("NemotronH", NEMOTRON),
    "nemotron-h-bias": (
        "NemotronH",
        {**NEMOTRON, "use_bias": True, "mlp_bias": True, "use_conv_bias": False, "n_groups": 1},
    ),
    "nemotron-3-nano": (
        "NemotronH",
        {**NEMOTRON, "hybrid_override_pattern": "ME*E", "routed_scaling_factor": 2.5},
    ),
    "nemotron-3-super": (
        "NemotronH",
        {
            **NEMOTRON,
            "hybrid_override_pattern": "ME*EM",
            "moe_latent_size": 36,
            "n_group": 4,
            "topk_group": 2,
        },
    ),
    "nemotron-3.5-lightning": (
        "NemotronH",
        {
            **{k: v for k, v in NEMOTRON.items() if k != "hybrid_override_pattern"},
            "layers_block_type": ["mamba", "moe", "mamba", "attention", "moe"],
            "n_groups": 4,
            "routed_scaling_factor": 2.5,
            "moe_latent_size": None,
            "moe_shared_expert_overlap": True,
            "num_nextn_predict_layers": 1,
            "mtp_layers_block_type": ["attention", "moe"],
        },
    ),
    "nemotron-3-unnormalized": (
        "NemotronH",
        {**NEMOTRON, "hybrid_override_pattern": "ME", "norm_topk_prob": False},
    ),
    "mamba2": ("Mamba2", {**MAMBA2, "tie_word_embeddings": True}),
    "mamba2-groups": ("Mamba2", {**MAMBA2, "n_groups": 4, "use_bias": True}),
    "bamba": ("Bamba", {**BAMBA, "attn_layer_indices": [1, 3]}),
    "bamba-bias": (
        "Bamba",
        {
            **BAMBA,
            "attn_layer_indices": [2],
            "mamba_n_groups": 2,
            "attention_bias": True,
            "mlp_bias": True,
            "mamba_proj_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "bamba-yarn": ("Bamba", {**BAMBA, "attn_layer_indices": [1, 3], "rope_parameters": YARN_ROPE}),
    "granite": ("GraniteMoeHybrid", {**GRANITE, "tie_word_embeddings": True}),
    "granite-dense-rope": (
        "GraniteMoeHybrid",
        {**GRANITE, "num_local_experts": 0, "position_embedding_type": "rope"},
    ),
    "falcon-h1": ("FalconH1", FALCON),
    "falcon-h1-norm": (
        "FalconH1",
        {
            **FALCON,
            "mamba_rms_norm": True,
            "mamba_n_groups": 2,
            "projectors_bias": True,
            "mamba_proj_bias": True,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "falcon-h1-gate-first": (
        "FalconH1",
        {**FALCON, "mamba_rms_norm": True, "mamba_norm_before_gate": False},
    ),
    "zamba2": ("Zamba2", ZAMBA),
    "zamba2-adapters-rope": (
        "Zamba2",
        {
            **ZAMBA,
            "use_shared_attention_adapter": True,
            "use_mem_rope": True,
            "num_mem_blocks": 1,
            "add_bias_linear": True,
        },
    ),
    "qwen3-next": ("Qwen3Next", {**QWEN_NEXT, "mlp_only_layers": [1]}),
    "qwen3.5": (
        "Qwen3_5",
        {**QWEN_3_5, "layer_types": ["linear_attention", "full_attention"] * 2},
    ),
    "qwen3.5-moe": (
        "Qwen3_5Moe",
        {k: v for k, v in QWEN_NEXT.items() if k != "intermediate_size"},
    ),
    "olmo-hybrid": ("OlmoHybrid", {**OLMO, "rope_parameters": None}),
    "olmo-hybrid-rope": (
        "OlmoHybrid",
        {
            **OLMO,
            "layer_types": ["full_attention", "linear_attention"] * 2,
            "linear_allow_neg_eigval": False,
        },
    ),
    "kimi-linear": ("KimiLinear", {**LATENT, "linear_head_dim": 12, "linear_num_heads": 6}),
    "ling-3": ("BailingHybrid", {**LATENT, "head_dim": 12, "n_group": 4, "topk_group": 2}),
    "lfm2": (
        "Lfm2",
        {**LFM2, "full_attn_idxs": [1], "block_multiple_of": 12, "conv_bias": True},
    ),
    "lfm2-moe": (
        "Lfm2Moe",
        {
            **LFM2,
            **EXPERTS,
            "num_dense_layers": 1,
            "layer_types": ["conv", "full_attention", "conv"],
            "conv_L_cache": 4,
            "routed_scaling_factor": 1.5,
            "tie_word_embeddings": False,
        },
    ),
    "llama": ("Llama", {**LLAMA, "rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True}),
    "llama-linear": (
        "Llama",
        {**LLAMA, "rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0}},
    ),
    "llama-dynamic": (
        "Llama",
        {**LLAMA, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 3.0}},
    ),
    "qwen3": ("Qwen3", {**LLAMA, "head_dim": 20, "attention_bias": True}),
    "qwen3-yarn": ("Qwen3", {**LLAMA, "head_dim": 20, "rope_parameters": YARN_ROPE}),
    "qwen3-yarn-mscale": (
        "Qwen3",
        {
            **LLAMA,
            "rope_parameters": {
                **YARN_ROPE,
                "beta_fast": 8.0,
                "beta_slow": 0.5,
                "mscale": 1.5,
                "mscale_all_dim": 0.5,
                "truncate": False,
            },
        },
    ),
}


# What the kernels of Mamba2, of attention and of experts take; the sizes above are odd on
# purpose, and on a GPU such a model runs by torch.
KERNEL_SIZES: dict[str, dict[str, Any]] = {
    "NemotronH": {
        "mamba_head_dim": 16,
        "ssm_state_size": 32,
        "head_dim": 128,
        "moe_intermediate_size": 32,
    },
    "Mamba2": {"state_size": 32},
    "Bamba": {"mamba_d_state": 32},
    "GraniteMoeHybrid": {"mamba_d_state": 32, "intermediate_size": 32},
    "FalconH1": {"mamba_d_state": 32, "mamba_d_ssm": 128},
    "Zamba2": {"mamba_d_state": 32},
    "OlmoHybrid": {},
    **dict.fromkeys(("Llama", "Qwen3Next", "Qwen3_5", "Qwen3_5Moe"), {"head_dim": 128}),
    "Qwen3": {"head_dim": 128},
    **dict.fromkeys(("KimiLinear", "BailingHybrid", "Lfm2Moe"), {"moe_intermediate_size": 32}),
    "Lfm2": {},
}
PEERS_FOR_KERNELS = {
    f"{name}-kernels": (prefix, {**settings, **KERNEL_SIZES[prefix]})
    for name, (prefix, settings) in PEERS.items()
}


def fill(model: nn.Module, prefix: str, seed: int) -> dict[str, Tensor]:
    """Draw all weights; returns them by name."""
    generator = torch.Generator().manual_seed(seed)

    def normal(parameter: Tensor, scale: float, mean: float = 0.0) -> Tensor:
        return torch.randn(parameter.shape, generator=generator) * scale + mean

    with torch.no_grad():
        tensors = dict(model.named_parameters())
        tensors.update((n, b) for n, b in model.named_buffers() if n.endswith("_bias"))
        for label, parameter in tensors.items():
            if label.endswith("A_log"):
                value = normal(parameter, 0.7)
            elif label.endswith("dt_bias"):
                value = normal(parameter, 0.7, -1.5)
            elif label.endswith(".D") or "norm" in label:
                # Qwen's from Next on are stored as what they differ from 1 by
                centred = prefix.startswith(("Qwen3N", "Qwen3_")) and "linear_attn" not in label
                value = normal(parameter, 0.2, 0.0 if centred else 1.0)
            elif label.endswith("bias"):
                value = normal(parameter, 0.2)
            elif "embed" in label or "conv1d" in label:
                value = normal(parameter, 0.5)
            else:
                value = normal(parameter, 0.9 / math.sqrt(parameter.shape[-1]))
            parameter.copy_(value)
    return tensors


def make_peer(name: str, **changes: Any) -> nn.Module:
    """transformers' model, with ``changes`` of its config, and weights that matter everywhere: a
    layer left out, a bias forgotten or a norm of another kind moves the logits, which are a few
    units wide. Larger weights would make every rounding grow from layer to layer, in transformers
    too.
    """
    prefix, settings = {**PEERS, **PEERS_FOR_KERNELS}[name]
    # a copy: Bamba's config writes into the dict of RoPE parameters
    kind = (
        f"{prefix}TextConfig" if hasattr(transformers, f"{prefix}TextConfig") else f"{prefix}Config"
    )
    config = getattr(transformers, kind)(**copy.deepcopy({**settings, **changes}))
    model: nn.Module = getattr(transformers, f"{prefix}ForCausalLM")(config).eval()
    tensors = fill(model, prefix, len(name))
    with torch.no_grad():
        if "lm_head.weight" in tensors:
            tensors["lm_head.weight"].mul_(3.5)
    return model.requires_grad_(False)


def peer_logits(model: nn.Module, tokens: Tensor) -> Tensor:
    """tokens [batch, length] -> [batch, length, vocab_size]; without a cache, which transformers
    does not keep exactly (its chunked scan and its decode step clamp dt differently)."""
    return model(input_ids=tokens, use_cache=False).logits.float()


def peer_text(model: nn.Module, prompt: list[int], count: int) -> list[int]:
    """Greedy tokens, each from a pass over all that came before."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(peer_logits(model, torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[len(prompt) :]


def peer_hidden(model: nn.Module, prompt: list[int]) -> Tensor:
    """[n, hidden_size]: what the head reads."""
    out = model.base_model(input_ids=torch.tensor([prompt]), use_cache=False)
    return out.last_hidden_state[0].float()
