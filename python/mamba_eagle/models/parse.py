"""Readers of config.json keys that several families share."""

import json
from collections.abc import Sequence
from typing import Any

from mamba_eagle.model_config import AttentionConfig, Mamba2Config, ModelConfig, UnsupportedModel
from mamba_eagle.models.rope import longest_context, rope_config

MAMBA_NAMES = ("mamba", "linear_attention", "mamba2")


def model_config(values: dict[str, Any], blocks: tuple[str, ...], **known: Any) -> ModelConfig:
    """A ModelConfig from the keys that nearly all families use; ``known`` overrides and adds."""
    defaults: dict[str, Any] = {
        "architecture": (values.get("architectures") or ["?"])[0],
        "model_type": values.get("model_type", "?"),
        "vocab_size": values["vocab_size"],
        "hidden_size": values["hidden_size"],
        "blocks": blocks,
        "norm_eps": values.get("rms_norm_eps", 1e-5),
        "recurrence": None,
        "attention": None,
        "intermediate_size": values.get("intermediate_size") or 0,
        "max_position_embeddings": longest_context(values),
        "eos_token_ids": eos_tokens(values),
        "dtype": dtype_name(values),
        "tie_word_embeddings": bool(values.get("tie_word_embeddings", False)),
        "mlp_bias": bool(values.get("mlp_bias", False)),
        "raw": values,
    }
    return ModelConfig(**{**defaults, **known})


def mamba_config(values: dict[str, Any], **others: Any) -> Mamba2Config:
    """From Bamba's keys (mamba_n_heads, …), which Granite and Falcon-H1 use too."""
    heads = values["mamba_n_heads"]
    head_dim = values.get("mamba_d_head", "auto")
    if head_dim in ("auto", None):
        inner = values.get("mamba_d_ssm") or values["mamba_expand"] * values["hidden_size"]
        head_dim = inner // heads
    known: dict[str, Any] = {
        "num_heads": heads,
        "head_dim": head_dim,
        "state_size": values["mamba_d_state"],
        "num_groups": values.get("mamba_n_groups", 1),
        "conv_kernel": values.get("mamba_d_conv", 4),
        "conv_bias": values.get("mamba_conv_bias", True),
        "time_step_limit": time_step_limit(values),
        "chunk_size": values.get("mamba_chunk_size", 256),
        "in_bias": bool(values.get("mamba_proj_bias", False)),
        "out_bias": bool(values.get("mamba_proj_bias", False)),
    }
    return Mamba2Config(**{**known, **others})


def time_step_limit(values: dict[str, Any]) -> tuple[float, float]:
    low, high = values.get("time_step_limit") or (0.0, float("inf"))
    return number(low), number(high)


def attention_config(
    values: dict[str, Any], rotated: float | None = None, **others: Any
) -> AttentionConfig:
    """From Llama's keys. rotated: the fraction of a head that is, if config.json gives none; None:
    nothing is, whatever theta it gives."""
    heads = values["num_attention_heads"]
    known: dict[str, Any] = {
        "num_heads": heads,
        "num_kv_heads": values.get("num_key_value_heads") or heads,
        "head_dim": values.get("head_dim") or values["hidden_size"] // heads,
        "bias": bool(values.get("attention_bias", False)),
    }
    if rotated is not None:
        known["rope"] = rope_config(values, known["head_dim"], rotated)
    return AttentionConfig(**{**known, **others})


def blocks_of(
    values: dict[str, Any], kinds: Sequence[str], known: dict[str, str]
) -> tuple[str, ...]:
    """The mixer of each layer, from the names in config.json, of which ``known`` has all.

    Raises: UnsupportedModel for others, or if their number is not that of the layers.
    """
    count, unknown = values["num_hidden_layers"], sorted(set(kinds) - set(known))
    if unknown or len(kinds) != count:
        raise UnsupportedModel(
            f"layer_types has {len(kinds)} entries, {unknown or 'none'} of them unknown; give "
            f"num_hidden_layers {count} of them, known: {sorted(known)}"
        )
    return tuple(known[kind] for kind in kinds)


def only(values: dict[str, Any], **wanted: Any) -> None:
    """Raises: UnsupportedModel if config.json gives one of the keys another value."""
    for name, known in wanted.items():
        value = values.get(name)
        if value is not None and value != known:
            raise UnsupportedModel(f"{name} {value!r:.200} is not supported; known: {known!r}")


def eos_tokens(values: dict[str, Any]) -> tuple[int, ...]:
    """The model's stop tokens: config.json has one, a list, or none.

    Raises: UnsupportedModel where there is something else.
    """
    eos = values.get("eos_token_id")
    tokens = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if not all(type(token) is int for token in tokens):
        raise UnsupportedModel(
            f"eos_token_id = {json.dumps(eos)[:200]}: must be a token id or a list of token ids"
        )
    return tuple(tokens)


def dtype_name(values: dict[str, Any]) -> str:
    name = str(values.get("torch_dtype") or values.get("dtype") or "float32")
    return name.removeprefix("torch.")


def number(value: Any) -> float:
    """A number, or ``{"__float__": "Infinity"}``, which transformers writes for infinity."""
    return float(value["__float__"] if isinstance(value, dict) else value)
