"""A checkpoint's config.json and the files that complete it, unparsed but checked."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from mamba_eagle.hub import is_gguf
from mamba_eagle.model_config import UnsupportedModel
from mamba_eagle.models.parse import eos_tokens


def read_values(folder: str | Path) -> dict[str, Any]:
    """config.json with the stop tokens of generation_config.json and, if it describes no
    quantization itself, that of ModelOpt's hf_quant_config.json; or what a GGUF file has in its
    place.

    Raises: FileNotFoundError if there is no config.json; UnsupportedModel for broken files.
    """
    folder = Path(folder)
    if is_gguf(folder):
        # Imported here: few checkpoints need its packages.
        from mamba_eagle.gguf_files.config import config_values
        from mamba_eagle.gguf_files.file import open_gguf

        return config_values(open_gguf(folder))
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist: give the folder of a checkpoint")
    values = read_json(path)
    generation = folder / "generation_config.json"
    if generation.is_file():
        generation_values = read_json(generation)
        if generation_values.get("eos_token_id") is not None:
            try:
                values["eos_token_id"] = list(eos_tokens(generation_values))
            except UnsupportedModel as error:
                raise UnsupportedModel(f"{generation}: {error}") from None
    modelopt = folder / "hf_quant_config.json"
    if modelopt.is_file() and not values.get("quantization_config"):
        values["quantization_config"] = {"quant_method": "modelopt", **read_json(modelopt)}
    return values


def read_json(path: Path) -> dict[str, Any]:
    """Raises: UnsupportedModel if the file cannot be read, or holds anything but a JSON object."""
    try:
        values = json.loads(path.read_bytes())  # in UTF-8, whatever the locale
    except OSError as error:
        raise UnsupportedModel(f"{path} cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise UnsupportedModel(f"{path} is not valid JSON: {error}; download it again") from None
    if not isinstance(values, dict):
        raise UnsupportedModel(
            f"{path} holds {str(values)[:200]} instead of a JSON object; download it again"
        )
    return values


# ── what values may be, by their keys and whatever the family ──

MAX_SIZE = 2**31 - 1
MAX_NUMBER = 1e15
SHOWN = 200  # characters of a value


def _is_whole(value: Any, least: int) -> bool:
    return type(value) is int and least <= value <= MAX_SIZE


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= MAX_NUMBER  # not if it is NaN


def _is_limit(value: Any) -> bool:
    """A number, infinity too, in one of the two ways in which it is written."""
    text = value.get("__float__") if isinstance(value, dict) else None
    return type(value) in (int, float) or text in ("Infinity", "-Infinity", "inf", "-inf")


def _all(value: Any, holds: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and all(holds(one) for one in value)


class Kind(NamedTuple):
    what: str  # for messages: it must be this
    holds: Callable[[Any], bool]
    keys: str


KINDS = (
    Kind(
        f"a whole number from 1 to {MAX_SIZE}",
        lambda value: _is_whole(value, 1),
        """vocab_size hidden_size num_hidden_layers num_attention_heads num_key_value_heads
        mamba_n_heads mamba_d_state mamba_n_groups mamba_d_conv mamba_chunk_size mamba_d_ssm
        mamba_expand mamba_num_heads mamba_head_dim ssm_state_size n_groups conv_kernel chunk_size
        num_heads state_size n_mamba_heads mamba_ngroups num_mem_blocks d_model n_layer headdim
        expand d_state ngroups d_conv pad_vocab_size_multiple draft_vocab_size target_hidden_size
        original_max_position_embeddings kv_lora_rank qk_rope_head_dim qk_nope_head_dim v_head_dim
        linear_head_dim linear_num_heads linear_conv_kernel_dim short_conv_kernel_size
        layer_group_size conv_L_cache block_ff_dim block_multiple_of""",
    ),
    Kind(
        f"a whole number from 0 to {MAX_SIZE}",
        lambda value: _is_whole(value, 0),
        """head_dim attention_head_dim intermediate_size shared_intermediate_size
        max_position_embeddings num_local_experts n_routed_experts num_experts_per_tok
        moe_intermediate_size moe_shared_expert_intermediate_size moe_latent_size n_group topk_group
        num_experts num_experts_per_token num_expert_group num_shared_experts n_shared_experts
        first_k_dense_replace num_dense_layers model_max_length
        num_nextn_predict_layers adapter_rank max_window_layers dspark_draft_topk""",
    ),
    Kind(
        "a whole number from -1 on", lambda value: _is_whole(value, -1), "group_size q_group_size"
    ),
    Kind(
        "two whole numbers from 1 on",
        lambda value: _all(value, lambda one: _is_whole(one, 1)) and len(value) == 2,
        "weight_block_size",
    ),
    Kind(
        "a whole number from 1 on, or 'auto'",
        lambda value: value == "auto" or _is_whole(value, 1),
        "mamba_d_head",
    ),
    Kind(
        "a number from 0 to 1",
        lambda value: _is_number(value) and 0 <= value <= 1,
        "rms_norm_eps layer_norm_epsilon norm_epsilon norm_eps partial_rotary_factor",
    ),
    Kind(
        "a positive number",
        lambda value: _is_number(value) and value > 0,
        """rope_theta factor low_freq_factor high_freq_factor attention_factor beta_fast beta_slow
        logits_scaling block_ffn_dim_multiplier""",
    ),
    Kind(
        "a number",
        _is_number,
        """mscale mscale_all_dim attention_multiplier embedding_multiplier residual_multiplier
        key_multiplier lm_head_multiplier attention_in_multiplier attention_out_multiplier
        ssm_in_multiplier ssm_out_multiplier routed_scaling_factor input_embedding_scale
        logit_scale kda_lower_bound""",
    ),
    Kind(
        "true or false",
        lambda value: type(value) is bool,
        """tie_word_embeddings tie_embeddings attention_bias mlp_bias use_bias use_conv_bias
        mamba_conv_bias mamba_proj_bias projectors_bias add_bias_linear conv_bias mamba_rms_norm
        mamba_norm_before_gate norm_topk_prob use_mem_rope use_long_context truncate
        mtp_use_repeated_layer moe_renormalize use_expert_bias tie_embedding
        block_auto_adjust_ff_dim kda_safe_gate use_sliding_window use_swa""",
    ),
    Kind(
        "a list of numbers",
        lambda value: _all(value, _is_number),
        "mlp_multipliers ssm_multipliers",
    ),
    Kind(
        "two numbers", lambda value: _all(value, _is_limit) and len(value) == 2, "time_step_limit"
    ),
    Kind(
        "a list of layer numbers",
        lambda value: _all(value, lambda one: _is_whole(one, 0)),
        "attn_layer_indices full_attn_idxs full_attn_layers kda_layers",
    ),
    Kind(
        "a list of texts",
        lambda value: _all(value, lambda one: isinstance(one, str)),
        "architectures layers_block_type layer_types mtp_layers_block_type mlp_layer_types",
    ),
    Kind(
        "a text",
        lambda value: isinstance(value, str),
        """model_type hidden_act mamba_hidden_act mlp_hidden_act torch_dtype dtype rope_type type
        hybrid_override_pattern mtp_hybrid_override_pattern position_embedding_type""",
    ),
    Kind(
        "an object",
        lambda value: isinstance(value, dict),
        """rope_parameters rope_scaling ssm_cfg eagle_config dflash_config transformer_layer_config
        linear_attn_config
        quantization_config compression_config""",
    ),
)
KIND_OF = {key: kind for kind in KINDS for key in kind.keys.split()}


def checked(values: dict[str, Any]) -> dict[str, Any]:
    """config.json without its nulls, which mean that a key is not given.

    Raises: UnsupportedModel listing every key whose value cannot be.
    """
    wrong: list[str] = []
    given = _given(values, "", wrong)
    if wrong:
        raise UnsupportedModel("; ".join(wrong))
    return given


def _given(values: dict[str, Any], path: str, wrong: list[str]) -> dict[str, Any]:
    given = {key: value for key, value in values.items() if value is not None}
    for key, value in given.items():
        kind = KIND_OF.get(key)
        if kind is None:
            continue
        if not kind.holds(value):
            shown = json.dumps(value)[:SHOWN]
            wrong.append(f"{path}{key} = {shown}: must be {kind.what}")
        elif isinstance(value, dict):
            given[key] = _given(value, f"{path}{key}.", wrong)
    return given
