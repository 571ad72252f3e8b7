"""What an n-gram trie predicts, counted from the texts themselves.

Prediction by partial matching (Cleary and Witten, IEEE Trans. Comm. 32, 1984), with the escape
probabilities of method C (Moffat, IEEE Trans. Comm. 38, 1990) times ESCAPE, which leaves more to
shorter contexts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from mamba_eagle.drafting.ngram_trie import ENOUGH, ESCAPE, MAX_CHILDREN, MAX_TOKENS, UNKNOWN

Texts = Sequence[Sequence[int]]  # in the order in which they were seen


class Node(NamedTuple):
    """A drafted token below node ``parent`` (0: the root)."""

    token: int
    parent: int
    depth: int
    score: float  # sum of log-probabilities from the root


def continuations(texts: Texts, context: Sequence[int]) -> dict[int, int]:
    """How often each token followed ``context``, the most recent token first."""
    n, counts = len(context), dict[int, int]()
    for text in texts:
        for end in range(n, len(text)):
            if list(text[end - n : end]) == list(context):
                counts[text[end]] = counts.pop(text[end], 0) + 1
    return dict(list(counts.items())[: -MAX_CHILDREN - 1 : -1])


def predict(
    own: Sequence[int], finished: Texts, path: Sequence[int], depth: int, topk: int
) -> dict[int, float]:
    """Probability of each candidate to follow ``own`` and the drafted ``path``.

    Contexts of n < ``depth`` tokens are used, longest first, and the request's own text before the
    finished ones. If a context was followed by d different tokens, by token t c_t times, and
    N = Σ c_t, it gives token t

        left · c_t / (N + ESCAPE d)

    where ``left`` is the mass that longer contexts have left over: each leaves the fraction
    ESCAPE d / (N + ESCAPE d) of it.
    """
    text = [*own, *path]
    mass, left = dict[int, float](), 1.0
    for n in range(min(depth - 1, len(text)), -1, -1):
        for texts in ([own], finished):
            if left < ENOUGH and len(mass) >= topk:
                return mass
            counts = continuations(texts, text[len(text) - n :])
            if not counts:
                continue
            scale = left / (sum(counts.values()) + ESCAPE * len(counts))
            for token, count in counts.items():
                if token in mass or len(mass) < MAX_TOKENS:
                    mass[token] = mass.get(token, 0.0) + scale * count
            left = scale * ESCAPE * len(counts)
    return mass


def draft(
    own: Sequence[int], finished: Texts, depth: int, topk: int, max_depth: int, nodes: int
) -> list[Node]:
    """The root and the ``nodes - 1`` most probable nodes, best first, in a tree of at most ``topk``
    children per node and at most ``max_depth`` deep. Fillers make up for missing candidates."""
    tree, waiting = [Node(own[-1], 0, 0, 0.0)], list[Node]()
    paths: list[list[int]] = [[]]
    while len(tree) < nodes:
        last = len(tree) - 1
        if tree[last].depth < max_depth:
            mass = predict(own, finished, paths[last], depth, topk)
            best = sorted(mass, key=lambda token: -mass[token])[:topk]
            for token in best:
                score = tree[last].score + math.log(mass[token])
                waiting.append(Node(token, last, tree[last].depth + 1, score))
        if not waiting:
            break
        chosen = max(waiting, key=lambda node: node.score)
        waiting.remove(chosen)
        tree.append(chosen)
        paths.append([*paths[chosen.parent], chosen.token])
    while len(tree) < nodes:
        tree.append(_filler(tree, topk, max_depth))
    return tree


def _filler(tree: list[Node], topk: int, max_depth: int) -> Node:
    """Below the first node with room, the lowest token that it does not have yet."""
    for at, node in enumerate(tree):
        taken = {child.token for child in tree[1:] if child.parent == at}
        if node.depth < max_depth and len(taken) < topk:
            token = next(token for token in range(topk) if token not in taken)
            return Node(token, at, node.depth + 1, node.score + UNKNOWN)
    raise ValueError(
        f"no tree of depth {max_depth} with top-k {topk} has more than {len(tree)} nodes"
    )
