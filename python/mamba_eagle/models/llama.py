"""Llama and Qwen3: attention and a gated MLP in each layer, no recurrence.

These serve as plain targets to compare the hybrids with, and as small draft models.
"""

from typing import Any

from mamba_eagle.layers.block import PreNormLayer
from mamba_eagle.layers.mlp import GatedMLP
from mamba_eagle.layers.rotary import make_attention
from mamba_eagle.model_config import ModelConfig
from mamba_eagle.models.base import CausalLM
from mamba_eagle.models.parse import attention_config, model_config, only


class LlamaLayer(PreNormLayer):
    def __init__(self, config: ModelConfig, layer: int) -> None:
        index = config.places_before(layer, "attention")
        size, eps = config.hidden_size, config.norm_eps
        assert config.attention is not None
        attention = make_attention(config.attention, size, index, eps)
        mlp = GatedMLP(size, config.intermediate_size, config.mlp_bias)
        super().__init__(size, eps, "self_attn", attention, mlp)


class LlamaForCausalLM(CausalLM):
    layer_class = LlamaLayer
    late_sums = True


def parse_config(values: dict[str, Any]) -> ModelConfig:
    only(values, hidden_act="silu", use_sliding_window=False)
    return model_config(
        values,
        ("attention",) * values["num_hidden_layers"],
        norm_eps=float(values.get("rms_norm_eps", 1e-6)),
        attention=attention_config(
            values, rotated=1.0, head_norm=values.get("model_type") == "qwen3"
        ),
    )
