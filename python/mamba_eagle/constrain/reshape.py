"""Gives a draft tree's places to nodes that may be accepted.

Refused nodes leave, and where the grammar forces the next tokens, these become a chain: a mask of
one token makes them certain to be accepted. Nothing is put into a text: the target samples at each
of them as everywhere.

Masks are looked at where a drafted token is refused though others may follow. So a tree that fits,
as within free text, costs a step of the matcher per node and no mask.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mamba_eagle.constrain.place import Place, Row, is_allowed
from mamba_eagle.constrain.request import RequestGrammar


class DraftTree(NamedTuple):
    """A tree of one request in plain numbers; depths never decrease."""

    tokens: list[int]  # [T]
    parents: list[int]  # [T]
    scores: list[float]  # [T], log-probabilities of the paths under the drafter


class _Candidate(NamedTuple):
    token: int
    parent: int  # index among the candidates
    depth: int
    score: float


def reshape(grammar: RequestGrammar, tree: DraftTree, max_depth: int) -> DraftTree:
    """A tree of as many nodes, none deeper than ``max_depth``; ``tree`` itself if it is fine.

    Kept are the nodes with the best scores, and a forced node has that of its parent. If there are
    too few, refused ones fill up the tree: no path leads to them.
    """
    growing = _Growing(grammar, tree, max_depth)
    if not growing.changed:
        return tree
    size, candidates = len(tree.tokens), growing.candidates
    # a parent comes before its children: it has a lower index and no lower score
    best = sorted(range(len(candidates)), key=lambda i: -candidates[i].score)[:size]
    chosen = sorted(best, key=lambda i: (candidates[i].depth, -candidates[i].score))
    place = {candidate: node for node, candidate in enumerate(chosen)}
    tokens = [candidates[i].token for i in chosen]
    parents = [place[candidates[i].parent] for i in chosen]
    scores = [candidates[i].score for i in chosen]
    return DraftTree(tokens, parents, scores)


class _Growing:
    """Collects the nodes that the grammar allows, those that it forces, and then the others."""

    def __init__(self, grammar: RequestGrammar, tree: DraftTree, max_depth: int) -> None:
        self.grammar, self.tree, self.max_depth = grammar, tree, max_depth
        self.children: list[list[int]] = [[] for _ in tree.tokens]
        for node in range(1, len(tree.tokens)):
            self.children[tree.parents[node]].append(node)
        self.candidates = [_Candidate(tree.tokens[0], 0, 0, 0.0)]
        self.changed = False
        self._refused: list[tuple[int, int]] = []  # nodes, and their parents' candidates
        self._visit(0, grammar.root, self.children[0])
        for node, above in self._refused:
            self._fill_up(node, above)

    def _add(self, token: int, parent: int, score: float) -> int:
        # rounding must not lift a node above its parent
        score = min(score, self.candidates[parent].score)
        depth = self.candidates[parent].depth + 1
        self.candidates.append(_Candidate(token, parent, depth, score))
        return len(self.candidates) - 1

    def _visit(self, above: int, place: Place, children: Sequence[int]) -> None:
        """``place`` is that of candidate ``above``."""
        if self.candidates[above].depth == self.max_depth:
            return
        grammar, tokens = self.grammar, self.tree.tokens
        forced = grammar.forced(place)
        if forced is None:
            if not all(grammar.below(place, tokens[child]) for child in children):
                self._choose(above, place, children)
                return
            if children or not grammar.is_over(place):
                for child in children:
                    added = self._add(tokens[child], above, self.tree.scores[child])
                    self._enter(child, added, place)
                return
            forced = only_token(grammar.mask(place))  # the end
        self._force(above, place, children, forced)

    def _force(self, above: int, place: Place, children: Sequence[int], forced: int | None) -> None:
        """One token may follow; None: none."""
        same = [child for child in children if self.tree.tokens[child] == forced]
        self._refuse(above, [child for child in children if child not in same])
        if forced is not None:
            self.changed |= not same
            added = self._add(forced, above, self.candidates[above].score)
            self._enter(same[0] if same else None, added, place)

    def _choose(self, above: int, place: Place, children: Sequence[int]) -> None:
        """Some children are refused, or may end the text."""
        mask, tokens = self.grammar.mask(place), self.tree.tokens
        only = only_token(mask)
        if mask is None or only is not None:
            self._force(above, place, children, only)
            return
        for child in children:
            if is_allowed(mask, tokens[child]):
                added = self._add(tokens[child], above, self.tree.scores[child])
                self._enter(child, added, place)
            else:
                self._refuse(above, [child])

    def _refuse(self, above: int, children: Sequence[int]) -> None:
        self.changed |= bool(children)
        self._refused += [(child, above) for child in children]

    def _enter(self, node: int | None, candidate: int, above: Place) -> None:
        """node: of the drafted tree; None if the grammar has added the candidate."""
        children = self.children[node] if node is not None else ()
        place = self.grammar.below(above, self.candidates[candidate].token)
        if place is not None:
            self._visit(candidate, place, children)
        else:  # an end token
            self._refuse(candidate, children)

    def _fill_up(self, node: int, above: int) -> None:
        own = self._add(self.tree.tokens[node], above, -np.inf)
        for child in self.children[node]:
            self._fill_up(child, own)


def only_token(mask: Row | None) -> int | None:
    """The token that a mask allows, if it is a single one."""
    if mask is None or np.count_nonzero(mask) != 1:
        return None
    index = int(mask.argmax())
    word = int(mask[index])
    return 32 * index + word.bit_length() - 1 if word & (word - 1) == 0 else None
