"""EAGLE-1/2 (arXiv 2401.15077): a few layers that predict the target's next hidden state."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from mamba_eagle.drafting.eagle import EagleNetwork
from mamba_eagle.models.base import CausalLM
from mamba_eagle.models.eagle import EagleHead
from mamba_eagle.models.registry import parse_config
from mamba_eagle.train.batches import Answer
from mamba_eagle.train.heads.base import initialize
from mamba_eagle.train.heads.config import head_config
from mamba_eagle.train.heads.unrolled import UnrolledHead
from mamba_eagle.train.settings import TrainSettings

FEATURE_LOSS_WEIGHT = 0.2  # relative to the cross entropy


class TrainableEagle(UnrolledHead):
    """Embedding and lm_head are the target's; the outputs are predictions of its features."""

    def __init__(
        self, settings: TrainSettings, target: CausalLM, answers: Sequence[Answer]
    ) -> None:
        self.config = head_config("EagleHead", settings.head_pattern, target.config)
        head = EagleHead(parse_config(self.config)).float()
        initialize(head, settings.seed)
        with torch.no_grad():  # the head ends in the target's norm, before the target's lm_head
            head.norm.weight.copy_(target.parts.norm.weight)
        self.module = head.to(target.lm_head.weight.device)
        self.network = EagleNetwork(head, target)

    def feature_loss(self, outputs: Tensor, features: Tensor) -> Tensor:
        loss = F.smooth_l1_loss(outputs.float(), features.float(), reduction="none")
        return FEATURE_LOSS_WEIGHT * loss.mean(-1)
