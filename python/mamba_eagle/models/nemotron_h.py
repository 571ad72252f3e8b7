"""Nemotron-H: Mamba2, attention without position encoding, relu² MLP and expert layers, mixed.

Serves Nemotron-H, Nemotron Nano v2, and Nemotron 3 (Nano and Super, whose experts work in a latent
width). The multi-token-prediction layers that Super publishes beside the model are a drafter's
(mtp.py); the model leaves them out.
"""

from __future__ import annotations

import re

from torch import Tensor

from mamba_eagle.layers.block import make_blocks
from mamba_eagle.layers.context import ForwardContext
from mamba_eagle.models.base import CausalLM, Target
from mamba_eagle.models.config import ModelConfig

EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(up_proj|down_proj)\.weight")


class NemotronHForCausalLM(CausalLM):
    """Parameter names are those of the published checkpoints (``backbone.layers.N.mixer…``)."""

    backbone_name = "backbone"
    embedding_name = "embeddings"
    norm_name = "norm_f"

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, list(make_blocks(config)))

    def run_layers(self, hidden: Tensor, ctx: ForwardContext) -> Tensor:
        """Each block's sum is left to the norm of the next, which may have a kernel for both."""
        if self.tap_layers:  # what is tapped must stay as it is
            return super().run_layers(hidden, ctx)
        first, *others = self.parts.layers
        made = first.mixer(first.norm(hidden), ctx)
        for block in others:
            normed, hidden = block.norm.after(hidden, made)
            made = block.mixer(normed, ctx)
        return hidden + made

    def target(self, name: str) -> Target | None:
        if name.startswith("mtp."):
            return None
        return expert_place(name) or super().target(name)


def expert_place(name: str) -> Target | None:
    """Each expert is published by itself; ours are stacked."""
    found = EXPERT.fullmatch(name)
    return Target(f"{found[1]}.{found[3]}", int(found[2])) if found else None


parse_config = ModelConfig.from_nemotron_h
