"""What the trainer needs to know about one kind of head."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from mamba_eagle.drafting.network import DraftNetwork
from mamba_eagle.model_config import ModelConfig
from mamba_eagle.models.base import CausalLM
from mamba_eagle.train.batches import Answer
from mamba_eagle.train.settings import TrainSettings
from mamba_eagle.train.unrolled_pass import unroll


class TrainableHead(ABC):
    """A head under training: ``module`` holds its weights, ``network`` drafts with them.

    Shapes: n entries of the draft network, O its output size, W the width of the target's features,
    D the number of tokens that the head can draft.
    """

    config: dict[str, Any]  # its config.json
    module: nn.Module
    network: DraftNetwork

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

    def unroll(self, tokens: Tensor, features: Tensor, depth: int) -> Iterator[Tensor]:
        """See :func:`mamba_eagle.train.unrolled_pass.unroll`."""
        return unroll(self.network, tokens, features, depth)

    @abstractmethod
    def logits(self, depth: int, outputs: Tensor) -> Tensor:
        """Logits of the head's own vocabulary: outputs [n, O] of entries at ``depth`` -> [n, D]
        float32."""

    def target_probs(self, probs: Tensor) -> Tensor:
        """The target's distribution [n, vocab_size], restricted to the head's vocabulary [n, D]."""
        return probs

    def token_ids(self, choice: Tensor) -> Tensor:
        """Maps indices into the head's vocabulary to the target's token ids, both [n]."""
        return choice

    def feature_loss(self, outputs: Tensor, features: Tensor) -> Tensor | None:
        """A loss in addition to the cross entropy: outputs [n, O] and the target's features [n, W]
        at the same positions -> [n]; None if this kind of head has none."""
        return None

    def weights(self) -> dict[str, Tensor]:
        """The tensors of its checkpoint, by name."""
        return self.module.state_dict()
