"""What the trainer needs to know about one kind of head, and initial weights: the classes leave
their parameters uninitialized."""

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mamba_eagle.config import ConfigError
from mamba_eagle.layers.embedding import Embedding
from mamba_eagle.layers.linear import Linear
from mamba_eagle.layers.mamba2 import Mamba2Mixer
from mamba_eagle.model_config import ModelConfig
from mamba_eagle.models.base import CausalLM
from mamba_eagle.models.loader import load_weights
from mamba_eagle.train.batches import Answer, PaddedAnswers
from mamba_eagle.train.settings import TrainSettings
from mamba_eagle.train.target import TargetOutputs


class TrainableHead(ABC):
    """A head under training: ``module`` holds its weights."""

    config: dict[str, Any]  # its config.json
    module: nn.Module
    max_anchors = 0  # of an answer: positions per step from which it drafts; 0: from all

    @abstractmethod
    def __init__(
        self, settings: TrainSettings, target: CausalLM, answers: Sequence[Answer]
    ) -> None:
        """Makes a new head in float32 on the target's device.

        From then on ``target`` also returns the features that the head reads.

        Args:
            answers: the answers that the head will be trained on.
        """

    @classmethod
    def problems(cls, settings: TrainSettings, target: ModelConfig) -> list[str]:
        """Reasons why this head cannot be made, each with the values and a remedy."""
        return []

    @abstractmethod
    def loss(self, answers: PaddedAnswers, target: TargetOutputs, num_drafts: list[int]) -> Tensor:
        """The loss of a pass, a scalar.

        num_drafts: drafts of the batch at each depth, over which the loss is averaged. They may
        exceed those of ``answers``: the result is then this pass's part of the batch's loss.
        """

    @abstractmethod
    def greedy_drafts(
        self, answers: PaddedAnswers, target: TargetOutputs, depth: int
    ) -> Iterator[Tensor]:
        """The most likely token at each depth j, from all roots: the target's token ids, in the
        order of ``answers.drafts[j]``, int64."""

    def load(self, folder: Path) -> None:
        """Takes the weights of a head that was trained before.

        Raises: ConfigError naming each value of its config.json that is another one here;
        CheckpointError
        """
        before = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        wrong = [
            f"--init-from {folder}: its {name} is {before.get(name)}, here it is {value}"
            for name, value in self.config.items()
            if before.get(name) != value
        ]
        if wrong:
            raise ConfigError([*wrong, "give the settings that it was trained with"])
        load_weights(self.module, folder)

    def weights(self) -> dict[str, Tensor]:
        """The tensors of its checkpoint, by name."""
        return getattr(self.module, "published_weights", self.module.state_dict)()


EMBEDDING_STD = 0.5  # comparable to what the layers add, so that tokens remain distinguishable
LM_HEAD_STD = 0.02  # initial logits near zero: the loss starts at log(vocab_size)
RESIDUAL_OUTPUTS = ("out_proj", "o_proj", "down_proj")  # these write to the residual stream
DT_MIN, DT_MAX = 1e-3, 1e-1


@torch.no_grad()
def initialize(model: nn.Module, seed: int) -> None:
    """Fills all parameters of a model or draft head on the CPU; equal seeds give equal weights.

    Linear layers get variance 1/fan_in; those that write to the residual stream are scaled down by
    the square root of the number of layers. Mamba2's A, dt and D are initialized as in the code of
    its paper (arXiv 2405.21060): A uniform in [1, 16], dt log-uniform in [0.001, 0.1], D = 1.
    """
    generator = torch.Generator().manual_seed(seed)
    modules = list(model.named_modules())
    layers = sum(name.endswith(RESIDUAL_OUTPUTS) for name, _ in modules)
    for name, module in modules:
        if isinstance(module, Linear):
            std = module.weight.shape[1] ** -0.5
            if name.endswith(RESIDUAL_OUTPUTS):
                std /= math.sqrt(layers)
            if name == "lm_head":
                std = LM_HEAD_STD
            module.weight.normal_(0, std, generator=generator)
            if module.bias is not None:
                module.bias.zero_()
        elif isinstance(module, Embedding):
            module.weight.normal_(0, EMBEDDING_STD, generator=generator)
        elif isinstance(module, Mamba2Mixer):
            _initialize_mamba(module, generator)
        elif "norm" in name.rpartition(".")[2]:
            module.weight.fill_(1.0)


def _initialize_mamba(mixer: Mamba2Mixer, generator: torch.Generator) -> None:
    def uniform(like: Tensor, low: float, high: float) -> Tensor:
        return torch.empty_like(like).uniform_(low, high, generator=generator)

    bound = mixer.conv1d.weight.shape[-1] ** -0.5
    mixer.conv1d.weight.uniform_(-bound, bound, generator=generator)
    if mixer.conv1d.bias is not None:
        mixer.conv1d.bias.zero_()
    mixer.A_log.copy_(uniform(mixer.A_log, 1.0, 16.0).log())
    dt = uniform(mixer.dt_bias, math.log(DT_MIN), math.log(DT_MAX)).exp()
    mixer.dt_bias.copy_(dt + torch.log(-torch.expm1(-dt)))  # inverse of softplus
    mixer.D.fill_(1.0)
