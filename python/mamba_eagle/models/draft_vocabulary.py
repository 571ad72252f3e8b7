"""Drafters that know a part of the target's vocabulary: ``d2t`` of their checkpoints."""

import torch
from torch import Tensor

from mamba_eagle.layers.layer import Layer
from mamba_eagle.layers.ops import LayerOps
from mamba_eagle.models.loader import CheckpointError
from mamba_eagle.parallel.cut import Cut, rows
from mamba_eagle.parallel.shard import Shard


class DraftVocabularyModel(Layer):
    """Token i of V' draft tokens is token ``target_ids()[i]`` of the target's V."""

    d2t: Tensor | None  # [V'] int64: what to add to a draft token; None: nothing

    def map_tokens(self, size: int, vocab_size: int, mapped: bool) -> None:
        """size, vocab_size: V' and V. mapped: whether there is a ``d2t`` though they are equal."""
        self.draft_vocab_size, self.vocab_size = size, vocab_size
        has_map = mapped or size != vocab_size
        self.register_buffer("d2t", torch.zeros(size, dtype=torch.int64) if has_map else None)
        self._target_ids: Tensor | None = None

    def head_cuts(self, shard: Shard) -> dict[str, Cut]:
        return {"lm_head.weight": rows(shard.span(self.draft_vocab_size))}

    def prepare(self, ops: LayerOps) -> None:
        self._target_ids = self.target_ids()

    def target_ids(self) -> Tensor | None:
        """The target's token for each draft token, [V'] int64; None if they agree."""
        if self.d2t is None or self._target_ids is not None:
            return self._target_ids
        return torch.arange(self.draft_vocab_size, device=self.d2t.device) + self.d2t

    @torch.no_grad()
    def choose_tokens(self, ids: Tensor) -> None:
        """Sets the target's tokens that can be drafted. ids [V'], ascending."""
        assert self.d2t is not None, "a drafter for the whole vocabulary has no choice"
        self.d2t.copy_(ids - torch.arange(self.draft_vocab_size, device=ids.device))

    def check_tokens(self, path: str) -> None:
        """path: the drafter's, for the message.

        Raises: CheckpointError if ``d2t`` maps a draft token outside of the target's vocabulary, or
        two of them to the same token.
        """
        ids = self.target_ids()
        if ids is None:
            return
        outside = ids[(ids < 0) | (ids >= self.vocab_size)]
        if len(outside):
            raise CheckpointError(
                f"{path}: d2t maps to token {int(outside[0])} of a vocabulary of "
                f"{self.vocab_size}: entry i must be the target's token minus i"
            )
        if ids.unique().numel() < ids.numel():
            raise CheckpointError(
                f"{path}: d2t maps two draft tokens to one token of the target: each needs its own"
            )

    def published_weights(self) -> dict[str, Tensor]:
        """What a checkpoint holds, by name. ``t2d`` [V] bool: the tokens it can draft."""
        weights = dict(self.state_dict())
        if (ids := self.target_ids()) is not None:
            weights["t2d"] = torch.zeros(self.vocab_size, dtype=torch.bool)
            weights["t2d"][ids.cpu()] = True
        return weights
