"""FP8 checkpoints: weights become the model's dtype as they are loaded; other schemes are refused.

Known: one scale a tensor or a channel (compressed-tensors, ModelOpt) and one a block (DeepSeek's
``weight_scale_inv``). What is said about activations and about the KV cache is not followed: both
stay in the model's dtype.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mamba_eagle.models.config import UnsupportedModel

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
SCALE_NAMES = ("_scale", "_scale_inv")  # behind the weight's name
OTHER_SCALES = (".input_scale", ".output_scale", ".k_scale", ".v_scale")
KNOWN = "fp8, compressed-tensors with 8-bit floats, modelopt with FP8"


def check_quantization(values: dict[str, Any]) -> None:
    """Raises: UnsupportedModel naming the scheme that config.json speaks of, unless it is known."""
    given = values.get("quantization_config") or values.get("compression_config")
    if not given:
        return
    method = given.get("quant_method", "?")
    known = method == "fp8"
    scheme = method
    if method == "modelopt":
        scheme = given.get("quant_algo") or given.get("quantization", {}).get("quant_algo", "?")
        known = scheme == "FP8"
    elif method == "compressed-tensors":
        weights = [group.get("weights") or {} for group in given.get("config_groups", {}).values()]
        scheme = ", ".join(sorted({f"{w.get('num_bits')}-bit {w.get('type')}" for w in weights}))
        known = all((w.get("num_bits"), w.get("type")) == (8, "float") for w in weights)
    if not known:
        name = method if scheme == method else f"{method} ({scheme})"
        raise UnsupportedModel(
            f"quantization {name} is not supported; known: {KNOWN}. Use the unquantized checkpoint"
        )


def is_scale(name: str) -> bool:
    """Whether a tensor only says how to read another one."""
    return name.endswith(OTHER_SCALES) or any(name.endswith("weight" + end) for end in SCALE_NAMES)


def dequantize(weight: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """weight [out, in] float8; scale [], [1], [out, 1] or one a block -> [out, in] float32."""
    value, scale = weight.float(), scale.float()
    if scale.numel() == 1:
        return value * scale.reshape(())
    if scale.ndim == 1:
        scale = scale[:, None]
    for axis, size in enumerate(block):
        if scale.shape[axis] not in (1, value.shape[axis]):
            scale = scale.repeat_interleave(size, dim=axis).narrow(axis, 0, value.shape[axis])
    return value * scale


def block_size(values: dict[str, Any]) -> tuple[int, int]:
    rows, columns = (values.get("quantization_config") or {}).get("weight_block_size") or (128, 128)
    return rows, columns
