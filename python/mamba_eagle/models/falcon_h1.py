"""Falcon-H1: attention and Mamba2 side by side in each layer, and MuP multipliers.

Most multipliers are constants beside a matrix. They are multiplied into the weights on loading, in
float32, before the weights are rounded to the model's dtype. Only those of the keys (as the scale
of the scores), of the embedding and of the logits are applied at run time.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mamba_eagle.layers.attention import Attention
from mamba_eagle.layers.context import ForwardContext
from mamba_eagle.layers.layer import Layer, Total
from mamba_eagle.layers.mamba2 import Mamba2Mixer
from mamba_eagle.layers.mlp import GatedMLP
from mamba_eagle.layers.norm import RMSNorm
from mamba_eagle.model_config import Mamba2Config, ModelConfig
from mamba_eagle.models.base import CausalLM, Names, Target
from mamba_eagle.models.parse import attention_config, mamba_config, model_config, only


class FalconH1Layer(Layer):
    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        index = config.places_before(layer, "recurrent")  # among the attention layers too
        size, eps = config.hidden_size, config.norm_eps
        assert isinstance(config.recurrence, Mamba2Config) and config.attention is not None
        self.input_layernorm = RMSNorm(size, eps)
        self.mamba = Mamba2Mixer(config.recurrence, size, index, eps)
        self.self_attn = Attention(config.attention, size, index, eps)
        self.pre_ff_layernorm = RMSNorm(size, eps)
        self.feed_forward = GatedMLP(size, config.intermediate_size, config.mlp_bias)
        self.total = Total()

    def forward(self, hidden: Tensor, ctx: ForwardContext) -> Tensor:
        normed = self.input_layernorm(hidden)
        hidden = hidden + self.total(self.mamba(normed, ctx) + self.self_attn(normed, ctx))
        return hidden + self.total(self.feed_forward(self.pre_ff_layernorm(hidden)))


class FalconH1ForCausalLM(CausalLM):
    names = Names(norm="final_layernorm")
    layer_class = FalconH1Layer

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.embedding_scale = float(config.raw.get("embedding_multiplier", 1.0))
        self.logits_scale = float(config.raw.get("lm_head_multiplier", 1.0))
        self.multipliers = multipliers(config)

    def target(self, name: str) -> Target | None:
        place = super().target(name)
        for suffix, scale in self.multipliers.items():
            if place is not None and name.endswith(suffix):
                place = Target(place.name, place.index, scale)
        return place


def multipliers(config: ModelConfig) -> dict[str, float | Tensor]:
    """Suffix of a tensor's name -> its factor: float32 on the CPU, where files are read, whatever
    the model's dtype and device."""
    raw, mamba = config.raw, config.recurrence
    assert isinstance(mamba, Mamba2Config)
    gate, down = raw.get("mlp_multipliers") or (1.0, 1.0)
    attention_in = raw.get("attention_in_multiplier", 1.0)
    attention_out = raw.get("attention_out_multiplier", 1.0)
    ssm_in, ssm_out = raw.get("ssm_in_multiplier", 1.0), raw.get("ssm_out_multiplier", 1.0)
    bc = mamba.num_groups * mamba.state_size
    sizes = (mamba.inner_size, mamba.inner_size, bc, bc, mamba.num_heads)
    parts = raw.get("ssm_multipliers") or [1.0] * 5  # for gate, x, B, C, dt
    each = [part for part, size in zip(parts, sizes, strict=True) for _ in range(size)]
    projected = torch.tensor(each, dtype=torch.float32, device="cpu")
    return {
        ".mamba.in_proj.weight": ssm_in * projected[:, None],
        ".mamba.in_proj.bias": projected,
        ".mamba.out_proj.weight": ssm_out,
        ".mamba.out_proj.bias": ssm_out,
        ".q_proj.weight": attention_in,
        ".k_proj.weight": attention_in,
        ".v_proj.weight": attention_in,
        ".o_proj.weight": attention_out,
        ".o_proj.bias": attention_out,
        ".gate_proj.weight": gate,
        ".gate_proj.bias": gate,
        ".down_proj.weight": down,
        ".down_proj.bias": down,
    }


def parse_config(values: dict[str, Any]) -> ModelConfig:
    only(values, hidden_act="silu")
    norm = "gate_only"
    if values.get("mamba_rms_norm"):
        norm = "norm_first" if values.get("mamba_norm_before_gate", True) else "gate_first"
    attention = attention_config(values, rotated=1.0)
    scale = attention.head_dim**-0.5 * float(values.get("key_multiplier", 1.0))
    mamba = mamba_config(values, norm=norm, out_bias=bool(values.get("projectors_bias", False)))
    return model_config(
        values,
        ("hybrid",) * values["num_hidden_layers"],
        recurrence=mamba,
        attention=replace(attention, scale=scale),
    )
