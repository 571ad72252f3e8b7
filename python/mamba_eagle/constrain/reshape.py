"""Gives a draft tree's places to nodes that may be accepted.

Refused nodes leave, and where the grammar forces the next tokens, these become a chain: a mask of
one token makes them certain to be accepted. Nothing is put into a text: the target samples at each
of them as everywhere.

Masks are looked at where a drafted token is refused, and where the drafter has asked for one. So a
tree that fits, as within free text, costs a step of the matcher per node and no mask.
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
        self._visit(0, self.children[0])
        for node, above in self._refused:
            self._fill_up(node, above)

    def _add(self, token: int, parent: int, score: float) -> int:
        # rounding must not lift a node above its parent
        score = min(score, self.candidates[parent].score)
        depth = self.candidates[parent].depth + 1
        self.candidates.append(_Candidate(token, parent, depth, score))
        return len(self.candidates) - 1

    def _visit(self, above: int, children: Sequence[int], is_forced: bool = False) -> None:
        """The node of candidate ``above`` has been stepped into."""
        if self.candidates[above].depth == self.max_depth:
            return
        grammar, tokens = self.grammar, self.tree.tokens
        mask = grammar.known_mask()
        if mask is None:
            if not is_forced and all(grammar.allows(tokens[child]) for child in children):
                for child in children:
                    self._enter(child, self._add(tokens[child], above, self.tree.scores[child]))
                return
            mask = grammar.mask()
        if mask is None:
            self._refuse(above, children)
            return
        forced = only_token(mask)
        if forced is not None and all(tokens[child] != forced for child in children):
            self.changed = True
            self._enter(None, self._add(forced, above, self.candidates[above].score))
        for child in children:
            token = tokens[child]
            if int(mask[token >> 5]) >> (token & 31) & 1:
                own = self.candidates[above].score if token == forced else self.tree.scores[child]
                self._enter(child, self._add(token, above, own))
            else:
                self._refuse(above, [child])

    def _refuse(self, above: int, children: Sequence[int]) -> None:
        self.changed |= bool(children)
        self._refused += [(child, above) for child in children]

    def _enter(self, node: int | None, candidate: int) -> None:
        """node: of the drafted tree; None if the grammar has added the candidate."""
        children = self.children[node] if node is not None else ()
        if self.grammar.step_in(self.candidates[candidate].token):
            self._visit(candidate, children, is_forced=node is None)
            self.grammar.step_out()
        else:  # an end token
            self._refuse(candidate, children)

    def _fill_up(self, node: int, above: int) -> None:
        own = self._add(self.tree.tokens[node], above, -np.inf)
        for child in self.children[node]:
            self._fill_up(child, own)


def only_token(mask: npt.NDArray[np.uint32]) -> int | None:
    """The token that a mask allows, if it is a single one."""
    if np.count_nonzero(mask) != 1:
        return None
    index = int(mask.argmax())
    word = int(mask[index])
    return 32 * index + word.bit_length() - 1 if word & (word - 1) == 0 else None
