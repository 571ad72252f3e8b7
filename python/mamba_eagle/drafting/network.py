"""The interface of a drafter's network, which ``ModelDrafter`` drives."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from torch import Tensor

from mamba_eagle.backend.programs import Network
from mamba_eagle.layers.context import ForwardContext
from mamba_eagle.layers.linear import Linear
from mamba_eagle.layers.weights import weight_bytes
from mamba_eagle.model_config import ModelConfig
from mamba_eagle.models.base import CausalLM


class DraftNetwork(ABC):
    """Entry p takes token p and features of position p-1, and predicts token p+1.

    Sizes: F elements in an entry's features, O in its output, C in its carry; V' vocabulary.
    """

    config: ModelConfig  # sizes of its attention and Mamba2 layers
    feature_size: int  # F; 0: entries take tokens alone
    carry_size: int = 0  # C: first columns of an output, which the next entry needs
    reads_above: bool = True  # whether ``lanes`` does anything with the outputs of parents

    def entry_features(self, target: Tensor) -> Tensor:
        """The features of entries, from those of the target: [n, target's size] -> [n, F]."""
        return target[:, : self.feature_size]

    @abstractmethod
    def run_entries(
        self, tokens: Tensor, features: Tensor, carry: Tensor, ctx: ForwardContext
    ) -> Tensor:
        """Process E consecutive entries: tokens [b, E], features [b, E, F], carry [b, C] of the
        entry before them -> outputs [b, E, O]."""

    @abstractmethod
    def lanes(self, depth: int, tokens: Tensor, above: Tensor, ctx: ForwardContext) -> Tensor:
        """Process drafted entries at ``depth`` >= 1: tokens [n], ``above`` [n, O], the outputs of
        their parents -> outputs [n, O]."""

    @abstractmethod
    def logits(self, depth: int, outputs: Tensor) -> Tensor:
        """Logits of the tokens that follow entries at ``depth`` (the root: 0), of those in the
        network's vocabulary that this rank has: [n, O] -> [n, own V'], any float dtype."""

    def target_ids(self) -> Tensor | None:
        """The target's token for each in its vocabulary, [V'] int64; None if they agree."""
        return None

    def parts(self) -> Network | None:
        """What the network consists of, for backends that run it in a way of their own; None if it
        is not of that form."""
        return None

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Bytes of its own weights."""


class HeadNetwork(DraftNetwork):
    """Of a head on the target's hidden states, whose output takes the place of a drafted entry's
    feature."""

    def __init__(self, head: Any, target: CausalLM, output: Linear | None = None) -> None:
        """output: what makes logits; None: the target's lm_head."""
        self.head, self.target, self.output, self.config = head, target, output, head.config
        self.feature_size = head.config.hidden_size
        self.embed: Callable[[Tensor], Tensor] = target.embed
        self.lm_head: Callable[[Tensor], Tensor] = target.raw_logits if output is None else output

    def run(self, tokens: Tensor, features: Tensor, ctx: ForwardContext) -> Tensor:
        """tokens [n], features [n, F] -> outputs [n, O]."""
        outputs: Tensor = self.head(self.embed(tokens), features, ctx)
        return outputs

    def run_entries(
        self, tokens: Tensor, features: Tensor, carry: Tensor, ctx: ForwardContext
    ) -> Tensor:
        outputs = self.run(tokens.reshape(-1), features.flatten(0, 1), ctx)
        return outputs.unflatten(0, tokens.shape)

    def lanes(self, depth: int, tokens: Tensor, above: Tensor, ctx: ForwardContext) -> Tensor:
        return self.run(tokens, above, ctx)

    def logits(self, depth: int, outputs: Tensor) -> Tensor:
        return self.lm_head(outputs)

    @property
    def num_bytes(self) -> int:
        output = 0 if self.output is None else weight_bytes(self.output)
        return weight_bytes(self.head) + output
