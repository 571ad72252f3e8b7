"""The target's tokens for a batch in which some requests have grammars.

A mask costs more than it costs to ask whether one token may follow. On a CPU, where the sampler's
result is at hand, tokens are sampled without masks first, and only where the grammar refuses the
target's own choice is a mask made and that node sampled again. The tokens are the same: whatever is
the best of all tokens and allowed is the best of those that are allowed. That does not hold for
filters, which keep other tokens under a mask, nor for penalties at the nodes of a tree, whose
counts would have to be gathered again; requests with these get all masks first. Nodes beside the
accepted path are not looked at, so their tokens may be ones that the grammar refuses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mamba_eagle.backend.pools import RequestTable
from mamba_eagle.constrain.place import Row
from mamba_eagle.constrain.request import RequestGrammar, is_allowed
from mamba_eagle.runner.chooser import Chooser
from mamba_eagle.runner.constraints import Constraints, Marks, TokenMasks, TreeView
from mamba_eagle.runner.sampler import NO_TOKEN, SamplingState
from mamba_eagle.tree.tree import Tree


class MasksFirst:
    """Masks of all nodes, then the sampler. On a GPU masks are made while the device verifies."""

    def __init__(self, constraints: Constraints, chooser: Chooser) -> None:
        self.constraints, self.chooser = constraints, chooser

    def choose(
        self,
        slots: list[int],
        logits: Tensor,
        positions: Tensor,
        tree: Tree | None = None,
        view: TreeView | None = None,
    ) -> tuple[Tensor, Marks]:
        """The target's token at each node, [b, T] int64, as ``sampler.sample``.

        slots, logits [b, T, V], positions [b, T]: as there. tree, view: of a decode step; without
        them T is 1 and the tokens are the first ones after the prompts.
        """
        made = self.constraints.first_masks(slots) if view is None else view.masks()
        return self.chooser.sample(slots, logits, positions, tree, made[0]), made[1]


class MasksOnDemand(MasksFirst):
    """Masks where the sampled tokens are refused."""

    def __init__(
        self,
        constraints: Constraints,
        chooser: Chooser,
        sampling: SamplingState,
        table: RequestTable,
    ) -> None:
        super().__init__(constraints, chooser)
        self.sampling, self.table = sampling, table

    def choose(
        self,
        slots: list[int],
        logits: Tensor,
        positions: Tensor,
        tree: Tree | None = None,
        view: TreeView | None = None,
    ) -> tuple[Tensor, Marks]:
        self.constraints.read_all()
        walks: list[_Walk] = []
        at_once: list[int] = []
        for i, slot in enumerate(slots):
            grammar = self.constraints.grammar(slot)
            if grammar is not None and self._may_wait(slot):
                walks.append(_Walk(i, grammar, self.sampling.needs_more_than_best(slot)))
            elif grammar is not None:
                at_once.append(i)
        allowed, marks = None, Marks({}, {})
        if at_once:
            trees = self._trees(at_once, tree)
            allowed, marks = self.constraints.masks(slots, trees, logits.shape[1])
        target = self.chooser.sample(slots, logits, positions, tree, allowed)
        if walks:
            self._walk(walks, slots, logits, positions, target, tree)
        for walk in walks:
            if walk.grammar.problem:
                marks.problems[walk.index] = walk.grammar.problem
        return target, marks

    def _may_wait(self, slot: int) -> bool:
        """Whether a token that is best without a mask is best with it, if allowed. A trace shows
        which nodes are refused, and needs all masks."""
        traced = self.table.wants_trace[slot]
        return not traced and not self.sampling.filters_or_counts(slot)

    def _trees(
        self, indices: Sequence[int], tree: Tree | None
    ) -> dict[int, tuple[list[int], list[int]]]:
        """Tokens and parents by index in the batch."""
        if tree is None:
            return {i: ([0], [0]) for i in indices}
        return {i: (tree.tokens[i].tolist(), tree.parents[i].tolist()) for i in indices}

    def _walk(
        self,
        walks: Sequence[_Walk],
        slots: Sequence[int],
        logits: Tensor,
        positions: Tensor,
        target: Tensor,
        tree: Tree | None,
    ) -> None:
        """Follow the target's tokens through the trees; ``target`` gets those that were sampled
        again."""
        tokens = target.tolist()
        if logits.shape[1] > 1:
            assert tree is not None
            drafted, parents = tree.tokens.tolist(), tree.parents.tolist()
            for walk in walks:
                walk.drafted, walk.parents = drafted[walk.index], parents[walk.index]
        while True:
            refused = [walk for walk in walks if walk.is_refused(tokens[walk.index], logits)]
            if not refused:
                break
            index = torch.tensor([walk.index for walk in refused])
            nodes = torch.tensor([walk.node for walk in refused])
            masks = np.stack([walk.mask for walk in refused]).view(np.int32)
            again = self.chooser.sample(
                [slots[walk.index] for walk in refused],
                logits[index, nodes][:, None],
                positions[index, nodes][:, None],
                None,
                TokenMasks(torch.arange(len(refused)), torch.from_numpy(masks)),
            )
            for walk, token in zip(refused, again[:, 0].tolist()):
                walk.write(tokens[walk.index], token)
        changed = [walk.index for walk in walks if walk.changed]
        if changed:
            target[changed] = torch.tensor([tokens[i] for i in changed])


class _Walk:
    """One request's way through its tree, as far as the target's tokens are drafted."""

    def __init__(self, index: int, grammar: RequestGrammar, is_noisy: bool) -> None:
        """index: in the batch. is_noisy: more than the logits decides on the best token."""
        self.index, self.grammar, self.is_noisy = index, grammar, is_noisy
        self.node: int | None = 0  # None: the way has ended
        self.place = grammar.root
        self.mask: Row | None = None  # under which the node was sampled
        self.changed = False
        self.drafted: list[int] = []  # tokens by node, and their parents
        self.parents: list[int] = []

    def is_refused(self, target: list[int], logits: Tensor) -> bool:
        """Go on along the target's tokens; True at a node that has to be sampled again, under a
        ``mask``. target [T] gets the tokens that are known without; logits: [b, T, V]"""
        grammar = self.grammar
        while self.node is not None:
            token = target[self.node]
            below = grammar.below(self.place, token) if token != NO_TOKEN else None
            if below is not None:
                self.node, self.place, self.mask = self._child(self.node, token), below, None
            elif self.mask is not None or self._may_end_with(token):
                self.node = None
            elif not self._knows_token(target, logits):
                return True
        return False

    def _child(self, above: int, token: int) -> int | None:
        for node in range(above + 1, len(self.drafted)):
            if self.drafted[node] == token and self.parents[node] == above:
                return node
        return None

    def write(self, target: list[int], token: int) -> None:
        """What is sampled at the node, under the mask."""
        assert self.node is not None
        target[self.node], self.changed = token, True

    def _may_end_with(self, token: int) -> bool:
        """Whether the output may end with a token that was sampled without a mask."""
        if not self.grammar.may_end_with(token):
            return False
        mask = self.grammar.mask(self.place)
        return mask is not None and is_allowed(mask, token)

    def _knows_token(self, target: list[int], logits: Tensor) -> bool:
        """Whether the token that the mask leaves can be told at once; it is in ``target`` then."""
        grammar, own = self.grammar, logits[self.index, self.node]
        forced = grammar.forced(self.place)
        if forced is not None and not grammar.may_end_with(forced):
            # the mask would leave this token alone
            token = forced if math.isfinite(own[forced]) else NO_TOKEN
            self.mask = _ASKED
        else:
            self.mask = grammar.mask(self.place)
            if self.mask is None:  # the grammar cannot tell: nothing may follow
                self.mask = grammar.empty_mask()
            if self.is_noisy:
                return False
            token = best_allowed(own.float().numpy(), self.mask)
        self.write(target, token)
        return True


_ASKED: Row = np.empty(0, dtype=np.uint32)  # a mask that was not needed


def best_allowed(logits: NDArray[np.float32], mask: Row) -> int:
    """The lowest token id with the highest logit among those that a mask [W] allows; NO_TOKEN if
    that logit is not finite. logits: [V]"""
    bits = np.unpackbits(mask.view(np.uint8), count=len(logits), bitorder="little")
    scores = np.where(bits, logits, np.float32(-np.inf))
    best = int(scores.argmax())
    return best if np.isfinite(scores[best]) else NO_TOKEN
