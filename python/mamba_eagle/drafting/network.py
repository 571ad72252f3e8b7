"""What a drafter's network is to ``ModelDrafter``, which drives it."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from mamba_eagle.backend.base import Backend
from mamba_eagle.kernels.top_log_probs.torch import TopTokens
from mamba_eagle.layers.context import ForwardContext
from mamba_eagle.model_config import ModelConfig


class DraftNetwork(ABC):
    """Entry p takes token p and features of position p-1, and predicts token p+1.

    Sizes: F numbers of an entry's features, O of its output, C carried; V vocabulary.
    """

    config: ModelConfig  # sizes of its attention and Mamba2 layers
    feature_size: int  # F; 0: tokens are all it takes
    output_size: int  # O
    carry_size: int = 0  # C: first columns of an output, which the entry behind it needs
    max_depth: int | None = None  # deepest tree it can draft

    def entry_features(self, target: Tensor) -> Tensor:
        """What an entry takes of the target's features: [n, …] -> [n, F]."""
        return target[:, : self.feature_size]

    @abstractmethod
    def run_entries(
        self, tokens: Tensor, features: Tensor, carry: Tensor, ctx: ForwardContext
    ) -> Tensor:
        """Entries in sequence: tokens [b, E], features [b, E, F], carry [b, C] of the entry ahead
        of them -> outputs [b, E, O]."""

    @abstractmethod
    def lanes(self, depth: int, tokens: Tensor, above: Tensor, ctx: ForwardContext) -> Tensor:
        """Drafted entries at ``depth`` 1, 2, …: tokens [n], outputs [n, O] of the entries above
        them -> outputs [n, O]."""

    @abstractmethod
    def logits(self, depth: int, outputs: Tensor) -> Tensor:
        """Of the tokens behind entries at ``depth`` (the root: 0), those of the network's own
        vocabulary: [n, O] -> [n, own V], in the dtype that they are made in."""

    def log_probs(self, depth: int, outputs: Tensor) -> Tensor:
        """Of all tokens: [n, O] -> [n, V] float32."""
        return self.logits(depth, outputs).float().log_softmax(-1)

    def best(self, depth: int, outputs: Tensor, k: int, backend: Backend) -> TopTokens:
        """The k best of ``log_probs``: [n, O] -> [n, k]."""
        return backend.top_log_probs(self.logits(depth, outputs), k)

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Memory of its own weights."""
