"""FP8 and NVFP4 checkpoints: weights are converted to the model's dtype as they are loaded; other
schemes are refused.

Supported are one scale per tensor, channel or block, as written by fp8 (DeepSeek's
``weight_scale_inv``), compressed-tensors and ModelOpt. Schemes for activations and for the KV cache
are ignored: both stay in the model's dtype.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from mamba_eagle.model_config import UnsupportedModel

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
SCALE_NAMES = ("_scale", "_scale_inv", "_scale_2")  # appended to the weight's name
OTHER_SCALES = (".input_scale", ".output_scale", ".k_scale", ".v_scale")
MODELOPT_FP8 = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO")
MODELOPT_NVFP4 = ("NVFP4", "W4A16_NVFP4")  # see nvfp4.py
MODELOPT = (*MODELOPT_FP8, *MODELOPT_NVFP4)
STRATEGIES = ("tensor", "channel", "block")
KNOWN = (
    "fp8, compressed-tensors with 8-bit floats and one scale per tensor, channel or block, "
    f"modelopt with {', '.join(MODELOPT)}"
)


class Quantization(NamedTuple):
    """How the weights are stored, from config.json or hf_quant_config.json."""

    method: str = ""  # the tool that wrote them; empty: not quantized
    scheme: str = ""  # under that tool's name
    block: tuple[int, int] = (128, 128)  # rows and columns per scale, if there is one per block
    kv_cache: str = ""  # the scheme for the KV cache, if there is one

    @property
    def name(self) -> str:
        return f"{self.method} ({self.scheme})" if self.scheme else self.method


def quantization(values: dict[str, Any]) -> Quantization:
    """What a config.json says. Raises: UnsupportedModel naming an unsupported scheme."""
    given = values.get("quantization_config") or values.get("compression_config")
    if not given:
        return Quantization()
    given = {**given, **(given.get("quantization") or {})}  # ModelOpt's own file nests it
    method = given.get("quant_method") or (given.get("producer") or {}).get("name") or "?"
    kv_cache = given.get("kv_cache_quant_algo") or given.get("kv_cache_scheme") or ""
    if isinstance(kv_cache, dict):
        kv_cache = float_name(kv_cache)
    block = given.get("weight_block_size")
    if method == "fp8":
        scheme, known = "", True
    elif method == "modelopt":
        algorithms = modelopt_algorithms(given)
        scheme, known = ", ".join(algorithms), set(algorithms) <= set(MODELOPT)
    elif method == "compressed-tensors":
        groups = [group.get("weights") or {} for group in given.get("config_groups", {}).values()]
        block = block or next(
            (w["block_structure"] for w in groups if "block_structure" in w), None
        )
        scheme = ", ".join(sorted({f"{float_name(w)} per {w.get('strategy')}" for w in groups}))
        known = all(float_name(w) == "8-bit float" for w in groups)
        known = known and all(w.get("strategy", "tensor") in STRATEGIES for w in groups)
    else:
        scheme, known = "", False
    rows, columns = block or (128, 128)
    found = Quantization(method, scheme, (rows, columns), kv_cache)
    if not known:
        raise UnsupportedModel(
            f"quantization {found.name} is not supported; known: {KNOWN}. "
            "Use the unquantized checkpoint"
        )
    return found


def modelopt_algorithms(given: dict[str, Any]) -> list[str]:
    """One for all layers, several for MIXED_PRECISION, none if only the KV cache is quantized."""
    algorithm = given.get("quant_algo")
    if algorithm != "MIXED_PRECISION":
        return [algorithm.upper()] if algorithm else []
    layers = (given.get("quantized_layers") or {}).values()
    return sorted({layer.get("quant_algo", "?").upper() for layer in layers}) or [algorithm]


def float_name(given: dict[str, Any]) -> str:
    return f"{given.get('num_bits')}-bit {given.get('type')}"


def is_scale(name: str) -> bool:
    """Whether a tensor holds scales of another one."""
    return name.endswith(OTHER_SCALES) or any(name.endswith("weight" + end) for end in SCALE_NAMES)


def dequantize(weight: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """weight [..., out, in] float8 -> float32 of the same shape.

    Args:
        scale: a single one; [out] or [..., out, 1] for one per channel; for one per block
            [..., out blocks, in blocks], or ModelOpt's [out blocks, 1, in blocks, 1].

    Raises: ValueError if the scales do not fit the weight.
    """
    value, scale = weight.float(), scale.float()
    if scale.numel() == 1:
        return value * scale.reshape(())
    misfit = ValueError(
        f"scales {list(scale.shape)} do not fit {list(value.shape)} in blocks of {list(block)}"
    )
    if scale.ndim == 1:
        scale = scale[:, None]
    elif scale.ndim == value.ndim + 2:
        scale = scale.squeeze(-1).squeeze(-2)
    if scale.ndim != value.ndim or scale.shape[:-2] != value.shape[:-2]:
        raise misfit
    for axis, size in zip((-2, -1), block, strict=True):
        length = value.shape[axis]
        if scale.shape[axis] in (1, length):
            continue
        if scale.shape[axis] != -(-length // size):
            raise misfit
        scale = scale.repeat_interleave(size, dim=axis).narrow(axis, 0, length)
    return value * scale
