"""A GGUF file's keys as the config.json of the checkpoint that it was made from.

What the keys mean is taken from llama.cpp: ``conversion/`` writes them and ``src/models/`` reads
them. Sizes that a tensor shows are read from its shape, and options from whether it is there.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

from mamba_eagle.gguf_files.file import GgufFile
from mamba_eagle.gguf_files.tokenizer import end_tokens
from mamba_eagle.model_config import UnsupportedModel

# kind of a layer -> a tensor that tells it
KINDS = {
    "mamba": "ssm_in.weight",
    "attention": "attn_q.weight",
    "moe": "ffn_gate_inp.weight",
    "mlp": "ffn_up.weight",
}
ANY_LENGTH = 1 << 20  # the context length that converters write where they know none
DTYPES = {"F32": "float32", "F16": "float16"}  # of all others the dtype is bfloat16


def config_values(file: GgufFile) -> dict[str, Any]:
    """The keys of config.json that the families' ``parse_config`` read.

    Raises: UnsupportedModel naming an architecture or option that is not supported.
    """
    family = FAMILIES.get(file.architecture)
    if family is None:
        raise UnsupportedModel(
            f"{file.path} has the architecture {file.architecture!r:.200}; known in GGUF files: "
            f"{sorted(FAMILIES)}. Other families are served from safetensors"
        )
    return {**_common(file), **family(file)}


def num_layers(file: GgufFile) -> int:
    """Without the layers for drafting (MTP), which are counted with the others.

    Raises: UnsupportedModel for a number that cannot be.
    """
    count, drafting = _size(file, "block_count"), int(file.get("nextn_predict_layers", 0))
    if not 0 < count - drafting <= len(file.tensors):
        raise UnsupportedModel(
            f"{file.path}: {file.architecture}.block_count is {count}, {drafting} of them for "
            f"drafting, with {len(file.tensors)} tensors; download the file again"
        )
    return count - drafting


def per_layer(file: GgufFile, key: str) -> list[int]:
    """A number for each layer, from a list or from one number for all."""
    value, count = file.get(key, 0), num_layers(file)
    if not isinstance(value, list):
        return [int(value)] * count
    if len(value) < count:
        raise UnsupportedModel(
            f"{file.path}: {file.architecture}.{key} has {len(value)} entries for {count} layers"
        )
    return [int(one) for one in value[:count]]


def _common(file: GgufFile) -> dict[str, Any]:
    length = int(file.get("context_length", 0))
    matrices = Counter(info.dtype for info in file.tensors.values() if len(info.shape) > 1)
    return {
        "vocab_size": _shape(file, "token_embd.weight")[0],
        "hidden_size": _size(file, "embedding_length"),
        "num_hidden_layers": num_layers(file),
        "max_position_embeddings": 0 if length == ANY_LENGTH else length,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "dtype": DTYPES.get(matrices.most_common(1)[0][0], "bfloat16"),  # of most
        "eos_token_id": end_tokens(file),
    }


def _shape(file: GgufFile, name: str) -> tuple[int, ...]:
    """Raises: UnsupportedModel if there is no such tensor."""
    if name not in file.tensors:
        raise UnsupportedModel(
            f"{file.path} has no tensor {name}: it is not a whole model; take another file"
        )
    return file.tensors[name].shape


def _has(file: GgufFile, suffix: str) -> bool:
    """Whether any layer has a tensor ``blk.N.`` + suffix."""
    return any(name.startswith("blk.") and name.endswith("." + suffix) for name in file.tensors)


def _size(file: GgufFile, key: str) -> int:
    """Raises: UnsupportedModel unless it is a number above 0."""
    value = file.need(key)
    if type(value) is not int or value < 1:
        raise UnsupportedModel(
            f"{file.path}: {file.architecture}.{key} is {value!r:.200}, and must be a number above "
            "0; download the file again"
        )
    return value


def _sizes(file: GgufFile, suffix: str) -> tuple[int, ...]:
    """The shape that ``blk.N.`` + suffix has in all layers.

    Raises: UnsupportedModel if there is none, or if layers differ.
    """
    names = (f"blk.{layer}.{suffix}" for layer in range(num_layers(file)))
    found = {file.tensors[name].shape for name in names if name in file.tensors}
    if len(found) != 1:
        raise UnsupportedModel(
            f"{file.path}: {suffix} has the shapes {sorted(found)[:5]} in its layers; known is one "
            "for all"
        )
    return found.pop()


def _eps(file: GgufFile) -> float:
    """llama.cpp's order: Nemotron-H's converter writes the second alone."""
    rms = file.get("attention.layer_norm_rms_epsilon")
    return float(file.need("attention.layer_norm_epsilon") if rms is None else rms)


def _ssm(file: GgufFile, names: str) -> dict[str, Any]:
    """Of the Mamba2 layers: heads, their channels and state, groups, taps of the convolution, and
    whether it and the first projection have a bias; under the family's names of these."""
    heads = _size(file, "ssm.time_step_rank")
    values = (
        heads,
        _size(file, "ssm.inner_size") // heads,
        file.need("ssm.state_size"),
        file.get("ssm.group_count", 1),
        file.need("ssm.conv_kernel"),
        _has(file, "ssm_conv1d.bias"),
        _has(file, "ssm_in.bias"),
    )
    return dict(zip(names.split(), values))


