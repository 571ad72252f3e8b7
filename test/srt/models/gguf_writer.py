"""GGUF files as llama.cpp's converter writes them, from the folder of a small checkpoint.

benchmark/check_gguf.py holds these files to the converter's own, key by key and tensor by tensor.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, quants
from numpy.typing import NDArray
from peer_models import FALCON, GRANITE, MAMBA2, NEMOTRON, QWEN_NEXT
from peer_models import PEERS as ALL
from safetensors.numpy import load_file

Array = NDArray[Any]

# what the converter takes; where it takes less than transformers, that is left out
NEMOTRON = {**NEMOTRON, "mamba_head_dim": 16}
PEERS: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba2": ("Mamba2", {**MAMBA2, "tie_word_embeddings": True}),
    "mamba2-groups": ("Mamba2", {**MAMBA2, "n_groups": 4, "use_conv_bias": False}),
    "granite": ("GraniteMoeHybrid", {**GRANITE, "tie_word_embeddings": True}),
    "granite-dense": (
        "GraniteMoeHybrid",
        {**GRANITE, "num_local_experts": 0, "mamba_n_groups": 2, "intermediate_size": 40},
    ),
    "falcon-h1": ("FalconH1", {**FALCON, "head_dim": 16, "rope_theta": 500.0}),
    "falcon-h1-norm": (
        "FalconH1",
        {
            **FALCON,
            "head_dim": 16,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "mamba_n_groups": 2,
        },
    ),
    "nemotron-h": ("NemotronH", NEMOTRON),
    "nemotron-3-nano": (
        "NemotronH",
        {**NEMOTRON, "hybrid_override_pattern": "ME*E", "routed_scaling_factor": 2.5},
    ),
    "nemotron-3-latent": (
        "NemotronH",
        {**NEMOTRON, "hybrid_override_pattern": "ME*EM", "moe_latent_size": 36},
    ),
    "qwen3-next": ("Qwen3Next", QWEN_NEXT),
    **{name: ALL[name] for name in ("qwen3.5", "qwen3.5-moe")},
}
LETTERS = {"mamba": "M", "attention": "*", "mlp": "-", "moe": "E"}
KINDS = {"linear_attention": "mamba", "full_attention": "attention"}
OF_EXPERTS = ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size")


def as_published(folder: Path) -> None:
    """config.json with layers named as in published checkpoints, which the converter reads, in
    place of transformers' names."""
    path = folder / "config.json"
    values = json.loads(path.read_text())
    for key in ("layer_types", "layers_block_type"):
        if key in values and not values["model_type"].startswith("qwen"):
            values[key] = [KINDS.get(kind, kind) for kind in values[key]]
    if values["model_type"] == "nemotron_h" and "moe" not in values["layers_block_type"]:
        kinds = values.pop("layers_block_type")
        values["hybrid_override_pattern"] = "".join(LETTERS[kind] for kind in kinds)
        values["num_hidden_layers"] = len(kinds)
        for key in OF_EXPERTS:
            del values[key]
    path.write_text(json.dumps(values))


