"""Bamba: Mamba2 with a few attention layers, which rotate half of each head; gated MLPs."""

from typing import Any

from mamba_eagle.layers.block import LayerNames, PreNormLayer
from mamba_eagle.model_config import ModelConfig
from mamba_eagle.models.base import CausalLM, Names
from mamba_eagle.models.parse import attention_config, mamba_config, model_config, only


class BambaLayer(PreNormLayer):
    names = LayerNames(mlp_norm="pre_ff_layernorm", mlp="feed_forward")


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
