"""Kimi Linear: Kimi delta attention, with latent attention in every fourth layer, and mixtures of
experts from the second layer on (arXiv 2510.26692)."""

from typing import Any, ClassVar

from mamba_eagle.layers.block import LayerNames, PreNormLayer
from mamba_eagle.layers.kimi_delta import KimiDeltaAttention
from mamba_eagle.layers.latent_attention import LatentAttention
from mamba_eagle.layers.moe import SigmoidMoE
from mamba_eagle.model_config import (
    AttentionConfig,
    DeltaConfig,
    LatentConfig,
    ModelConfig,
    MoEConfig,
    RopeConfig,
)
from mamba_eagle.models.base import CausalLM, gated_expert_place
from mamba_eagle.models.parse import blocks_of, model_config, only

# names of config.json that transformers reads as others, which it does not write
OTHER_NAMES = {
    "num_experts": "num_local_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_expert_group": "n_group",
    "num_shared_experts": "n_shared_experts",
    "moe_renormalize": "norm_topk_prob",
    "model_max_length": "max_position_embeddings",
}
# published name -> ours
NAMES = {
    ".block_sparse_moe.": ".mlp.",
    ".q_conv1d.": ".conv1d.q.",
    ".k_conv1d.": ".conv1d.k.",
    ".v_conv1d.": ".conv1d.v.",
}
KINDS = {"full_attention": "attention", "linear_attention": "recurrent"}


class KimiLayer(PreNormLayer):
    names = LayerNames(recurrent="self_attn")
    attention, recurrent, experts = LatentAttention, KimiDeltaAttention, SigmoidMoE

    def is_sparse(self, config: ModelConfig, layer: int) -> bool:
        return mlp_kinds(config.raw)[layer] == "sparse"


class KimiLinearForCausalLM(CausalLM):
    layer_class = KimiLayer
    renamed: ClassVar[dict[str, str]] = NAMES
    place = staticmethod(gated_expert_place)
    late_sums = True


def mlp_kinds(values: dict[str, Any]) -> list[str]:
    """What follows each layer's mixer: dense or sparse."""
    if kinds := values.get("mlp_layer_types"):
        return list(kinds)
    count, dense = values["num_hidden_layers"], values["first_k_dense_replace"]
    return ["dense" if layer < dense else "sparse" for layer in range(count)]


def delta_config(heads: int, head_dim: int, conv_kernel: int, **others: Any) -> DeltaConfig:
    sizes = (heads, head_dim, head_dim, heads, conv_kernel)
    return DeltaConfig(*sizes, channel_decay=True, **others)


def latent_config(
    values: dict[str, Any], rope: RopeConfig | None, gated: bool = False
) -> AttentionConfig:
    heads, rank, rotated = (
        values[key] for key in ("num_attention_heads", "kv_lora_rank", "qk_rope_head_dim")
    )
    only(values, q_lora_rank=None, attention_bias=False, num_key_value_heads=heads)
    latent = LatentConfig(rank, values["qk_nope_head_dim"], values["v_head_dim"], gated)
    scale = (latent.key_size + rotated) ** -0.5
    return AttentionConfig(heads, 1, rank + rotated, scale=scale, rope=rope, latent=latent)


def moe_config(values: dict[str, Any]) -> MoEConfig:
    only(values, moe_layer_freq=1, moe_router_activation_func="sigmoid")
    width = values["moe_intermediate_size"]
    return MoEConfig(
        num_experts=values["num_local_experts"],
        top_k=values["num_experts_per_tok"],
        intermediate_size=width,
        shared_intermediate_size=width * values.get("n_shared_experts", 1),
        num_groups=values.get("n_group", 1),
        top_groups=values.get("topk_group", 1),
        normalize=values.get("norm_topk_prob", True),
        scaling=float(values.get("routed_scaling_factor", 1.0)),
    )


def kinds_of(values: dict[str, Any], linear: dict[str, Any]) -> list[str]:
    """``layer_types`` from the numbers of layers, which begin with 1."""
    delta, full = set(linear["kda_layers"]), set(linear["full_attn_layers"])
    numbers = range(1, values["num_hidden_layers"] + 1)
    known = {**dict.fromkeys(delta, "linear_attention"), **dict.fromkeys(full, "full_attention")}
    return [known.get(number, "neither kda_layers nor full_attn_layers") for number in numbers]


def parse_config(values: dict[str, Any]) -> ModelConfig:
    values = {**values, **{OTHER_NAMES[k]: v for k, v in values.items() if k in OTHER_NAMES}}
    only(values, hidden_act="silu", mla_use_nope=True)
    linear = values.get("linear_attn_config") or values
    kinds = values.get("layer_types") or kinds_of(values, linear)
    recurrence = None
    if "linear_attention" in kinds:
        names = ("num_heads", "head_dim", "short_conv_kernel_size")
        if linear is values:
            names = ("linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim")
        recurrence = delta_config(*(linear[name] for name in names), narrow_decay=True)
    return model_config(
        values,
        blocks_of(values, kinds, KINDS),
        recurrence=recurrence,
        attention=latent_config(values, None) if "full_attention" in kinds else None,
        moe=moe_config(values) if "sparse" in mlp_kinds(values) else None,
        mlp_bias=False,
    )