def _mamba2(file: GgufFile) -> dict[str, Any]:
    names = "num_heads head_dim state_size n_groups conv_kernel use_conv_bias use_bias"
    return {
        "architectures": ["Mamba2ForCausalLM"],
        "model_type": "mamba2",
        **_ssm(file, names),
        "layer_norm_epsilon": _eps(file),
    }


def _mixers(file: GgufFile) -> dict[str, Any]:
    """The keys that Granite and Falcon-H1 share with Bamba."""
    names = "n_heads d_head d_state n_groups d_conv conv_bias proj_bias"
    return {
        **{f"mamba_{name}": value for name, value in _ssm(file, names).items()},
        "rms_norm_eps": _eps(file),
        **_attention(file),
    }


def _attention(file: GgufFile) -> dict[str, Any]:
    kv_heads = {count for count in per_layer(file, "attention.head_count_kv") if count}
    heads = {count for count in per_layer(file, "attention.head_count") if count}
    if len(kv_heads) > 1 or len(heads) > 1:
        raise UnsupportedModel(
            f"{file.path}: attention layers with different numbers of heads are not supported"
        )
    if not heads and _has(file, "attn_q.weight"):
        raise UnsupportedModel(f"{file.path}: {file.architecture}.attention.head_count is 0")
    count = heads.pop() if heads else 1
    head_dim = file.get("attention.key_length", 0) or _size(file, "embedding_length") // count
    if head_dim < 1:
        raise UnsupportedModel(f"{file.path}: {count} attention heads are more than its channels")
    return {
        "num_attention_heads": count,
        "num_key_value_heads": kv_heads.pop() if kv_heads else count,
        "head_dim": head_dim,
        "attention_bias": _has(file, "attn_q.bias"),
    }


def _rope(file: GgufFile, head_dim: int) -> dict[str, Any]:
    """Raises: UnsupportedModel unless whole heads are rotated, at every position alike; of Qwen's a
    part."""
    scaling = file.get("rope.scaling.type", "none")
    part = int(file.get("rope.dimension_count", head_dim))
    is_whole = part == head_dim or file.architecture in QWEN
    if scaling != "none" or not is_whole or _has(file, "rope_freqs.weight"):
        raise UnsupportedModel(
            f"{file.path}: RoPE with rope.scaling.type {scaling!r:.200}, on {part} of {head_dim} "
            "channels, is not supported in GGUF files; serve the model from safetensors"
        )
    theta = float(file.get("rope.freq_base", 10000.0))
    return {"rope_theta": theta, "partial_rotary_factor": part / head_dim}


def _granite(file: GgufFile) -> dict[str, Any]:
    values, kinds = _mixers(file), _kinds(file)
    head_dim = values["head_dim"]
    # a switch for RoPE in this architecture, on if it is not there
    rotates = bool(file.get("rope.scaling.finetuned", True)) and "attention" in kinds
    has_experts = _has(file, "ffn_gate_inp.weight")
    experts = _sizes(file, "ffn_up_exps.weight") if has_experts else (0, 0)
    shared = "ffn_up_shexp.weight" if has_experts else "ffn_up.weight"
    return {
        **values,
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "layer_types": kinds,
        "position_embedding_type": "rope" if rotates else "nope",
        **(_rope(file, head_dim) if rotates else {}),
        "num_local_experts": experts[0],
        "num_experts_per_tok": file.get("expert_used_count", 0),
        "intermediate_size": experts[1],
        "shared_intermediate_size": _sizes(file, shared)[0],
        "embedding_multiplier": _factor(file, "embedding_scale"),
        "residual_multiplier": _factor(file, "residual_scale"),
        "logits_scaling": _factor(file, "logit_scale"),
        "attention_multiplier": _factor(file, "attention.scale", head_dim**-0.5),
    }


def _factor(file: GgufFile, key: str, default: float = 1.0) -> float:
    """A multiplier; 0 stands for none."""
    return float(file.get(key, 0.0)) or default


def _falcon_h1(file: GgufFile) -> dict[str, Any]:
    """All multipliers are in the weights."""
    values = _mixers(file)
    return {
        **values,
        **_rope(file, values["head_dim"]),
        "architectures": ["FalconH1ForCausalLM"],
        "model_type": "falcon_h1",
        "hides_factors": True,
        "intermediate_size": _sizes(file, "ffn_up.weight")[0],
        "mamba_rms_norm": _has(file, "ssm_norm.weight"),
        "mamba_norm_before_gate": False,  # which is what llama.cpp computes
        "projectors_bias": _has(file, "ssm_out.bias"),
        "mlp_bias": _has(file, "ffn_up.bias"),
    }


