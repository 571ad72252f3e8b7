"""NVIDIA ModelOpt: FP8 and NVFP4, for all layers or layer by layer (MIXED_PRECISION).

``quantized_layers`` names modules; those left in 16 bits are stored as usual.
"""

from typing import Any

from mamba_eagle.quantization.float8 import NONE, STATIC, TOKEN, float8_layout
from mamba_eagle.quantization.layout import Layout, unsupported
from mamba_eagle.quantization.nvfp4 import GROUP, modelopt_matrices

# algorithm -> how inputs are rounded
BLOCKS = "FP8_PB_WO"
FLOAT8 = {"FP8": STATIC, "FP8_PER_CHANNEL_PER_TOKEN": TOKEN, BLOCKS: NONE}
NVFP4 = ("NVFP4", "W4A16_NVFP4")  # inputs stay in the model's dtype in both


def layout(given: dict[str, Any]) -> Layout:
    """Float8 and NVFP4 weights; the dtype of the stored weight says which. given: the
    quantization_config, or the contents of hf_quant_config.json.

    Raises: UnsupportedModel naming an unsupported algorithm.
    """
    by_module = algorithms(given)
    names = sorted(set(by_module.values()))
    name = f"modelopt ({', '.join(names)})" if names else "modelopt"
    if not set(names) <= {*FLOAT8, *NVFP4}:
        raise unsupported(name)
    whole = by_module.get("", "FP8")

    def inputs(module: str) -> str:
        return FLOAT8.get(by_module.get(module, whole), STATIC)

    block = (128, 128) if BLOCKS in names else None
    group = GROUP if {*NVFP4} & {*names} else 1
    kv_cache = given.get("kv_cache_quant_algo") or ""
    return float8_layout(name, inputs, block, kv_cache, group, modelopt_matrices)


def algorithms(given: dict[str, Any]) -> dict[str, str]:
    """Module -> algorithm; "" stands for all modules. Nothing if only the KV cache is
    quantized."""
    algorithm = given.get("quant_algo")
    if algorithm != "MIXED_PRECISION":
        return {"": algorithm.upper()} if algorithm else {}
    layers = given.get("quantized_layers") or {}
    found = {module: str(layer.get("quant_algo", "?")).upper() for module, layer in layers.items()}
    return found or {"": algorithm}
