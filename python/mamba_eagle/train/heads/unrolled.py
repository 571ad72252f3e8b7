"""Heads that draft token after token: each depth continues from the outputs of the one above it."""

from abc import abstractmethod
from collections.abc import Iterator

from torch import Tensor

from mamba_eagle.drafting.network import DraftNetwork
from mamba_eagle.train.batches import PaddedAnswers
from mamba_eagle.train.heads.base import TrainableHead
from mamba_eagle.train.target import TargetOutputs
from mamba_eagle.train.unrolled_pass import unroll

DEPTH_DECAY = 0.8  # weight of each depth relative to the one above it


class UnrolledHead(TrainableHead):
    """``network`` drafts with the weights of ``module``.

    Shapes: n entries of the draft network, O its output size, W the width of the target's features,
    D the number of tokens that the head can draft.
    """

    network: DraftNetwork

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

    def loss(self, answers: PaddedAnswers, target: TargetOutputs, num_drafts: list[int]) -> Tensor:
        """Cross entropy against the target's distribution plus the head's feature loss, averaged at
        each depth; the depths are then weighted and added."""
        total = target.probs.new_zeros(())
        weights = [DEPTH_DECAY**j for j in range(len(num_drafts))]
        probs = self.target_probs(target.probs)
        features = target.features.flatten(0, 1)
        unrolled = self.unroll(answers.tokens, target.features, len(num_drafts))
        for j, outputs in enumerate(unrolled):
            positions = answers.drafts[j]
            drafted = outputs.flatten(0, 1)[positions.flat]
            log_probs = self.logits(j, drafted).log_softmax(-1)
            loss = -(probs[positions.among_roots] * log_probs).sum(-1)
            feature_loss = self.feature_loss(drafted, features[positions.flat])
            if feature_loss is not None:
                loss = loss + feature_loss
            total = total + weights[j] / sum(weights) * loss.sum() / max(num_drafts[j], 1)
        return total

    def greedy_drafts(
        self, answers: PaddedAnswers, target: TargetOutputs, depth: int
    ) -> Iterator[Tensor]:
        unrolled = self.unroll(answers.tokens, target.features, depth)
        for j, outputs in enumerate(unrolled):
            drafted = outputs.flatten(0, 1)[answers.drafts[j].flat]
            yield self.token_ids(self.logits(j, drafted).argmax(-1))
