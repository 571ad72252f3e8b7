"""Mamba2 without other layers: the models of state-spaces, and Codestral-Mamba, in their own format
and in that of transformers."""

from typing import Any

from mamba_eagle.layers.block import Block
from mamba_eagle.model_config import Mamba2Config, ModelConfig, UnsupportedModel
from mamba_eagle.models.base import CausalLM, Names
from mamba_eagle.models.parse import model_config, only, time_step_limit


class Mamba2ForCausalLM(CausalLM):
    """transformers writes ``backbone.embeddings``, state-spaces ``backbone.embedding``."""

    names = Names("backbone", "embeddings", "norm_f")
    layer_class = Block
    renamed = {"backbone.embedding.": "backbone.embeddings."}


def parse_config(values: dict[str, Any]) -> ModelConfig:
    if "ssm_cfg" in values:
        values = from_state_spaces(values)
    only(values, hidden_act="silu")
    mamba = Mamba2Config(
        num_heads=values["num_heads"],
        head_dim=values["head_dim"],
        state_size=values["state_size"],
        num_groups=values.get("n_groups", 1),
        conv_kernel=values.get("conv_kernel", 4),
        conv_bias=values.get("use_conv_bias", True),
        time_step_limit=time_step_limit(values),
        chunk_size=values.get("chunk_size", 256),
        in_bias=bool(values.get("use_bias", False)),
        out_bias=bool(values.get("use_bias", False)),
    )
    return model_config(
        values,
        ("recurrent",) * values["num_hidden_layers"],
        architecture="Mamba2ForCausalLM",
        norm_eps=float(values.get("layer_norm_epsilon", 1e-5)),
        recurrence=mamba,
    )


def from_state_spaces(values: dict[str, Any]) -> dict[str, Any]:
    """mamba_ssm's config.json under the keys of transformers.

    Raises: UnsupportedModel for Mamba1 layers, attention or MLP layers.
    """
    ssm = values["ssm_cfg"]
    if ssm.get("layer") != "Mamba2":
        raise UnsupportedModel(f"ssm_cfg.layer {ssm.get('layer')!r}: only 'Mamba2' is supported")
    for name in ("attn_layer_idx", "d_intermediate"):
        if values.get(name):
            raise UnsupportedModel(f"{name} {values[name]!r}: only Mamba2 layers are supported")
    hidden, head_dim = values["d_model"], ssm.get("headdim", 64)
    multiple = values.get("pad_vocab_size_multiple", 8)
    return {
        "model_type": "mamba2",
        "hidden_size": hidden,
        "vocab_size": -(-values["vocab_size"] // multiple) * multiple,
        "num_hidden_layers": values["n_layer"],
        "num_heads": ssm.get("expand", 2) * hidden // head_dim,
        "head_dim": head_dim,
        "state_size": ssm.get("d_state", 128),
        "n_groups": ssm.get("ngroups", 1),
        "conv_kernel": ssm.get("d_conv", 4),
        "chunk_size": ssm.get("chunk_size", 256),
        "use_conv_bias": ssm.get("conv_bias", True),
        "use_bias": ssm.get("bias", False),
        "tie_word_embeddings": values.get("tie_embeddings", True),
        "eos_token_id": values.get("eos_token_id", 0),  # that of GPT-NeoX's tokenizer
        "torch_dtype": values.get("torch_dtype", "float16"),
    }
