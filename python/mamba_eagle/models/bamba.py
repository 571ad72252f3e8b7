"""Bamba: Mamba2 with a few attention layers, which rotate half of each head; gated MLPs."""

from typing import Any

from torch import Tensor

from mamba_eagle.layers.block import MixerLayer
from mamba_eagle.layers.context import ForwardContext
from mamba_eagle.layers.mlp import GatedMLP
from mamba_eagle.layers.norm import RMSNorm
from mamba_eagle.model_config import ModelConfig
from mamba_eagle.models.base import CausalLM, Names
from mamba_eagle.models.parse import attention_config, mamba_config, model_config, only


class BambaLayer(MixerLayer):
    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        size = config.hidden_size
        self.pre_ff_layernorm = RMSNorm(size, config.norm_eps)
        self.feed_forward = GatedMLP(size, config.intermediate_size, config.mlp_bias)

    def connect(self) -> None:
        super().connect()
        self.pre_ff_layernorm.rounding = self.feed_forward.input_rounding

    def forward(self, hidden: Tensor, ctx: ForwardContext) -> Tensor:
        hidden = hidden + self.mixed(hidden, ctx)
        return hidden + self.total(self.feed_forward(self.pre_ff_layernorm(hidden)))


class BambaForCausalLM(CausalLM):
    names = Names(norm="final_layernorm")
    layer_class = BambaLayer


def parse_config(values: dict[str, Any]) -> ModelConfig:
    only(values, hidden_act="silu")
    attends = set(values.get("attn_layer_indices") or ())
    blocks = (
        "attention" if i in attends else "recurrent" for i in range(values["num_hidden_layers"])
    )
    return model_config(
        values,
        tuple(blocks),
        recurrence=mamba_config(values),
        attention=attention_config(values, rotated=0.5) if attends else None,
    )