def write(
    folder: Path, out: Path, dtype: str = "F32", vocabulary: dict[str, Any] | None = None
) -> None:
    """dtype: of matrices; vectors, and what has rows that no block fits, are in F32 as there.
    vocabulary: keys that begin with ``tokenizer.``."""
    values = json.loads((folder / "config.json").read_text())
    family = FAMILIES[values["model_type"]](values)
    writer = GGUFWriter(out, family.architecture)
    for key, value in family.keys().items():
        add(writer, f"{family.architecture}.{key}", value)
    for key, value in (vocabulary or {}).items():
        add(writer, key, value)
    for name, value in family.tensors(load_file(folder / "model.safetensors")):
        kind = GGMLQuantizationType[dtype if takes(dtype, name, value) else "F32"]
        writer.add_tensor(name, packed(value, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def takes(dtype: str, name: str, value: Array) -> bool:
    """Whether a tensor is stored in this type, by llama.cpp's rules."""
    is_small = name.endswith(("ssm_a", "ssm_d")) or "ssm_conv1d" in name or "norm" in name
    if value.ndim < 2 or is_small:
        return False
    block, _ = quants.GGML_QUANT_SIZES[GGMLQuantizationType[dtype]]
    return "ffn_gate_inp" not in name and value.shape[-1] % block == 0


def packed(value: Array, kind: GGMLQuantizationType) -> Array:
    if kind == GGMLQuantizationType.Q4_K:
        return q4_k(value)
    return quants.quantize(np.ascontiguousarray(value, np.float32), kind)


def rounded(value: Array, dtype: str) -> Array:
    """What is left of a matrix in this type."""
    kind = GGMLQuantizationType[dtype]
    return quants.dequantize(packed(value, kind), kind).astype(np.float32)


def q4_k(value: Array) -> Array:
    """[..., columns] -> [..., bytes]: blocks of 256 with eight scales and minimums of six bits
    (block_q4_K of ggml-common.h). The gguf package reads the type and does not write it."""
    groups = value.reshape(-1, 8, 32).astype(np.float32)
    low = np.minimum(groups.min(-1), 0)
    step = (groups.max(-1) - low) / 15
    whole = [(part.max(-1) / 63).astype(np.float16) for part in (step, -low)]
    scales, lows = (
        np.rint(part / np.maximum(unit[:, None].astype(np.float32), 1e-12)).clip(0, 63)
        for part, unit in zip((step, -low), whole)
    )
    scales, lows = scales.astype(np.uint8), lows.astype(np.uint8)
    steps = np.maximum(scales * whole[0][:, None].astype(np.float32), 1e-12)
    offsets = lows * whole[1][:, None].astype(np.float32)
    numbers = np.rint((groups + offsets[..., None]) / steps[..., None]).clip(0, 15).astype(np.uint8)
    head = [part[:, None].view(np.uint8).reshape(-1, 2) for part in whole]
    six = np.concatenate(
        [
            scales[:, :4] | (scales[:, 4:] >> 4 << 6),
            lows[:, :4] | (lows[:, 4:] >> 4 << 6),
            (scales[:, 4:] & 15) | (lows[:, 4:] << 4),
        ],
        axis=1,
    )
    pairs = numbers.reshape(-1, 4, 2, 32)
    nibbles = (pairs[:, :, 0] | (pairs[:, :, 1] << 4)).reshape(-1, 128)
    return np.concatenate([*head, six, nibbles], axis=1).reshape(*value.shape[:-1], -1)


def interleaved(value: Array, heads: int) -> Array:
    """Rows for RoPE on neighbouring channels."""
    return value.reshape(heads, 2, -1, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape)


class Family:
    """config.json as keys, and a checkpoint's tensors as the file's."""

    architecture = ""
    backbone = "model"
    ends = {"embed_tokens": "token_embd", "norm": "output_norm"}
    places: dict[str, str] = {}  # name in a layer, up to its last part -> the file's
    permutes = False

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values
        self.ssm = self.mixer()

    def mixer(self) -> dict[str, int]:
        v = self.values
        return {
            "inner_size": v.get("mamba_d_ssm") or v["mamba_expand"] * v["hidden_size"],
            "time_step_rank": v["mamba_n_heads"],
            "state_size": v["mamba_d_state"],
            "group_count": v["mamba_n_groups"],
            "conv_kernel": v["mamba_d_conv"],
        }

    def keys(self) -> dict[str, Any]:
        v = self.values
        return {
            "block_count": v["num_hidden_layers"],
            "embedding_length": v["hidden_size"],
            **{f"ssm.{key}": value for key, value in self.ssm.items()},
            **self.own_keys(),
        }

    def own_keys(self) -> dict[str, Any]:
        raise NotImplementedError

    def tensors(self, found: dict[str, Array]) -> Iterator[tuple[str, Array]]:
        names = {f"{self.backbone}.{ours}.weight": theirs for ours, theirs in self.ends.items()}
        names["lm_head.weight"] = "output"
        for name, value in found.items():
            value = self.scaled(name, value)
            if name in names:
                if name != "lm_head.weight" or not self.values.get("tie_word_embeddings"):
                    yield f"{names[name]}.weight", value
                continue
            layer, rest = name.removeprefix(f"{self.backbone}.layers.").split(".", 1)
            for place, made in self.of_layer(rest, value):
                yield f"blk.{layer}.{place}", made

    def scaled(self, name: str, value: Array) -> Array:
        return value

    def of_layer(self, rest: str, value: Array) -> Iterator[tuple[str, Array]]:
        mixer, leaf = rest.rsplit(".", 1) if "." in rest else ("", rest)
        if leaf == "A_log":
            yield "ssm_a", -np.exp(value)[:, None]
        elif leaf == "D":
            yield "ssm_d", value[:, None]
        elif leaf == "dt_bias":
            yield "ssm_dt.bias", value
        elif mixer.endswith("conv1d"):
            yield f"ssm_conv1d.{leaf}", value.squeeze()
        elif mixer in ("mixer.norm", "mamba.norm"):
            yield "ssm_norm.weight", value.reshape(self.ssm["group_count"], -1)
        else:
            if self.permutes and mixer.endswith(("q_proj", "k_proj")):
                key = "num_attention_heads" if mixer.endswith("q_proj") else "num_key_value_heads"
                value = interleaved(value, self.values[key])
            yield f"{self.places[mixer]}.{leaf}", value


MIXER = {"in_proj": "ssm_in", "out_proj": "ssm_out"}
ATTENTION = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output"}


def under(prefix: str, places: dict[str, str]) -> dict[str, str]:
    return {f"{prefix}.{ours}": theirs for ours, theirs in places.items()}


class Mamba2(Family):
    architecture, backbone = "mamba2", "backbone"
    ends = {"embeddings": "token_embd", "norm_f": "output_norm"}
    places = {"norm": "attn_norm", **under("mixer", MIXER)}

    def mixer(self) -> dict[str, int]:
        v = self.values
        return {
            "inner_size": v["num_heads"] * v["head_dim"],
            "time_step_rank": v["num_heads"],
            "state_size": v["state_size"],
            "group_count": v["n_groups"],
            "conv_kernel": v["conv_kernel"],
        }

    def own_keys(self) -> dict[str, Any]:
        return {
            "context_length": 1 << 20,
            "feed_forward_length": 0,
            "attention.head_count": 0,
            "attention.layer_norm_rms_epsilon": self.values["layer_norm_epsilon"],
        }


class Granite(Family):
    architecture = "granitehybrid"
    permutes = True
    places = {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        **under("mamba", MIXER),
        **under("self_attn", ATTENTION),
        "block_sparse_moe.router.layer": "ffn_gate_inp",
        "block_sparse_moe.output_linear": "ffn_down_exps",
    }

    def own_keys(self) -> dict[str, Any]:
        v = self.values
        kv = v["num_key_value_heads"]
        return {
            "context_length": 1 << 20,
            "vocab_size": v["vocab_size"],
            "feed_forward_length": v["intermediate_size"],
            "expert_shared_feed_forward_length": v["shared_intermediate_size"],
            "expert_count": v["num_local_experts"],
            "expert_used_count": v["num_experts_per_tok"],
            "attention.head_count": v["num_attention_heads"],
            "attention.head_count_kv": [kv if t == "attention" else 0 for t in v["layer_types"]],
            "attention.layer_norm_rms_epsilon": v["rms_norm_eps"],
            "attention.scale": v["attention_multiplier"],
            "embedding_scale": v["embedding_multiplier"],
            "residual_scale": v["residual_multiplier"],
            "logit_scale": v["logits_scaling"],
            "rope.scaling.finetuned": False,
        }

    def of_layer(self, rest: str, value: Array) -> Iterator[tuple[str, Array]]:
        shared = "_shexp" if self.values["num_local_experts"] else ""
        joined = {"block_sparse_moe.input_linear": "_exps", "shared_mlp.input_linear": shared}
        mixer = rest.removesuffix(".weight")
        if mixer in joined:
            gate, up = np.split(value, 2, axis=-2)
            yield f"ffn_gate{joined[mixer]}.weight", gate
            yield f"ffn_up{joined[mixer]}.weight", up
        elif mixer == "shared_mlp.output_linear":
            yield f"ffn_down{shared}.weight", value
        else:
            yield from super().of_layer(rest, value)


class FalconH1(Family):
    architecture = "falcon-h1"
    ends = {"embed_tokens": "token_embd", "final_layernorm": "output_norm"}
    places = {
        "input_layernorm": "attn_norm",
        "pre_ff_layernorm": "ffn_norm",
        **under("mamba", MIXER),
        **under("self_attn", ATTENTION),
        **under("feed_forward", {f"{n}_proj": f"ffn_{n}" for n in ("gate", "up", "down")}),
    }

    def own_keys(self) -> dict[str, Any]:
        v = self.values
        return {
            "context_length": v["max_position_embeddings"],
            "vocab_size": v["vocab_size"],
            "feed_forward_length": v["intermediate_size"],
            "attention.head_count": v["num_attention_heads"],
            "attention.head_count_kv": v["num_key_value_heads"],
            "attention.key_length": v["head_dim"],
            "attention.value_length": v["head_dim"],
            "attention.layer_norm_rms_epsilon": v["rms_norm_eps"],
            "rope.freq_base": v.get("rope_theta") or v["rope_parameters"]["rope_theta"],
        }

    def of_layer(self, rest: str, value: Array) -> Iterator[tuple[str, Array]]:
        for place, made in super().of_layer(rest, value):
            yield place.replace("ffn_norm.weight", "ffn_norm"), made

    def scaled(self, name: str, value: Array) -> Array:
        v = self.values
        factors = {
            "down_proj": v["mlp_multipliers"][1],
            "gate_proj": v["mlp_multipliers"][0],
            "k_proj": v["key_multiplier"] * v["attention_in_multiplier"],
            "q_proj": v["attention_in_multiplier"],
            "v_proj": v["attention_in_multiplier"],
            "o_proj": v["attention_out_multiplier"],
            "out_proj": v["ssm_out_multiplier"],
            "in_proj": v["ssm_in_multiplier"],
            "lm_head": v["lm_head_multiplier"],
            "embed_tokens": v["embedding_multiplier"],
        }
        part = name.removesuffix(".weight").rsplit(".", 1)[-1]
        value = value * np.float32(factors.get(part, 1.0))
        if part == "in_proj":
            bc = self.ssm["group_count"] * self.ssm["state_size"]
            inner = self.ssm["inner_size"]
            sizes = (inner, inner, bc, bc, self.ssm["time_step_rank"])
            each = np.repeat(np.array(v["ssm_multipliers"], np.float32), sizes)
            value = value * each[:, None]
        return value


def number_in(name: str) -> int:
    """Of the expert whose tensor it is."""
    found = re.search(r"\.experts\.(\d+)\.", name)
    return int(found[1]) if found else -1


def experts_apart(
    found: dict[str, Array],
) -> tuple[dict[str, Array], list[tuple[str, Array]]]:
    """A checkpoint's other tensors, and the file's stacked ones of experts."""
    experts: dict[tuple[str, str], list[Array]] = {}
    plain = {}
    for name, value in sorted(found.items(), key=lambda item: number_in(item[0])):
        parts = name.split(".")
        if "experts" in parts:
            experts.setdefault((parts[2], parts[-2]), []).append(value)
        else:
            plain[name] = value
    return plain, [
        (f"blk.{layer}.ffn_{name.removesuffix('_proj')}_exps.weight", np.stack(values))
        for (layer, name), values in experts.items()
    ]


class NemotronH(Family):
    backbone = "backbone"
    permutes = True
    ends = {"embeddings": "token_embd", "norm_f": "output_norm"}
    places = {
        "norm": "attn_norm",
        **under("mixer", {**MIXER, **ATTENTION, "up_proj": "ffn_up", "down_proj": "ffn_down"}),
        "mixer.gate": "ffn_gate_inp",
        **under("mixer.shared_experts", {f"{n}_proj": f"ffn_{n}_shexp" for n in ("up", "down")}),
        "mixer.fc1_latent_proj": "ffn_latent_down",
        "mixer.fc2_latent_proj": "ffn_latent_up",
    }

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__(values)
        self.has_experts = "n_routed_experts" in values
        self.architecture = "nemotron_h_moe" if self.has_experts else "nemotron_h"
        kinds = {letter: kind for kind, letter in LETTERS.items()}
        pattern = values.get("hybrid_override_pattern", "")
        self.kinds = values.get("layers_block_type") or [kinds[letter] for letter in pattern]
        self.values = {**values, "num_hidden_layers": len(self.kinds)}

    def mixer(self) -> dict[str, int]:
        v = self.values
        return {
            "inner_size": v["mamba_num_heads"] * v["mamba_head_dim"],
            "time_step_rank": v["mamba_num_heads"],
            "state_size": v["ssm_state_size"],
            "group_count": v["n_groups"],
            "conv_kernel": v["conv_kernel"],
        }

    def own_keys(self) -> dict[str, Any]:
        v, kv = self.values, self.values["num_key_value_heads"]
        inner, width = "mlp", v["intermediate_size"]
        if self.has_experts:
            inner, width = "moe", v["moe_intermediate_size"]
        return {
            "context_length": 1 << 20,
            "vocab_size": v["vocab_size"],
            "feed_forward_length": [width if kind == inner else 0 for kind in self.kinds],
            "attention.head_count": v["num_attention_heads"],
            "attention.head_count_kv": [kv if t == "attention" else 0 for t in self.kinds],
            "attention.key_length": v["head_dim"],
            "attention.layer_norm_epsilon": v["layer_norm_epsilon"],
            **(self.of_experts() if self.has_experts else {}),
        }

    def of_experts(self) -> dict[str, Any]:
        v = self.values
        latent = v.get("moe_latent_size")
        return {
            "expert_count": v["n_routed_experts"],
            "expert_used_count": v["num_experts_per_tok"],
            "expert_shared_count": v["n_shared_experts"],
            "expert_feed_forward_length": v["moe_intermediate_size"],
            "expert_shared_feed_forward_length": v["moe_shared_expert_intermediate_size"],
            "expert_weights_norm": v["norm_topk_prob"],
            "expert_weights_scale": v["routed_scaling_factor"],
            "expert_group_count": v["n_group"],
            **({"moe_latent_size": latent} if latent else {}),
        }

    def tensors(self, found: dict[str, Array]) -> Iterator[tuple[str, Array]]:
        plain, experts = experts_apart(found)
        yield from super().tensors(plain)
        yield from experts

    def of_layer(self, rest: str, value: Array) -> Iterator[tuple[str, Array]]:
        if rest.endswith("e_score_correction_bias"):
            yield "exp_probs_b.bias", value
        else:
            yield from super().of_layer(rest, value)


class Qwen(Family):
    """Value heads of Qwen3.5 in the order in which repeated key heads meet them."""

    ends = {"embed_tokens": "token_embd", "norm": "output_norm"}
    places = {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "post_attention_norm",
        **under("self_attn", {**ATTENTION, "q_norm": "attn_q_norm", "k_norm": "attn_k_norm"}),
        **under("linear_attn", {"norm": "ssm_norm", "out_proj": "ssm_out", "in_proj_ba": "ssm_ba"}),
        **under("linear_attn", {"in_proj_qkv": "attn_qkv", "in_proj_z": "attn_gate"}),
        **under("linear_attn", {"in_proj_a": "ssm_alpha", "in_proj_b": "ssm_beta"}),
        **under("mlp", {f"{n}_proj": f"ffn_{n}" for n in ("gate", "up", "down")}),
        **under("mlp", {"gate": "ffn_gate_inp", "shared_expert_gate": "ffn_gate_inp_shexp"}),
        **under(
            "mlp.shared_expert", {f"{n}_proj": f"ffn_{n}_shexp" for n in ("gate", "up", "down")}
        ),
    }

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__(values)
        names = {"qwen3_next": "qwen3next", "qwen3_5_text": "qwen35"}
        self.architecture = names.get(values["model_type"], "qwen35moe")

    def mixer(self) -> dict[str, int]:
        v = self.values
        return {
            "inner_size": v["linear_num_value_heads"] * v["linear_value_head_dim"],
            "time_step_rank": v["linear_num_value_heads"],
            "state_size": v["linear_key_head_dim"],
            "group_count": v["linear_num_key_heads"],
            "conv_kernel": v["linear_conv_kernel_dim"],
        }

    def own_keys(self) -> dict[str, Any]:
        v, rope = self.values, self.values["rope_parameters"]
        experts = {
            "expert_count": v.get("num_experts"),
            "expert_used_count": v.get("num_experts_per_tok"),
            "expert_feed_forward_length": v.get("moe_intermediate_size"),
            "expert_shared_feed_forward_length": v.get("shared_expert_intermediate_size"),
            "feed_forward_length": v.get("intermediate_size"),
        }
        sections = (
            {} if "next" in self.architecture else {"rope.dimension_sections": [11, 11, 10, 0]}
        )
        return {
            "context_length": v["max_position_embeddings"],
            "attention.head_count": v["num_attention_heads"],
            "attention.head_count_kv": v["num_key_value_heads"],
            "attention.key_length": v["head_dim"],
            "attention.value_length": v["head_dim"],
            "attention.layer_norm_rms_epsilon": v["rms_norm_eps"],
            "rope.freq_base": rope["rope_theta"],
            "rope.dimension_count": int(v["head_dim"] * rope["partial_rotary_factor"]),
            "full_attention_interval": 4,
            **sections,
            **{key: value for key, value in experts.items() if value is not None},
        }

    def tensors(self, found: dict[str, Array]) -> Iterator[tuple[str, Array]]:
        plain, experts = experts_apart(found)
        yield from super().tensors(plain)
        yield from experts

    def scaled(self, name: str, value: Array) -> Array:
        is_centred = name.endswith("norm.weight") and "linear_attn" not in name
        return value + np.float32(1) if is_centred else value

    def of_layer(self, rest: str, value: Array) -> Iterator[tuple[str, Array]]:
        v = self.values
        if rest == "linear_attn.in_proj_qkvz.weight":
            keys, groups = v["linear_key_head_dim"], v["linear_num_key_heads"]
            inner = self.ssm["inner_size"] // groups
            each = value.reshape(groups, 2 * (keys + inner), -1)
            cuts = np.split(each, np.cumsum([keys, keys, inner]), axis=1)
            q, k, values, z = (part.reshape(-1, value.shape[-1]) for part in cuts)
            yield "attn_qkv.weight", np.concatenate([q, k, values])
            yield "attn_gate.weight", z
        elif rest == "linear_attn.norm.weight":
            yield "ssm_norm.weight", value
        else:
            if "linear_attn" in rest and "next" not in self.architecture:
                value = self.tiled(rest, value)
            for place, made in super().of_layer(rest, value):
                yield place, made.reshape(-1) if place == "ssm_a" else made

    def tiled(self, rest: str, value: Array) -> Array:
        if rest.endswith("out_proj.weight"):
            return self.tiled("", value.T).T
        inner, heads = self.ssm["inner_size"], self.ssm["time_step_rank"]
        first = max(0, len(value) - inner)
        groups = self.ssm["group_count"]
        grouped = value[first:].reshape(groups, heads // groups, -1, *value.shape[1:])
        tail = grouped.swapaxes(0, 1).reshape(value[first:].shape)
        return np.concatenate([value[:first], tail])


FAMILIES = {
    "mamba2": Mamba2,
    "granitemoehybrid": Granite,
    "falcon_h1": FalconH1,
    "nemotron_h": NemotronH,
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), Qwen),
}
