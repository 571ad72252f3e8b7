"""Which class serves which ``architectures`` entry of config.json."""

from __future__ import annotations

from mamba_eagle.models.config import ModelConfig, UnsupportedModel
from mamba_eagle.models.nemotron_h import NemotronHForCausalLM

MODELS = {"NemotronHForCausalLM": NemotronHForCausalLM}


def model_class(config: ModelConfig) -> type[NemotronHForCausalLM]:
    """Raises: UnsupportedModel naming the architecture and those known."""
    if config.architecture not in MODELS:
        raise UnsupportedModel(
            f"architecture {config.architecture!r} is not supported; known: {sorted(MODELS)}"
        )
    return MODELS[config.architecture]
