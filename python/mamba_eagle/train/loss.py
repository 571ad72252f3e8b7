"""The loss of a draft head."""

from __future__ import annotations

from torch import Tensor

from mamba_eagle.train.batches import PaddedAnswers
from mamba_eagle.train.heads.base import TrainableHead
from mamba_eagle.train.target import TargetOutputs

DEPTH_DECAY = 0.8  # weight of each depth relative to the one above it


def draft_loss(
    head: TrainableHead, answers: PaddedAnswers, target: TargetOutputs, num_drafts: list[int]
) -> Tensor:
    """Cross entropy against the target's distribution plus the head's feature loss.

    At each depth j it is averaged over ``num_drafts[j]`` drafts; the depths are then weighted and
    added. The numbers may exceed those of ``answers``: the result is then this pass's part of the
    loss of a larger batch.
    """
    total = target.probs.new_zeros(())
    weights = [DEPTH_DECAY**j for j in range(len(num_drafts))]
    probs = head.target_probs(target.probs)
    features = target.features.flatten(0, 1)
    unrolled = head.unroll(answers.tokens, target.features, len(num_drafts))
    for j, outputs in enumerate(unrolled):
        positions = answers.drafts[j]
        drafted = outputs.flatten(0, 1)[positions.flat]
        log_probs = head.logits(j, drafted).log_softmax(-1)
        loss = -(probs[positions.among_roots] * log_probs).sum(-1)
        feature_loss = head.feature_loss(drafted, features[positions.flat])
        if feature_loss is not None:
            loss = loss + feature_loss
        total = total + weights[j] / sum(weights) * loss.sum() / max(num_drafts[j], 1)
    return total
