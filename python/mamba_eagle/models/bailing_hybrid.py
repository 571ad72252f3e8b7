"""Ling 3: Kimi delta attention and gated latent attention with RoPE, and mixtures of experts."""

import re
from typing import Any

from mamba_eagle.model_config import ModelConfig
from mamba_eagle.models import kimi_linear as kimi
from mamba_eagle.models.base import Target
from mamba_eagle.models.kimi_linear import OTHER_NAMES, KimiLinearForCausalLM
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


class BailingHybridForCausalLM(KimiLinearForCausalLM):
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
        bounded, heads = values.get("kda_safe_gate", True), values["num_attention_heads"]
        bound = float(values.get("kda_lower_bound", -5.0)) if bounded else 0.0
        recurrence = kimi.delta_config(heads, head_dim, conv_kernel, lowest_decay=bound)
    theta = rotated.get("rope_theta") or values["rope_theta"]
    rope = rope_config({"rope_theta": theta}, values["qk_rope_head_dim"])  # all of that part
    return model_config(
        values,
        blocks_of(values, kinds, kimi.KINDS),
        recurrence=recurrence,
        attention=kimi.latent_config(values, rope, True) if "full_attention" in kinds else None,
        moe=kimi.moe_config(values) if "sparse" in kimi.mlp_kinds(values) else None,
        mlp_bias=False,
    )
