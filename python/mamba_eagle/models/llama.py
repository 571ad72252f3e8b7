"""Llama and Qwen3: attention and a gated MLP in each layer, no recurrence.

These serve as plain targets to compare the hybrids with, and as small draft models.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from mamba_eagle.kernels.float8.torch import Rounded
from mamba_eagle.layers.block import run_with_late_sums
from mamba_eagle.layers.context import ForwardContext
from mamba_eagle.layers.gated_mlp import GatedMLP
from mamba_eagle.layers.layer import Layer, Total
from mamba_eagle.layers.norm import RMSNorm
from mamba_eagle.layers.rotary import make_attention
from mamba_eagle.model_config import ModelConfig
from mamba_eagle.models.base import CausalLM
from mamba_eagle.models.parse import attention_config, model_config, only
from mamba_eagle.models.rope import rope_config


class LlamaLayer(Layer):
    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        index = config.places_before(layer, "attention")
        size, eps = config.hidden_size, config.norm_eps
        assert config.attention is not None
        self.input_layernorm = RMSNorm(size, eps)
        self.self_attn = make_attention(config.attention, size, index, eps)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.mlp = GatedMLP(size, config.intermediate_size, config.mlp_bias)
        self.total = Total()

    def forward(
        self, hidden: Tensor, normed: Tensor | Rounded, ctx: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        """``hidden`` with what attention makes of its norm, and what the MLP adds to that, of a
        rank a part of it. hidden may be overwritten."""
        made = self.self_attn(normed, ctx)
        normed, hidden = self.post_attention_layernorm.after(hidden, made)
        return hidden, self.mlp(normed)


class LlamaForCausalLM(CausalLM):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, [LlamaLayer(config, i) for i in range(len(config.blocks))])

    def run_layers(
        self, layers: Sequence[nn.Module], hidden: Tensor, embedded: Tensor, ctx: ForwardContext
    ) -> Tensor:
        return run_with_late_sums(
            layers,
            hidden,
            ctx,
            lambda layer: layer.input_layernorm,
            lambda layer, hidden, normed: layer(hidden, normed, ctx),
        )


def parse_config(values: dict[str, Any]) -> ModelConfig:
    only(values, hidden_act="silu", use_sliding_window=False)
    attention = attention_config(values)
    return model_config(
        values,
        ("attention",) * values["num_hidden_layers"],
        norm_eps=float(values.get("rms_norm_eps", 1e-6)),
        attention=attention_config(
            values,
            rope=rope_config(values, attention.head_dim),
            head_norm=values.get("model_type") == "qwen3",
        ),
    )