def _nemotron_h(file: GgufFile) -> dict[str, Any]:
    kinds = _kinds(file)
    names = "mamba_num_heads mamba_head_dim ssm_state_size n_groups conv_kernel"
    return {
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        "layers_block_type": kinds,
        **_ssm(file, f"{names} use_conv_bias use_bias"),
        "mlp_bias": _has(file, "ffn_up.bias"),
        "intermediate_size": _sizes(file, "ffn_up.weight")[0] if "mlp" in kinds else 0,
        "layer_norm_epsilon": _eps(file),
        **_attention(file),
        **(_experts(file) if "moe" in kinds else {}),
    }


def _kinds(file: GgufFile) -> list[str]:
    """What each layer is, by the tensors that it has. Keys are less reliable: with transformers
    of today a Nemotron-H without experts is converted with the keys of one with.

    Raises: UnsupportedModel for a layer that has none of these.
    """
    kinds = []
    for layer in range(num_layers(file)):
        own = (kind for kind, name in KINDS.items() if f"blk.{layer}.{name}" in file.tensors)
        kind = next(own, None)
        if kind is None:
            raise UnsupportedModel(
                f"{file.path}: layer {layer} has none of {', '.join(KINDS.values())}; the file is "
                "not whole, or of a newer form of this architecture"
            )
        kinds.append(kind)
    return kinds


def _experts(file: GgufFile) -> dict[str, Any]:
    groups, top = int(file.get("expert_group_count", 1)), file.get("expert_group_used_count")
    if groups > 1 and top is None:
        raise UnsupportedModel(
            f"{file.path}: experts in {groups} groups, and the file does not say how many of them "
            "a token uses; serve the model from safetensors"
        )
    return {
        "n_routed_experts": file.need("expert_count"),
        "num_experts_per_tok": file.need("expert_used_count"),
        "n_shared_experts": file.get("expert_shared_count", 1),
        "moe_intermediate_size": _sizes(file, "ffn_up_exps.weight")[1],
        "moe_shared_expert_intermediate_size": _sizes(file, "ffn_up_shexp.weight")[0],
        "moe_latent_size": int(file.get("moe_latent_size", 0)),
        "n_group": groups,
        "topk_group": int(top or 1),
        "norm_topk_prob": bool(file.get("expert_weights_norm", False)),
        "routed_scaling_factor": _factor(file, "expert_weights_scale"),
    }


def _qwen(file: GgufFile) -> dict[str, Any]:
    attention, heads = _attention(file), _size(file, "ssm.time_step_rank")
    layers = [f"blk.{layer}." for layer in range(num_layers(file))]
    recurrent = [f"{layer}ssm_conv1d.weight" in file.tensors for layer in layers]
    dense = [i for i, layer in enumerate(layers) if f"{layer}ffn_up.weight" in file.tensors]
    return {
        **attention,
        **_rope(file, attention["head_dim"]),
        "architectures": [QWEN[file.architecture]],
        "model_type": file.architecture,
        "layer_types": ["linear_attention" if one else "full_attention" for one in recurrent],
        "linear_num_value_heads": heads,
        "linear_value_head_dim": _size(file, "ssm.inner_size") // heads,
        "linear_key_head_dim": _size(file, "ssm.state_size"),
        "linear_num_key_heads": _size(file, "ssm.group_count"),
        "linear_conv_kernel_dim": _size(file, "ssm.conv_kernel"),
        "rms_norm_eps": _eps(file),
        "intermediate_size": _sizes(file, "ffn_up.weight")[0] if dense else 0,
        "mlp_only_layers": dense,
        **(_qwen_experts(file) if len(dense) < len(layers) else {}),
    }


def _qwen_experts(file: GgufFile) -> dict[str, Any]:
    count, width, _ = _sizes(file, "ffn_up_exps.weight")
    return {
        "num_experts": count,
        "num_experts_per_tok": _size(file, "expert_used_count"),
        "moe_intermediate_size": width,
        "shared_expert_intermediate_size": _sizes(file, "ffn_up_shexp.weight")[0],
    }


# general.architecture -> the class that config.json names
QWEN = {
    "qwen3next": "Qwen3NextForCausalLM",
    "qwen35": "Qwen3_5ForCausalLM",
    "qwen35moe": "Qwen3_5MoeForCausalLM",
}
# general.architecture -> the rest of config.json
FAMILIES: dict[str, Callable[[GgufFile], dict[str, Any]]] = {
    "mamba2": _mamba2,
    "granitehybrid": _granite,
    "falcon-h1": _falcon_h1,
    "nemotron_h": _nemotron_h,
    "nemotron_h_moe": _nemotron_h,
    **dict.fromkeys(QWEN, _qwen),
}
