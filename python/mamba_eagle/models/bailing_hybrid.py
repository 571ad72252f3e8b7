"""Ling 3: Kimi delta attention and gated latent attention with RoPE, and mixtures of experts."""

import re
from typing import Any

from mamba_eagle.layers.kimi_delta import DecayForm
from mamba_eagle.model_config import ModelConfig
from mamba_eagle.models.base import Target
from mamba_eagle.models.kimi_linear import (
    KINDS,
    OTHER_NAMES,
    KimiLayer,
    KimiLinearForCausalLM,
    delta_config,
    latent_config,
    mlp_kinds,
    moe_config,
)
from mamba_eagle.models.parse import blocks_of, model_config, only
from mamba_eagle.models.rope import rope_config

# published name -> ours
NAMES = {
    "model.word_embeddings.": "model.embed_tokens.",
    ".attention.dense.": ".self_attn.o_proj.",
    ".attention.": ".self_attn.",
    ".gate.expert_bias": ".gate.e_score_correction_bias",
}
LAYER = re.compile(r"model\.layers\.(\d+)\.")


class BailingLayer(KimiLayer):
    def decay_form(self, config: ModelConfig) -> DecayForm:
        bounded = config.raw.get("kda_safe_gate", True)
        bound = float(config.raw.get("kda_lower_bound", -5.0)) if bounded else 0.0
        return DecayForm(narrow=False, bound=bound)


class BailingHybridForCausalLM(KimiLinearForCausalLM):
    layer_class = BailingLayer
    renamed = {**NAMES, **KimiLinearForCausalLM.renamed}

    def target(self, name: str) -> Target | None:
        found = LAYER.match(name)
        if found and int(found[1]) >= len(self.config.blocks):
            return None  # of multi-token prediction
        return super().target(name)


def parse_config(values: dict[str, Any]) -> ModelConfig:
    values = {**values, **{OTHER_NAMES[k]: v for k, v in values.items() if k in OTHER_NAMES}}
    only(values, hidden_act="silu", score_function="sigmoid", use_qkv_bias=False, use_bias=False)
    rotated = values.get("rope_parameters") or values.get("rope_scaling") or {}
    only(rotated, rope_type="default", type="default")
    kinds = values.get("layer_types") or [
        "linear_attention" if (layer + 1) % values["layer_group_size"] else "full_attention"
        for layer in range(values["num_hidden_layers"])
    ]
    recurrence = None
    if "linear_attention" in kinds:
        head_dim = values.get("linear_head_dim") or values["head_dim"]
        conv_kernel = values.get("short_conv_kernel_size", 4)
        recurrence = delta_config(values["num_attention_heads"], head_dim, conv_kernel)
    theta = rotated.get("rope_theta") or values["rope_theta"]
    rope = rope_config({"rope_theta": theta}, values["qk_rope_head_dim"])  # all of that part
    return model_config(
        values,
        blocks_of(values, kinds, KINDS),
        recurrence=recurrence,
        attention=latent_config(values, rope, True) if "full_attention" in kinds else None,
        moe=moe_config(values) if "sparse" in mlp_kinds(values) else None,
    )
