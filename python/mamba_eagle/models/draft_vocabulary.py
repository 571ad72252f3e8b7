"""Drafters that know a part of the target's vocabulary: ``d2t`` of their checkpoints."""

from collections.abc import Container

import torch
from torch import Tensor

from mamba_eagle.layers.embedding import Embedding
from mamba_eagle.layers.layer import Layer
from mamba_eagle.layers.linear import Linear
from mamba_eagle.layers.ops import LayerOps
from mamba_eagle.model_config import ModelConfig, Span
from mamba_eagle.models.loader import CheckpointError
from mamba_eagle.parallel.cut import Cut, rows
from mamba_eagle.parallel.shard import Shard


class DraftVocabularyModel(Layer):
    """Token i of V' draft tokens is token ``target_ids()[i]`` of the target's V."""

    d2t: Tensor | None  # [V'] int64: what to add to a draft token; None: nothing
    embed_tokens: Embedding | None  # None: the target's
    lm_head: Linear | None

    def make_vocabulary(
        self, config: ModelConfig, size: int, foreign: bool, stored: Container[str]
    ) -> None:
        """size: V'. foreign: whether the target has another hidden size, so that nothing of it can
        be used. stored: names in the checkpoint, which say what there is though the target's would
        do."""
        self.draft_vocab_size, self.vocab_size = size, config.vocab_size
        reduced = size != config.vocab_size
        self.embed_tokens = self.lm_head = None
        if "embed_tokens.weight" in stored or foreign:
            self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        if "lm_head.weight" in stored or reduced or foreign:
            self.lm_head = Linear(config.hidden_size, (config.head_tokens or Span(0, size)).size)
        has_map = "d2t" in stored or reduced
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
