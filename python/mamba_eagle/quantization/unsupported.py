"""Refusals of quantizations, with what is known."""

from __future__ import annotations

from mamba_eagle.model_config import UnsupportedModel

KNOWN = (
    "fp8; compressed-tensors with 8-bit floats and one scale per tensor, channel or block, or "
    "nvfp4-pack-quantized; modelopt with FP8, FP8_PER_CHANNEL_PER_TOKEN, FP8_PB_WO, NVFP4, "
    "W4A16_NVFP4, or several of them (MIXED_PRECISION); awq (gemm) and gptq with 4 bits"
)


def unsupported(name: str) -> UnsupportedModel:
    """name: the tool and its scheme."""
    return UnsupportedModel(
        f"quantization {name} is not supported; known: {KNOWN}. Use the unquantized checkpoint"
    )
