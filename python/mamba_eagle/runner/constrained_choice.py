"""The target's tokens for a batch in which some requests have grammars.

A mask costs more than it costs to ask whether one token may follow. So where the sampler's result
is at hand, or masks would keep the device waiting, tokens are sampled without masks first, and only
where the grammar refuses the target's own choice is a mask made and that node sampled again. The
tokens are the same: whatever is the best of all tokens and allowed is the best of those that are
allowed. That does not hold for filters, which keep other tokens under a mask, nor for penalties at
the nodes of a tree, whose counts would have to be gathered again; requests with these get all masks
first. Nodes beside the accepted path are not looked at, so their tokens may be ones that the
grammar refuses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mamba_eagle.backend.pools import RequestTable
from mamba_eagle.constrain.place import Row, is_allowed
from mamba_eagle.constrain.request import RequestGrammar
from mamba_eagle.kernels.best_token.torch import NO_TOKEN
from mamba_eagle.runner.chooser import Chooser
from mamba_eagle.runner.constraints import Constraints, Marks, NodeLists, TokenMasks, TreeView
from mamba_eagle.runner.sampler import Scored


class MasksFirst:
    """Masks of all nodes, then the sampler. On a GPU masks are made while the device verifies."""

    def __init__(self, constraints: Constraints, chooser: Chooser) -> None:
        self.constraints, self.chooser = constraints, chooser

    def choose(self, nodes: Scored, view: TreeView | None = None) -> tuple[Tensor, Marks]:
        """The target's token at each node, [b, T] int64, as ``Chooser.sample``.

        view: of a decode step's trees; None: the tokens are the first ones after the prompts.
        """
        trees = dict(enumerate(self._trees(nodes, view)))
        allowed, marks = self.constraints.masks(nodes.slots, trees, nodes.logits.shape[1])
        return self.chooser.sample(nodes, allowed), marks

    @staticmethod
    def _trees(nodes: Scored, view: TreeView | None) -> Sequence[NodeLists]:
        """By request; waits as ``TreeView.trees``."""
        return [([0], [0])] * len(nodes.slots) if view is None else view.trees()


class MasksOnDemand(MasksFirst):
    """Masks where the sampled tokens are refused."""

    def __init__(self, constraints: Constraints, chooser: Chooser, table: RequestTable) -> None:
        super().__init__(constraints, chooser)
        self.sampling, self.table, self.place = chooser.state, table, constraints.place

    def choose(self, nodes: Scored, view: TreeView | None = None) -> tuple[Tensor, Marks]:
        return self._choose(nodes, self._trees(nodes, view))

    def _choose(
        self,
        nodes: Scored,
        trees: Sequence[NodeLists],
        ahead: Callable[[Sequence[Walk]], TokenMasks | None] = lambda walks: None,
    ) -> tuple[Tensor, Marks]:
        """trees: by request. ahead: makes masks before anything is sampled."""
        walks: list[Walk] = []
        at_once: dict[int, NodeLists] = {}
        for i, slot in enumerate(nodes.slots):
            grammar = self.constraints.grammar(slot)
            if grammar is not None and self._may_wait(slot):
                walks.append(self._walk_of(i, slot, grammar, trees[i]))
            elif grammar is not None:
                at_once[i] = trees[i]
        allowed, marks = self.constraints.masks(nodes.slots, at_once, nodes.logits.shape[1])
        if walks and (made := ahead(walks)) is not None:
            allowed = made if allowed is None else _joined(allowed, made)
        target = self.chooser.sample(nodes, allowed)
        if walks:
            self._walk(walks, nodes, target)
        for walk in walks:
            if walk.grammar.problem:
                marks.problems[walk.index] = walk.grammar.problem
        return target, marks

    def _may_wait(self, slot: int) -> bool:
        """Whether a token that is best without a mask is best with it, if allowed. A trace shows
        which nodes are refused, and needs all masks."""
        traced = self.table.wants_trace[slot]
        return not traced and not self.sampling.filters_or_counts(slot)

    def _walk_of(self, index: int, slot: int, grammar: RequestGrammar, tree: NodeLists) -> Walk:
        """The sampler is asked again where a token is refused if more than the logits decides on
        the best one."""
        return Walk(index, grammar, tree, self.sampling.asks(slot))

    def _walk(self, walks: Sequence[Walk], nodes: Scored, target: Tensor) -> None:
        """Follow the target's tokens through the trees; ``target`` gets those that were sampled
        again."""
        tokens = target.tolist()
        while True:
            refused = [walk for walk in walks if walk.is_refused(tokens[walk.index], nodes.logits)]
            if not refused:
                break
            index = self.place.to_device([walk.index for walk in refused])
            node = self.place.to_device([walk.node for walk in refused])
            some = Scored(
                [nodes.slots[walk.index] for walk in refused],
                nodes.logits[index, node][:, None],
                nodes.positions[index, node][:, None],
            )
            masks = self.constraints.host_masks(len(refused))
            found = [walk.mask for walk in refused if walk.mask is not None]
            np.stack(found, out=masks.numpy().view(np.uint32))
            again = self.chooser.sample(some, self.constraints.send(range(len(refused)), masks))
            for walk, token in zip(refused, again[:, 0].tolist()):
                walk.write(tokens[walk.index], token)
        changed = [walk.index for walk in walks if walk.changed]
        if self.place.on_host:
            rows = target.numpy()  # an assignment of tensors would take longer than most walks
            for i in changed:
                rows[i] = tokens[i]
        elif changed:
            made = self.place.to_device([tokens[i] for i in changed])
            target[self.place.to_device(changed)] = made


def _joined(some: TokenMasks, others: TokenMasks) -> TokenMasks:
    return TokenMasks(torch.cat([some.rows, others.rows]), torch.cat([some.masks, others.masks]))


class Walk:
    """One request's way through its tree, while the target's tokens are drafted ones."""

    def __init__(
        self, index: int, grammar: RequestGrammar, tree: NodeLists, is_resampled: bool
    ) -> None:
        """index: in the batch. is_resampled: the sampler is asked again where a token is
        refused."""
        self.index, self.grammar, self.is_resampled = index, grammar, is_resampled
        self.drafted, self.parents = tree
        self.node: int | None = 0  # None: the way has ended
        self.place = grammar.root
        self.mask: Row | None = None  # under which the node was sampled
        self.changed = False

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
        """Whether the token that the mask leaves is known at once; it is in ``target`` then."""
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
            if self.is_resampled:
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
