"""The frozen target: loaded as it is served, asked for whole sequences."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from mamba_eagle.layers.context import FullSequenceContext
from mamba_eagle.models.base import CausalLM
from mamba_eagle.models.loader import created_as, load_weights
from mamba_eagle.models.registry import model_class, read_model_config
from mamba_eagle.runner.model_runner import resolve_dtype
from mamba_eagle.train.drafter.batches import Rows


class Taught(NamedTuple):
    """What the target says about some rows; without gradient."""

    features: Tensor  # [b, l, W]: after the final norm, then the tapped layers' inputs
    wanted: Tensor  # [roots, vocab_size] float32: its distribution behind each root of the rows


def load_target(folder: Path, device: torch.device) -> CausalLM:
    """In the dtype that ``serve`` runs it in, without what inference packs: gradients of the head
    pass through lm_head."""
    config = read_model_config(folder)
    with created_as(resolve_dtype("auto", config, device), device):
        target = model_class(config)(config)
    load_weights(target, folder)
    return target.eval().requires_grad_(False)


@torch.no_grad()
def ask_target(target: CausalLM, rows: Rows) -> Taught:
    tokens = rows.tokens
    features = target(tokens.flatten(), FullSequenceContext(*tokens.shape, tokens.device))
    hidden = features[rows.drafts[0].flat, : target.config.hidden_size]
    wanted = target.compute_logits(hidden).softmax(-1)
    return Taught(features.view(*tokens.shape, -1), wanted)
