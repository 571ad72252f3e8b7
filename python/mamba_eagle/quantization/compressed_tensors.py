"""compressed-tensors: groups of modules, each with a scheme for weights and one for inputs."""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from mamba_eagle.quantization.float8 import NONE, STATIC, TOKEN, float8_layout
from mamba_eagle.quantization.layout import Layout, unsupported
from mamba_eagle.quantization.nvfp4 import GROUP, compressed_matrices

STRATEGIES = ("tensor", "channel", "block")


class Group(NamedTuple):
    """Modules with one scheme."""

    targets: Sequence[str]  # names of classes or modules, or re:… for modules
    inputs: str

    def has(self, module: str) -> bool:
        leaf = module.rpartition(".")[2]
        return any(
            re.match(target[3:], module) is not None
            if target.startswith("re:")
            else target in ("Linear", module, leaf)
            for target in self.targets
        )


def layout(given: dict[str, Any]) -> Layout:
    """Float8 weights, or NVFP4 ones in two numbers per byte. given: the quantization_config.

    Raises: UnsupportedModel naming an unsupported scheme.
    """
    schemes = given.get("config_groups") or {}
    weights = [scheme.get("weights") or {} for scheme in schemes.values()]
    names = sorted({f"{number_name(w)} per {w.get('strategy')}" for w in weights})
    name = f"compressed-tensors ({', '.join(names)})" if names else "compressed-tensors"
    groups = []
    for scheme, w in zip(schemes.values(), weights):
        inputs = input_rounding(scheme.get("input_activations"))
        if not known_weights(w) or inputs is None:
            raise unsupported(name)
        groups.append(Group(scheme.get("targets") or ("Linear",), inputs))
    block = next((w["block_structure"] for w in weights if w.get("block_structure")), None)

    def inputs_of(module: str) -> str:
        return next((group.inputs for group in groups if group.has(module)), NONE)

    kv_cache = given.get("kv_cache_scheme")
    kv_name = number_name(kv_cache) if isinstance(kv_cache, dict) else ""
    group = GROUP if any(map(is_fp4, weights)) else 1
    square = tuple(block) if block else None
    return float8_layout(name, inputs_of, square, kv_name, group, compressed_matrices)


def known_weights(given: dict[str, Any]) -> bool:
    if is_fp4(given):
        return True
    return number_name(given) == "8-bit float" and given.get("strategy", "tensor") in STRATEGIES


def is_fp4(given: dict[str, Any]) -> bool:
    """Whether it is NVFP4: its scales are those of groups of 16."""
    strategies = ("tensor_group", "group")
    grouped = given.get("strategy") in strategies and given.get("group_size") == GROUP
    return number_name(given) == "4-bit float" and grouped


def input_rounding(given: dict[str, Any] | None) -> str | None:
    """How inputs are rounded, as in float8.py; None if that is not supported."""
    if not given or number_name(given) == "4-bit float":
        return NONE  # to four bits: more exact without
    if number_name(given) != "8-bit float":
        return None
    strategy = given.get("strategy", "tensor")
    if strategy == "group":
        return str(given.get("group_size") or 128)
    if strategy == "token" or given.get("dynamic"):
        return TOKEN
    return STATIC if strategy == "tensor" else None


def number_name(given: dict[str, Any]) -> str:
    return f"{given.get('num_bits')}-bit {given.get('type')}"
