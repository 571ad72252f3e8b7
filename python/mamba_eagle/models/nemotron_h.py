"""Nemotron-H: Mamba2, attention without position encoding, relu² MLP and expert layers, mixed.

For Nemotron-H, Nemotron Nano v2, Nemotron 3 Nano and Super (whose experts have a latent width), and
Nemotron 3.5 Lightning. The multi-token-prediction layers that come with some of them belong to a
drafter (mtp.py).
"""

import re
from typing import Any

from mamba_eagle.layers.block import Block
from mamba_eagle.model_config import Mamba2Config, ModelConfig, MoEConfig, UnsupportedModel
from mamba_eagle.models.base import CausalLM, Names, Target
from mamba_eagle.models.parse import attention_config, model_config, only, time_step_limit

BLOCK_OF_LETTER = {"M": "recurrent", "*": "attention", "-": "mlp", "E": "moe"}
BLOCK_OF_NAME = {
    "mamba": "recurrent",
    "linear_attention": "recurrent",
    "attention": "attention",
    "full_attention": "attention",
    "mlp": "mlp",
    "moe": "moe",
}
# older names, which win where a config.json has both, as in transformers
OLDER_NAMES = {
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_conv_bias": "use_conv_bias",
    "mamba_chunk_size": "chunk_size",
    "mamba_dt_limit": "time_step_limit",
}
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(up_proj|down_proj)\.weight")


def expert_place(name: str) -> Target | None:
    """Experts are published one by one; ours are stacked."""
    found = EXPERT.fullmatch(name)
    return Target(f"{found[1]}.{found[3]}", int(found[2])) if found else None


class NemotronHForCausalLM(CausalLM):
    """Parameters have their published names (``backbone.layers.N.mixer…``)."""

    names = Names("backbone", "embeddings", "norm_f")
    layer_class = Block
    skipped = ("mtp.",)
    place = staticmethod(expert_place)
    late_sums = True


def parse_config(values: dict[str, Any]) -> ModelConfig:
    """Layers as a pattern or a list; ``num_hidden_layers`` is not read, as in transformers. Also
    reads the EAGLE heads of this project.

    Raises: UnsupportedModel, KeyError naming what config.json lacks.
    """
    values = {**values, **{OLDER_NAMES[k]: v for k, v in values.items() if k in OLDER_NAMES}}
    blocks = blocks_of(values)
    only(values, mamba_hidden_act="silu", mlp_hidden_act="relu2")
    if "attention" in blocks and values.get("sliding_window"):
        raise UnsupportedModel(
            f"sliding_window {values['sliding_window']!r:.200} is not supported: attention layers "
            "of this family see everything before a token"
        )
    if "moe" in blocks:
        only(values, n_shared_experts=1)
    mamba = attention = moe = None
    if "recurrent" in blocks:
        mamba = Mamba2Config(
            num_heads=values["mamba_num_heads"],
            head_dim=values["mamba_head_dim"],
            state_size=values["ssm_state_size"],
            num_groups=values["n_groups"],
            conv_kernel=values.get("conv_kernel", 4),
            conv_bias=values.get("use_conv_bias", True),
            time_step_limit=time_step_limit(values),
            chunk_size=values.get("chunk_size", 128),
            in_bias=bool(values.get("use_bias", False)),
            out_bias=bool(values.get("use_bias", False)),
        )
    if "attention" in blocks:
        head_dim = values.get("head_dim") or values.get("attention_head_dim")
        attention = attention_config({**values, "head_dim": head_dim}, bias=False)
    if "moe" in blocks:
        moe = MoEConfig(
            num_experts=values["n_routed_experts"],
            top_k=values["num_experts_per_tok"],
            intermediate_size=values["moe_intermediate_size"],
            shared_intermediate_size=values["moe_shared_expert_intermediate_size"],
            latent_size=values.get("moe_latent_size") or 0,
            num_groups=values.get("n_group") or 1,
            top_groups=values.get("topk_group") or 1,
            normalize=values.get("norm_topk_prob", True),
            scaling=float(values.get("routed_scaling_factor", 1.0)),
        )
    return model_config(
        values,
        blocks,
        norm_eps=float(values.get("layer_norm_epsilon", 1e-5)),
        recurrence=mamba,
        attention=attention,
        moe=moe,
        max_position_embeddings=int(values.get("max_position_embeddings", 4096)),
    )


def blocks_of(values: dict[str, Any]) -> tuple[str, ...]:
    names = values.get("layers_block_type") or values.get("layer_types")
    known = BLOCK_OF_NAME if names else BLOCK_OF_LETTER
    blocks = names or values.get("hybrid_override_pattern")
    if not blocks:
        raise UnsupportedModel(
            "config.json has neither layers_block_type nor hybrid_override_pattern, "
            "so the order of Mamba2, attention and MLP layers is unknown"
        )
    unknown = sorted({block for block in blocks if block not in known})
    if unknown:
        raise UnsupportedModel(
            f"layer kinds {unknown} are not supported; known: {sorted(BLOCK_OF_NAME)} "
            f"and the letters {sorted(BLOCK_OF_LETTER)}"
        )
    return tuple(known[block] for block in blocks)
