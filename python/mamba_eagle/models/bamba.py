"""Bamba: Mamba2 with a few attention layers that turn half of each head, a gated MLP in each."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mamba_eagle.layers.context import ForwardContext
from mamba_eagle.layers.gated_mlp import GatedMLP
from mamba_eagle.layers.layer import Layer
from mamba_eagle.layers.mamba2 import Mamba2Mixer
from mamba_eagle.layers.norm import RMSNorm
from mamba_eagle.layers.rotary import make_attention
from mamba_eagle.models.base import CausalLM
from mamba_eagle.models.config import ModelConfig
from mamba_eagle.models.parse import attention_config, mamba_config, model_config, only
from mamba_eagle.models.rope import rope_config


class BambaLayer(Layer):
    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.norm_eps
        kind = config.blocks[layer]
        index = config.blocks[:layer].count(kind)
        self.input_layernorm = RMSNorm(size, eps)
        self.pre_ff_layernorm = RMSNorm(size, eps)
        self.feed_forward = GatedMLP(size, config.intermediate_size, config.mlp_bias)
        self.is_mamba = kind == "mamba"
        if self.is_mamba:
            assert config.mamba is not None
            self.mamba = Mamba2Mixer(config.mamba, size, eps, index)
        else:
            assert config.attention is not None
            self.self_attn = make_attention(config.attention, size, index, eps)

    def forward(self, hidden: Tensor, ctx: ForwardContext) -> Tensor:
        mixer = self.mamba if self.is_mamba else self.self_attn
        hidden = hidden + mixer(self.input_layernorm(hidden), ctx)
        return hidden + self.feed_forward(self.pre_ff_layernorm(hidden))


class BambaForCausalLM(CausalLM):
    norm_name = "final_layernorm"

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, [BambaLayer(config, i) for i in range(len(config.blocks))])


def parse_config(values: dict[str, Any]) -> ModelConfig:
    only(values, hidden_act="silu")
    attends = set(values.get("attn_layer_indices") or ())
    blocks = ("attention" if i in attends else "mamba" for i in range(values["num_hidden_layers"]))
    attention = attention_config(values)
    rope = rope_config(values, attention.head_dim, part=0.5)
    return model_config(
        values,
        tuple(blocks),
        mamba=mamba_config(values),
        attention=attention_config(values, rope=rope) if attends else None,
    )
