"""Which family serves which ``architectures`` entry of config.json."""

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from mamba_eagle.drafters import head_algorithm
from mamba_eagle.hub import is_gguf
from mamba_eagle.model_config import ModelConfig, UnsupportedModel
from mamba_eagle.models.base import CausalLM
from mamba_eagle.models.config_json import checked, read_values
from mamba_eagle.quantization.layouts import layout_of


class Family(NamedTuple):
    """A file of this folder, with a ``parse_config``, and the model class in it."""

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
    "Qwen3NextForCausalLM": Family("qwen3_next", "Qwen3NextForCausalLM"),
    "Qwen3_5ForCausalLM": Family("qwen3_5", "Qwen35ForCausalLM"),
    "Qwen3_5ForConditionalGeneration": Family("qwen3_5", "Qwen35ForCausalLM"),
    "Qwen3_5MoeForCausalLM": Family("qwen3_5", "Qwen35ForCausalLM"),
    "Qwen3_5MoeForConditionalGeneration": Family("qwen3_5", "Qwen35ForCausalLM"),
    "OlmoHybridForCausalLM": Family("olmo_hybrid", "OlmoHybridForCausalLM"),
    "KimiLinearForCausalLM": Family("kimi_linear", "KimiLinearForCausalLM"),
    "BailingHybridForCausalLM": Family("bailing_hybrid", "BailingHybridForCausalLM"),
    "Lfm2ForCausalLM": Family("lfm2", "Lfm2ForCausalLM"),
    "Lfm2MoeForCausalLM": Family("lfm2", "Lfm2ForCausalLM"),
    "LlamaForCausalLM": Family("llama", "LlamaForCausalLM"),
    "Qwen3ForCausalLM": Family("llama", "LlamaForCausalLM"),
}


# draft algorithm -> the file whose ``parse_config`` reads its heads
HEAD_MODULES = {
    "EAGLE": "nemotron_h",  # its config.json has the keys of Nemotron-H
    "EAGLE3": "eagle3",
    "MTP": "mtp",
    "DFLASH": "dflash_config",
    "DSPARK": "dflash_config",
}


def parse_config(values: dict[str, Any]) -> ModelConfig:
    """The config of a model or draft head. values: its config.json.

    Raises: UnsupportedModel naming what is not supported.
    """
    values = checked(values)
    architecture = (values.get("architectures") or ["?"])[0]
    if "ssm_cfg" in values:  # state-spaces writes no architectures
        return parse_as("mamba2", values)
    if architecture == "?":
        return parse_as("nemotron_h", values)
    if (algorithm := head_algorithm(values)) is not None:
        return parse_as(HEAD_MODULES[algorithm], values)
    return parse_as(_family(architecture).module, values)


def read_model_config(folder: str | Path, module: str = "") -> ModelConfig:
    """The config of the model or draft head in a folder. module: the file of this package that
    reads it, whatever its architecture; "": the architecture says which.

    Raises: FileNotFoundError, UnsupportedModel, which name the folder.
    """
    values = read_values(folder)
    try:
        return parse_as(module, values) if module else parse_config(values)
    except UnsupportedModel as error:
        file = folder if is_gguf(folder) else Path(folder, "config.json")
        raise UnsupportedModel(f"{file}: {error}") from None


def mtp_module(folder: str | Path) -> str:
    """The file that reads the multi-token-prediction modules in a folder.

    Raises: FileNotFoundError, UnsupportedModel
    """
    architecture = (read_values(folder).get("architectures") or ["?"])[0]
    family = MODELS.get(architecture)
    is_qwen = family is not None and family.module in ("qwen3_next", "qwen3_5")
    return "qwen_mtp" if is_qwen else "mtp"


def parse_as(module: str, values: dict[str, Any]) -> ModelConfig:
    """config.json as read by one file of this package.

    Raises: UnsupportedModel naming what is not supported.
    """
    values = checked(values)
    group = layout_of(values).group  # refuses unsupported schemes before any weight is read
    parse: Callable[[dict[str, Any]], ModelConfig]
    parse = import_module(f"mamba_eagle.models.{module}").parse_config
    try:
        return replace(parse(values), scale_group=group)
    except KeyError as error:
        architecture = (values.get("architectures") or ["?"])[0]
        raise UnsupportedModel(f"the config of a {architecture} lacks {error}") from None


def model_class(config: ModelConfig) -> Callable[[ModelConfig], CausalLM]:
    """Raises: UnsupportedModel naming the architecture and the supported ones."""
    family = _family(config.architecture)
    module = import_module(f"mamba_eagle.models.{family.module}")
    model: Callable[[ModelConfig], CausalLM] = getattr(module, family.model)
    return model


def _family(architecture: str) -> Family:
    if architecture not in MODELS:
        raise UnsupportedModel(
            f"architecture {architecture!r} is not supported; known: {sorted(MODELS)}"
        )
    return MODELS[architecture]
