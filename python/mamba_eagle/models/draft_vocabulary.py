"""Drafters that know a part of the target's vocabulary: ``d2t`` of their checkpoints."""

from __future__ import annotations

from torch import Tensor

from mamba_eagle.models.loader import CheckpointError


def check_target_ids(ids: Tensor | None, vocab_size: int) -> None:
    """ids: the target's token for each draft token, [draft_vocab_size] int64; None if they agree.
    vocab_size: the target's.

    Raises: CheckpointError if ``d2t`` maps a draft token outside of the target's vocabulary, or two
    of them to the same token.
    """
    if ids is None:
        return
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if len(outside):
        raise CheckpointError(
            f"d2t maps to token {int(outside[0])} of a vocabulary of {vocab_size}: "
            "entry i must be the target's token minus i"
        )
    if ids.unique().numel() < ids.numel():
        raise CheckpointError(
            "d2t maps two draft tokens to one token of the target: each needs its own"
        )
