"""Gives a draft tree's places to nodes that may be accepted.

Refused nodes leave, and where the grammar forces the next tokens, these become a chain: a mask of
one token makes them certain to be accepted. Nothing is put into a text: the target samples at each
of them as everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

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
        self._visit(0, 0, self.children[0])
        for node, above in self._refused:
            self._fill_up(node, above)

    def _add(self, token: int, parent: int, score: float) -> int:
        # rounding must not lift a node above its parent
        score = min(score, self.candidates[parent].score)
        depth = self.candidates[parent].depth + 1
        self.candidates.append(_Candidate(token, parent, depth, score))
        return len(self.candidates) - 1

    def _visit(self, above: int, depth: int, children: Sequence[int]) -> None:
        """The node of candidate ``above`` has been stepped into."""
        if depth == self.max_depth:
            return
        mask = self.grammar.mask()
        if mask is None:
            self._refuse(above, children)
            return
        forced = only_token(mask)
        tokens = self.tree.tokens
        if forced is not None and all(tokens[child] != forced for child in children):
            self.changed = True
            self._enter(self._add(forced, above, self.candidates[above].score), depth + 1, ())
        for child in children:
            token = tokens[child]
            if int(mask[token >> 5]) >> (token & 31) & 1:
                own = self.candidates[above].score if token == forced else self.tree.scores[child]
                self._enter(self._add(token, above, own), depth + 1, self.children[child])
            else:
                self._refuse(above, [child])

    def _refuse(self, above: int, children: Sequence[int]) -> None:
        self.changed |= bool(children)
        self._refused += [(child, above) for child in children]

    def _enter(self, candidate: int, depth: int, children: Sequence[int]) -> None:
        if self.grammar.step_in(self.candidates[candidate].token):
            self._visit(candidate, depth, children)
            self.grammar.step_out()
        else:  # an end token
            self._refuse(candidate, children)

    def _fill_up(self, node: int, above: int) -> None:
        own = self._add(self.tree.tokens[node], above, -np.inf)
        for child in self.children[node]:
            self._fill_up(child, own)


def only_token(mask: npt.NDArray[np.uint32]) -> int | None:
    """The token that a mask allows, if it is a single one."""
    words = np.flatnonzero(mask)
    if len(words) != 1:
        return None
    word = int(mask[words[0]])
    return 32 * int(words[0]) + word.bit_length() - 1 if word & (word - 1) == 0 else None
