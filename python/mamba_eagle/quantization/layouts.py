"""Which layout a checkpoint has, from its config.json."""

from collections.abc import Callable
from typing import Any

from mamba_eagle.quantization import compressed_tensors, modelopt
from mamba_eagle.quantization.float8 import NONE, float8_layout, fp8_layout
from mamba_eagle.quantization.four_bit_integers import awq_layout, gptq_layout
from mamba_eagle.quantization.layout import Layout, unsupported

# quant_method -> its layout
LAYOUTS: dict[str, Callable[[dict[str, Any]], Layout]] = {
    "fp8": fp8_layout,
    "modelopt": modelopt.layout,
    "modelopt_fp4": modelopt.layout,
    "compressed-tensors": compressed_tensors.layout,
    "awq": awq_layout,
    "gptq": gptq_layout,
}


def block_of(values: dict[str, Any]) -> int:
    """Rows and columns that share a scale in float8; 0 if they are not blocks. values: as below."""
    return layout_of(values).block


def layout_of(values: dict[str, Any]) -> Layout:
    """values: config.json, with ModelOpt's own file in it.

    Raises: UnsupportedModel naming an unsupported scheme.
    """
    given = values.get("quantization_config") or values.get("compression_config")
    if not given:
        return float8_layout("", lambda module: NONE)
    given = {**given, **(given.get("quantization") or {})}  # ModelOpt's own file nests it
    method = given.get("quant_method") or (given.get("producer") or {}).get("name") or "?"
    if method not in LAYOUTS:
        raise unsupported(f"{method:.200}")
    return LAYOUTS[method](given)
