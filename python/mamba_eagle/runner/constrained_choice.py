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

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from mamba_eagle.backend.pools import RequestTable
from mamba_eagle.constrain.request import RequestGrammar, Row
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
        trees = self._trees(slots, tree)
        walks = [
            _Walk(i, self.constraints.grammar(slots[i]), *own)
            for i, own in trees.items()
            if self._may_wait(slots[i])
        ]
        waiting = {walk.index for walk in walks}
        others = {i: own for i, own in trees.items() if i not in waiting}
        allowed, marks = self.constraints.masks(slots, others, logits.shape[1])
        allowed = _joined(allowed, [row for walk in walks for row in walk.known_rows()])
        target = self.chooser.sample(slots, logits, positions, tree, allowed)
        if walks:
            self._walk(walks, slots, logits, positions, target)
        for walk in walks:
            walk.leave()
            if walk.grammar.problem:
                marks.problems[walk.index] = walk.grammar.problem
        return target, marks

    def _may_wait(self, slot: int) -> bool:
        """Whether a token that is best without a mask is best with it, if allowed. A trace shows
        which nodes are refused, and needs all masks."""
        traced = self.table.wants_trace[slot]
        return not traced and not self.sampling.filters_or_counts(slot)

    def _trees(
        self, slots: Sequence[int], tree: Tree | None
    ) -> dict[int, tuple[list[int], list[int]]]:
        """Tokens and parents by index in the batch, of the constrained requests."""
        constrained = [i for i, slot in enumerate(slots) if self.constraints.grammar(slot)]
        if tree is None:
            return {i: ([0], [0]) for i in constrained}
        tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
        return {i: (tokens[i], parents[i]) for i in constrained}

    def _walk(
        self,
        walks: Sequence[_Walk],
        slots: Sequence[int],
        logits: Tensor,
        positions: Tensor,
        target: Tensor,
    ) -> None:
        """Follow the target's tokens through the trees; ``target`` gets those that were sampled
        again."""
        tokens = target.tolist()
        while True:
            refused = [walk for walk in walks if walk.is_refused(tokens[walk.index])]
            if not refused:
                return
            index = torch.tensor([walk.index for walk in refused])
            nodes = torch.tensor([walk.node for walk in refused])
            masks = np.stack([walk.mask for walk in refused]).view(np.int32)
            again = self.chooser.sample(
                [slots[walk.index] for walk in refused],
                logits[index, nodes][:, None],
                positions[index, nodes][:, None],
                None,
                TokenMasks(torch.arange(len(refused)), torch.from_numpy(masks)),
            )[:, 0]
            target[index, nodes] = again
            for walk, token in zip(refused, again.tolist()):
                tokens[walk.index][walk.node] = token


class _Walk:
    """One request's way through its tree, as far as the target's tokens are drafted."""

    def __init__(
        self, index: int, grammar: RequestGrammar | None, tokens: list[int], parents: list[int]
    ) -> None:
        """index: in the batch."""
        assert grammar is not None
        self.index, self.grammar = index, grammar
        self.node: int | None = 0  # None: the way has ended
        self.mask: Row | None = None  # under which the node was sampled
        self._tokens, self._parents, self._depth = tokens, parents, 0
        self._children = {
            (parents[node], tokens[node]): node for node in range(len(tokens) - 1, 0, -1)
        }

    def known_rows(self) -> list[tuple[int, Row]]:
        """Nodes, as indices in the batch's flat trees, whose masks drafting has asked for."""
        if not self.grammar.knows_masks:
            return []
        paths: list[tuple[int, ...]] = [()]
        for node in range(1, len(self._tokens)):
            paths.append((*paths[self._parents[node]], self._tokens[node]))
        first = self.index * len(paths)
        known = [self.grammar.known_mask_behind(path) for path in paths]
        self.mask = known[0]
        return [(first + node, row) for node, row in enumerate(known) if row is not None]

    def is_refused(self, target: list[int]) -> bool:
        """Go on along the target's tokens; True at a node whose token the grammar refuses, which
        then has a ``mask``. target: [T]"""
        while self.node is not None:
            token = target[self.node]
            if token == NO_TOKEN or not self.grammar.takes(token):
                return self._ends_or_is_refused(token)
            self._depth += 1
            self.node = self._children.get((self.node, token))
            self.mask = None if self.node is None else self.grammar.known_mask()
        return False

    def _ends_or_is_refused(self, token: int) -> bool:
        if self.mask is None:
            self.mask = self.grammar.mask()
            if self.mask is None:  # the grammar cannot tell: nothing may follow
                self.mask = self.grammar.empty_mask()
            if token == NO_TOKEN or not int(self.mask[token >> 5]) >> (token & 31) & 1:
                return True
        self.node = None  # an end token, or none
        return False

    def leave(self) -> None:
        """The grammar is back where it was."""
        for _ in range(self._depth):
            self.grammar.step_out()


def _joined(allowed: TokenMasks | None, known: Sequence[tuple[int, Row]]) -> TokenMasks | None:
    """Masks, and others by index of their node."""
    if not known:
        return allowed
    rows = torch.tensor([row for row, _ in known])
    masks = torch.from_numpy(np.stack([mask for _, mask in known]).view(np.int32))
    if allowed is None:
        return TokenMasks(rows, masks)
    return TokenMasks(torch.cat([allowed.rows, rows]), torch.cat([allowed.masks, masks]))
