"""LFM2: gated short convolutions with a few attention layers; gated MLPs, or experts."""

from typing import Any

from mamba_eagle.layers.block import LayerNames, PreNormLayer
from mamba_eagle.layers.moe import SigmoidMoE
from mamba_eagle.layers.short_conv import ShortConv
from mamba_eagle.model_config import ModelConfig, MoEConfig, ShortConvConfig
from mamba_eagle.models.base import CausalLM, Names, gated_expert_place
from mamba_eagle.models.parse import attention_config, blocks_of, model_config, only

# published name -> ours
NAMES = {
    ".self_attn.q_layernorm.": ".self_attn.q_norm.",
    ".self_attn.k_layernorm.": ".self_attn.k_norm.",
    ".self_attn.out_proj.": ".self_attn.o_proj.",
    ".feed_forward.expert_bias": ".feed_forward.gate.e_score_correction_bias",
    ".feed_forward.w1.": ".feed_forward.gate_proj.",
    ".feed_forward.w3.": ".feed_forward.up_proj.",
    ".feed_forward.w2.": ".feed_forward.down_proj.",
}
KINDS = {"full_attention": "attention", "conv": "recurrent"}


class Lfm2Layer(PreNormLayer):
    names = LayerNames("operator_norm", "ffn_norm", "feed_forward", recurrent="conv")
    recurrent, experts = ShortConv, SigmoidMoE

    def is_sparse(self, config: ModelConfig, layer: int) -> bool:
        return layer >= config.raw.get("num_dense_layers", 2)


class Lfm2ForCausalLM(CausalLM):
    names = Names(norm="embedding_norm")
    layer_class = Lfm2Layer
    renamed = NAMES
    place = staticmethod(gated_expert_place)


def mlp_width(values: dict[str, Any]) -> int:
    """Channels of an MLP: as stated, or two thirds of it, in multiples."""
    width = values.get("block_ff_dim") or values["intermediate_size"]
    if values["model_type"] == "lfm2_moe" or not values.get("block_auto_adjust_ff_dim", True):
        return int(width)
    scaled = int(values.get("block_ffn_dim_multiplier", 1.0) * int(2 * width / 3))
    unit = values.get("block_multiple_of", 256)
    return -(-scaled // unit) * int(unit)


def parse_config(values: dict[str, Any]) -> ModelConfig:
    only(values, hidden_act="silu", use_expert_bias=True)
    kinds = values.get("layer_types") or [
        "full_attention" if layer in values["full_attn_idxs"] else "conv"
        for layer in range(values["num_hidden_layers"])
    ]
    moe = None
    if values["model_type"] == "lfm2_moe":
        moe = MoEConfig(
            num_experts=values["num_experts"],
            top_k=values["num_experts_per_tok"],
            intermediate_size=values["moe_intermediate_size"],
            normalize=values.get("norm_topk_prob", True),
            scaling=float(values.get("routed_scaling_factor", 1.0)),
        )
    rotating = {"rope_theta": 1e6, **values}
    recurrence = None
    if "conv" in kinds:
        size, bias = values["hidden_size"], bool(values.get("conv_bias", False))
        recurrence = ShortConvConfig(size, values.get("conv_L_cache", 3), bias)
    return model_config(
        values,
        blocks_of(values, kinds, KINDS),
        recurrence=recurrence,
        norm_eps=float(values.get("norm_eps", 1e-5)),
        attention=attention_config(rotating, rotated=1.0, bias=False, head_norm=True),
        moe=moe,
        intermediate_size=mlp_width(values),
        mlp_bias=False,
        tie_word_embeddings=values.get("tie_embedding", values.get("tie_word_embeddings", True)),
    )
