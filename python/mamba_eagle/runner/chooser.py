"""Who turns logits into tokens: one rank alone, or ranks that each have a part of the vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from mamba_eagle.parallel.groups import Group
from mamba_eagle.parallel.vocabulary import whole_logits
from mamba_eagle.runner.sampler import SamplingState, TokenLogprobs, sample, token_logprobs
from mamba_eagle.tree.tree import Tree


class Chooser:
    """One rank, which has all logits: the sampler as it is. Shapes as in sampler.py."""

    def __init__(self, state: SamplingState) -> None:
        self.state, self.place = state, state.backend.place

    def sample(
        self, slots: list[int], logits: Tensor, positions: Tensor, tree: Tree | None
    ) -> Tensor:
        """``sampler.sample`` of logits [b, T, V], or of a rank's columns of these."""
        return sample(self.state, slots, logits, positions, tree)

    def logprobs(self, logits: Tensor, tokens: Tensor, top: int) -> TokenLogprobs:
        """``sampler.token_logprobs`` of logits [n, V], or of a rank's columns of these."""
        return token_logprobs(logits, tokens, top)

    def agree(self, tree: Tree) -> Tree:
        """The trees that all ranks verify."""
        return tree


class GatheredChooser(Chooser):
    """Ranks that first collect all logits."""

    def __init__(self, state: SamplingState, group: Group) -> None:
        super().__init__(state)
        self.group = group

    def sample(
        self, slots: list[int], logits: Tensor, positions: Tensor, tree: Tree | None
    ) -> Tensor:
        tokens = super().sample(slots, self._whole(logits), positions, tree)
        return self.group.from_first(tokens.contiguous())

    def logprobs(self, logits: Tensor, tokens: Tensor, top: int) -> TokenLogprobs:
        return super().logprobs(self._whole(logits), tokens, top)

    def _whole(self, logits: Tensor) -> Tensor:
        flat = whole_logits(logits.flatten(0, -2), self.group, self.state.vocab_size)
        return flat.unflatten(0, logits.shape[:-1])

    def agree(self, tree: Tree) -> Tree:
        """Rank 0's trees; scores stay each rank's own, since rank 0 alone reports them."""
        parts = [tree.tokens[..., None], tree.parents[..., None], tree.depths[..., None]]
        packed = torch.cat([*parts, tree.ancestors.long()], dim=2)
        packed = self.group.from_first(packed.contiguous())
        tokens, parents, depths = (packed[..., i].contiguous() for i in range(3))
        return Tree(tokens, parents, depths, packed[..., 3:].bool(), tree.scores)


def make_chooser(state: SamplingState, group: Group) -> Chooser:
    return Chooser(state) if group.size == 1 else GatheredChooser(state, group)
