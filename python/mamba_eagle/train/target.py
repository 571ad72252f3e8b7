"""The frozen target: loaded in the dtype that it is served in, run over whole sequences."""

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from mamba_eagle.devices import resolve_dtype
from mamba_eagle.layers.context import FullSequenceContext
from mamba_eagle.models.base import CausalLM
from mamba_eagle.models.loader import created_as, load_weights
from mamba_eagle.models.registry import model_class, read_model_config
from mamba_eagle.train.batches import PaddedAnswers


class TargetOutputs(NamedTuple):
    """The target's outputs for some answers; without gradient."""

    features: (
        Tensor  # [b, l, W]: hidden states after the final norm, then the tapped layers' inputs
    )
    probs: Tensor  # [roots, vocab_size] float32: its distribution after each root of the answers


def load_target(folder: Path, device: torch.device) -> CausalLM:
    """Loads the target in the dtype that ``serve`` uses. Weights are not packed for inference,
    because the head's gradients pass through lm_head."""
    config = read_model_config(folder)
    with created_as(resolve_dtype("auto", config.dtype, device), device):
        target = model_class(config)(config)
    load_weights(target, folder)
    return target.eval().requires_grad_(False)


@torch.no_grad()
def run_target(target: CausalLM, answers: PaddedAnswers) -> TargetOutputs:
    tokens = answers.tokens
    batch, length = tokens.shape
    features = target(tokens.flatten(), FullSequenceContext(batch, length, tokens.device))
    hidden = features[answers.drafts[0].flat, : target.config.hidden_size]
    probs = target.compute_logits(hidden).softmax(-1)
    return TargetOutputs(features.view(batch, length, -1), probs)
