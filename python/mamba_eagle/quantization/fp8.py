"""``quant_method: fp8``: DeepSeek's and transformers' checkpoints, with one scale per tensor,
channel or block (``weight_block_size``, and then inputs in groups of as many channels)."""

from __future__ import annotations

from typing import Any

from mamba_eagle.quantization.float8 import STATIC, TOKEN, Float8Layout
from mamba_eagle.quantization.layout import Layout


def layout(given: dict[str, Any]) -> Layout:
    """given: the quantization_config."""
    block = given.get("weight_block_size")
    inputs = TOKEN
    if block:
        inputs = str(block[1])
    elif given.get("activation_scheme") == "static":
        inputs = STATIC
    return Float8Layout("fp8", lambda module: inputs, tuple(block) if block else None)
