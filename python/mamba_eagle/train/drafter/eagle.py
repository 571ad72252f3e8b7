"""EAGLE-1/2 (arXiv 2401.15077): a few layers that guess the target's next hidden state."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from mamba_eagle.drafting.eagle import EagleNetwork
from mamba_eagle.models.base import CausalLM
from mamba_eagle.models.eagle import EagleHead
from mamba_eagle.models.registry import parse_config
from mamba_eagle.train.drafter.batches import Answer
from mamba_eagle.train.drafter.recipe import Recipe
from mamba_eagle.train.drafter.settings import TrainSettings
from mamba_eagle.train.drafter.shapes import head_values
from mamba_eagle.train.init import initialize

FEATURE_WEIGHT = 0.2  # of the smooth L1 distance to the target's features


class EagleRecipe(Recipe):
    """Embedding and lm_head are the target's; the outputs are guesses of its features."""

    def __init__(
        self, settings: TrainSettings, target: CausalLM, answers: Sequence[Answer]
    ) -> None:
        self.target = target
        self.config = head_values("EagleHead", settings.head_pattern, target.config)
        head = EagleHead(parse_config(self.config)).float()
        initialize(head, settings.seed)
        with torch.no_grad():  # the head ends in the same norm, in front of the same lm_head
            head.norm.weight.copy_(target.parts.norm.weight)
        self.module = head.to(target.lm_head.weight.device)
        self.network = EagleNetwork(head, target)

    def logits(self, depth: int, outputs: Tensor) -> Tensor:
        return self.target.compute_logits(outputs)

    def distance(self, outputs: Tensor, features: Tensor) -> Tensor:
        loss = F.smooth_l1_loss(outputs.float(), features.float(), reduction="none")
        return FEATURE_WEIGHT * loss.mean(-1)
