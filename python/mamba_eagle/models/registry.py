"""Which family serves which ``architectures`` entry of config.json."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

from mamba_eagle.models.base import CausalLM
from mamba_eagle.models.config import ModelConfig, UnsupportedModel
from mamba_eagle.models.quantization import quantization


class Family(NamedTuple):
    """A file of this folder: it has ``parse_config`` and the model class."""

    module: str
    model: str


# architectures entry -> family
MODELS = {
    "NemotronHForCausalLM": Family("nemotron_h", "NemotronHForCausalLM"),
    "Mamba2ForCausalLM": Family("mamba2", "Mamba2ForCausalLM"),
    "BambaForCausalLM": Family("bamba", "BambaForCausalLM"),
    "GraniteMoeHybridForCausalLM": Family("granitemoehybrid", "GraniteMoeHybridForCausalLM"),
    "FalconH1ForCausalLM": Family("falcon_h1", "FalconH1ForCausalLM"),
    "Zamba2ForCausalLM": Family("zamba2", "Zamba2ForCausalLM"),
    "LlamaForCausalLM": Family("llama", "LlamaForCausalLM"),
    "Qwen3ForCausalLM": Family("llama", "LlamaForCausalLM"),
}


def parse_config(values: dict[str, Any]) -> ModelConfig:
    """config.json, in the names our layers use. A draft head is described as Nemotron-H is.

    Raises: UnsupportedModel naming what is not known.
    """
    quantization(values)  # refused before any file is read
    architecture = (values.get("architectures") or ["?"])[0]
    if "ssm_cfg" in values:  # state-spaces writes no architectures
        architecture = "Mamba2ForCausalLM"
    described_as = "NemotronHForCausalLM" if architecture in ("EagleHead", "?") else architecture
    parse: Callable[[dict[str, Any]], ModelConfig] = _module(described_as).parse_config
    try:
        return parse(values)
    except KeyError as error:
        raise UnsupportedModel(f"config.json of a {architecture} lacks {error}") from None


def model_class(config: ModelConfig) -> Callable[[ModelConfig], CausalLM]:
    """Raises: UnsupportedModel naming the architecture and those known."""
    module = _module(config.architecture)
    model: Callable[[ModelConfig], CausalLM] = getattr(module, MODELS[config.architecture].model)
    return model


def _module(architecture: str) -> Any:
    if architecture not in MODELS:
        raise UnsupportedModel(
            f"architecture {architecture!r} is not supported; known: {sorted(MODELS)}"
        )
    return import_module(f"mamba_eagle.models.{MODELS[architecture].module}")
