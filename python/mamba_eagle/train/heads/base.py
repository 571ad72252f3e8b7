"""What the trainer needs to know about one kind of head."""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from mamba_eagle.config import ConfigError
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
        return self.module.state_dict()
