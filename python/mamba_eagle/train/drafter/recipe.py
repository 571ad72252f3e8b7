"""What one kind of head is to the trainer, and the unrolled pass that all kinds share.

While drafting, only the first guess after a verify step is made from the target's own hidden
states; each further one is made from the head's guess before it. Training unrolls that: step 0 uses
the target's features, step j feeds back the head's outputs of step j - 1 (HASS, arXiv 2408.15766;
"training-time test" of EAGLE-3, arXiv 2503.01840).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from mamba_eagle.drafting.network import DraftNetwork
from mamba_eagle.model_config import ModelConfig
from mamba_eagle.models.base import CausalLM
from mamba_eagle.train.context import UnrolledContext, shift
from mamba_eagle.train.drafter.batches import Answer, Rows
from mamba_eagle.train.drafter.settings import TrainSettings
from mamba_eagle.train.drafter.target import Taught

STEP_DECAY = 0.8  # weight of a step of the unrolled pass, beside the one before it


class Recipe(ABC):
    """A head under training. ``module`` has its weights, ``network`` drafts with them."""

    config: dict[str, Any]  # its config.json
    module: nn.Module
    network: DraftNetwork

    @abstractmethod
    def __init__(
        self, settings: TrainSettings, target: CausalLM, answers: Sequence[Answer]
    ) -> None:
        """A new head for ``target``, in float32 where the target is; ``answers`` are those that it
        will be trained on. The target gives the features that the head reads from here on."""

    @classmethod
    def problems(cls, settings: TrainSettings, target: ModelConfig) -> list[str]:
        """Why no such head can be made, with values and remedy."""
        return []

    def unroll(self, tokens: Tensor, features: Tensor, depth: int) -> Iterator[Tensor]:
        """As the function ``unroll``."""
        return unroll(self.network, tokens, features, depth)

    @abstractmethod
    def logits(self, depth: int, outputs: Tensor) -> Tensor:
        """Of the D tokens that the head knows, behind entries at ``depth``: outputs [n, O] ->
        [n, D] float32."""

    def wanted(self, wanted: Tensor) -> Tensor:
        """The target's distribution [n, vocab_size] -> what of it falls on the D tokens, [n, D]."""
        return wanted

    def token_ids(self, choice: Tensor) -> Tensor:
        """The target's tokens of those numbered among the D, [n]."""
        return choice

    def distance(self, outputs: Tensor, features: Tensor) -> Tensor | None:
        """What a guess costs beside its cross entropy: outputs [n, O], features [n, W] of the
        target in the same place -> [n]."""
        return None

    def weights(self) -> dict[str, Tensor]:
        """What its checkpoint holds, by name."""
        return self.module.state_dict()


class Begun(NamedTuple):
    """The first step of an unrolled pass."""

    outputs: Tensor  # [b, l, O]
    context: UnrolledContext


def begin(network: DraftNetwork, tokens: Tensor, features: Tensor) -> Begun:
    """True entries, as ``DraftNetwork.chain`` runs them: tokens [b, l]; features [b, l, W]."""
    context = UnrolledContext(*tokens.shape, tokens.device)
    given = network.entry_features(features.flatten(0, 1)).unflatten(0, tokens.shape)
    carry = given.new_zeros(len(tokens), network.carry_size)
    return Begun(network.chain(tokens, shift(given, 1), carry, context), context)


def unroll(network: DraftNetwork, tokens: Tensor, features: Tensor, depth: int) -> Iterator[Tensor]:
    """Outputs [b, l, O] of ``depth`` steps; entry p is a draft's token ``step`` places behind its
    root and says what comes at p + 1. The first ``step`` places mean nothing.

    Args: tokens [b, l]; features [b, l, W] of the target at the tokens.
    """
    outputs, context = begin(network, tokens, features)
    yield outputs
    for step in range(1, depth):
        above = shift(outputs, 1).flatten(0, 1)
        outputs = network.lanes(step, tokens.flatten(), above, context)
        outputs = outputs.unflatten(0, tokens.shape)
        yield outputs


def draft_loss(recipe: Recipe, rows: Rows, taught: Taught, guesses: list[int]) -> Tensor:
    """Cross entropy against the target's distribution, and the head's own ``distance``: the mean
    over ``guesses[j]`` guesses at each depth j, weighted and added up. These may be more than the
    rows have: then the loss is a part of a larger batch's."""
    total = taught.wanted.new_zeros(())
    depth = len(guesses)
    weights = [STEP_DECAY**j for j in range(depth)]
    known = recipe.wanted(taught.wanted)
    features = taught.features.flatten(0, 1)
    for j, outputs in enumerate(recipe.unroll(rows.tokens, taught.features, depth)):
        places = rows.drafts[j]
        drafted = outputs.flatten(0, 1)[places.flat]
        wanted = known[places.among_roots]
        loss = -(wanted * recipe.logits(j, drafted).log_softmax(-1)).sum(-1)
        distance = recipe.distance(drafted, features[places.flat])
        if distance is not None:
            loss = loss + distance
        total = total + weights[j] / sum(weights) * loss.sum() / max(guesses[j], 1)
    return total
