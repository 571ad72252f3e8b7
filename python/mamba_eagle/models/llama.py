"""Llama and Qwen3: attention and a gated MLP in each layer, no recurrence.

These serve as plain targets to compare the hybrids with, and as small draft models.
"""

from typing import Any

from mamba_eagle.layers.block import PreNormLayer
from mamba_eagle.model_config import ModelConfig
from mamba_eagle.models.base import CausalLM
from mamba_eagle.models.parse import attention_config, model_config, only


class LlamaForCausalLM(CausalLM):
    layer_class = PreNormLayer
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
