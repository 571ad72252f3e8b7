"""The n-gram trie against counts taken from the texts themselves, and its own book-keeping."""

from __future__ import annotations

import math
import random
from typing import NamedTuple

import ngram_trie_naive as naive
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mamba_eagle.core import TreeShape
from mamba_eagle.drafting.ngram import NgramIndex
from mamba_eagle.drafting.ngram_trie import (
    CHILD,
    COUNT,
    MAX_COUNTED,
    NEXT,
    PARENT,
    PREVIOUS,
    SAME_BUCKET,
    TOKEN,
    UNKNOWN,
    USED,
    find,
)

SHAPES = st.builds(
    lambda topk, steps, nodes: TreeShape(topk, steps, 2 + nodes % max_drafts(topk, steps)),
    *(st.integers(1, 4), st.integers(1, 5), st.integers(0, 29)),
)
VOCAB = 6
TEXTS = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=30)


def max_drafts(topk: int, steps: int) -> int:
    return topk + (steps - 1) * topk**2


class Drafted(NamedTuple):
    """A tree in plain numbers."""

    tokens: list[int]
    parents: list[int]
    depths: list[int]
    ancestors: list[list[bool]]
    scores: list[float]

    def path(self, node: int) -> list[int]:
        """Tokens below the root, down to ``node``."""
        return self.path(self.parents[node]) + [self.tokens[node]] if node else []


def drafts(index: NgramIndex, slots: list[int], shape: TreeShape) -> list[Drafted]:
    b, T = len(slots), shape.nodes
    parts = [np.empty((b, T), np.int64) for _ in range(3)]
    parts += [np.empty((b, T, T), np.bool_), np.empty((b, T), np.float32)]
    index.draft(slots, shape, *parts)
    return [Drafted(*row) for row in zip(*(part.tolist() for part in parts))]


def serve(index: NgramIndex, slot: int, text: list[int]) -> None:
    """A request from its first token to its end, in a step."""
    index.begin_step()
    index.begin(slot, text)
    index.end(slot, len(text))


def assert_valid(tree: Drafted, root: int, shape: TreeShape) -> None:
    T = shape.nodes
    assert len(tree.tokens) == T and tree.tokens[0] == root
    assert (tree.parents[0], tree.depths[0], tree.scores[0]) == (0, 0, 0.0)
    assert tree.depths == sorted(tree.depths) and tree.depths[-1] <= shape.depth
    children: dict[int, list[int]] = {}
    for node in range(1, T):
        parent = tree.parents[node]
        assert 0 <= parent < node and tree.depths[node] == tree.depths[parent] + 1
        assert tree.scores[node] <= tree.scores[parent]
        children.setdefault(parent, []).append(tree.tokens[node])
    for tokens in children.values():
        assert len(set(tokens)) == len(tokens) <= shape.topk
    for node in range(T):
        above = {node, 0} if node == 0 else {node} | on_path(tree.parents, tree.parents[node])
        assert {j for j in range(T) if tree.ancestors[node][j]} == above


def on_path(parents: list[int], node: int) -> set[int]:
    return {node} | (on_path(parents, parents[node]) if node else set())


def assert_sound(index: NgramIndex) -> None:
    """Every entry in use is a root, or a node that its parent lists and its bucket finds."""
    nodes, capacity, used = index.nodes, len(index.nodes) - 1, int(index.state[0])
    assert used <= capacity and not nodes[0].any()
    listed = []
    for at in range(1, used + 1):
        before, child = 0, int(nodes[at, CHILD])
        while child:
            listed.append(child)
            assert nodes[child, PARENT] == at and nodes[child, PREVIOUS] == before
            assert find(nodes, index.buckets, at, nodes[child, TOKEN]) == child
            before, child = child, int(nodes[child, NEXT])
    roots = [at for at in range(1, used + 1) if nodes[at, PARENT] == 0]
    assert sorted(listed + roots) == list(range(1, used + 1))
    for slot, root in enumerate(index.roots.tolist()):
        assert root == 0 or (root in roots and nodes[root, USED] == 2), slot
    chained = 0
    for first in index.buckets.tolist():
        while first:
            chained, first = chained + 1, int(nodes[first, SAME_BUCKET])
    assert chained == len(listed)


@settings(max_examples=150)
@given(TEXTS, st.lists(TEXTS, max_size=3), st.integers(2, 7), SHAPES, st.integers(0, 30))
def test_trees_equal_those_counted_from_the_texts(
    own: list[int], finished: list[list[int]], depth: int, shape: TreeShape, cut: int
) -> None:
    index = NgramIndex(2, 40, 3000, depth)
    index.begin(1, own[:cut])
    for text in finished:
        serve(index, 0, text)
    index.append(1, own[cut:])
    (tree,) = drafts(index, [1], shape)
    expected = naive.draft(own, finished, depth, shape.topk, shape.depth, shape.nodes)
    # of equally good nodes either may be there, so scores are compared and not tokens
    assert sorted(tree.scores) == pytest.approx(sorted(n.score for n in expected), abs=1e-4)
    for node in range(1, shape.nodes):
        parent = tree.parents[node]
        mass = naive.predict(own, finished, tree.path(parent), depth, shape.topk)
        score = math.log(mass[tree.tokens[node]]) if tree.tokens[node] in mass else UNKNOWN
        filler = pytest.approx(tree.scores[parent] + UNKNOWN, abs=1e-3)
        assert tree.scores[node] in (filler, pytest.approx(tree.scores[parent] + score, abs=1e-3))
    assert_sound(index)


@settings(max_examples=150)
@given(
    st.lists(st.tuples(st.integers(0, 2), TEXTS, st.booleans()), min_size=1, max_size=8),
    st.integers(2, 7),
    st.integers(0, 60),
    SHAPES,
)
def test_any_history_gives_a_valid_tree(
    history: list[tuple[int, list[int], bool]], depth: int, spare: int, shape: TreeShape
) -> None:
    """Even with a trie that is too small for it."""
    index = NgramIndex(3, 300, NgramIndex.min_capacity(3, depth) + spare, depth)
    running: dict[int, int] = {}  # slot -> last token
    for slot, text, leaves in history:
        if slot in running:
            index.append(slot, text)
        else:
            index.begin(slot, text)
        running[slot] = text[-1]
        trees = drafts(index, list(running), shape)
        for tree, root in zip(trees, running.values()):
            assert_valid(tree, root, shape)
        if leaves:
            index.end(slot, len(text))
            del running[slot]
        assert_sound(index)


def test_a_text_that_is_known_is_drafted_whole() -> None:
    text = random.Random(1).sample(range(1000), 40)
    index = NgramIndex(2, 100, 5000, 8)
    serve(index, 0, text)
    index.begin(1, text[:10])
    (tree,) = drafts(index, [1], TreeShape(topk=1, depth=6, nodes=7))
    assert tree.tokens == text[9:16]


def test_longer_matches_decide() -> None:
    """1 2 was followed by 3 four times, 5 6 0 1 2 by 4 once."""
    index = NgramIndex(1, 100, 5000, 8)
    index.begin(0, [9, 1, 2, 3] * 4 + [5, 6, 0, 1, 2, 4, 7, 5, 6, 0, 1, 2])
    (tree,) = drafts(index, [0], TreeShape(topk=2, depth=1, nodes=3))
    assert tree.tokens == [2, 4, 3]


def test_the_more_recent_of_two_equals_comes_first() -> None:
    index = NgramIndex(1, 100, 5000, 8)
    for earlier, later in [(3, 4), (4, 3)]:
        index.begin(0, [1, 2, earlier, 8, 1, 2, later, 9, 1, 2])
        (tree,) = drafts(index, [0], TreeShape(topk=1, depth=1, nodes=2))
        assert tree.tokens == [2, later]


def test_what_a_request_wrote_is_its_own_until_it_ends_well() -> None:
    index = NgramIndex(3, 100, 5000, 8)
    chain = TreeShape(topk=1, depth=3, nodes=4)
    index.begin(0, [1, 2, 3, 4, 5])
    drafts(index, [0], chain)
    index.begin(1, [1])
    assert drafts(index, [1], chain)[0].tokens != [1, 2, 3, 4], "it still runs"
    index.end(0, 0)
    assert drafts(index, [1], chain)[0].tokens != [1, 2, 3, 4], "it was aborted"
    index.begin(0, [1, 2, 3, 4, 5])
    index.end(0, 3)
    index.begin(2, [1])
    (tree,) = drafts(index, [2], chain)
    assert tree.tokens[:3] == [1, 2, 3], "its first three tokens were kept"
    assert tree.tokens[3] != 4, "and no more"


def test_long_texts_are_counted_in_several_steps() -> None:
    """60,000 tokens took 0.4 s, at their first trees and when they had ended."""
    chain, size = TreeShape(topk=1, depth=3, nodes=4), 3 * MAX_COUNTED
    index = NgramIndex(2, size, 100_000, 4)
    text = random.Random(3).sample(range(100_000), size)
    index.begin(0, text)
    for steps in range(1, 4):
        drafts(index, [0], chain)
        assert index.counted[0] == steps * MAX_COUNTED
    index.begin(1, [5, 6, 7])
    drafts(index, [0, 1], chain)
    assert index.counted[1] == 3, "short ones do not wait for long ones"
    index.end(0, size)
    for steps in range(1, 3):
        index.begin(1, text[steps * MAX_COUNTED - 10 :][:5])
        (tree,) = drafts(index, [1], chain)
        assert tree.tokens == text[steps * MAX_COUNTED - 6 :][:4]
        index.begin(1, text[steps * MAX_COUNTED + 10 :][:5])
        (tree,) = drafts(index, [1], chain)
        assert tree.tokens != text[steps * MAX_COUNTED + 14 :][:4]
        index.begin_step()
    assert not index.left


def test_a_full_trie_forgets_what_was_not_seen_for_long() -> None:
    rng, depth = random.Random(2), 6
    texts = [[rng.randrange(10_000) for _ in range(30)] for _ in range(60)]
    index = NgramIndex(2, 100, 1500, depth)  # a text takes 165
    for text in texts:
        serve(index, 0, text)
        serve(index, 0, texts[0])
        assert_sound(index)

    def knows(text: list[int]) -> bool:
        index.begin(1, text[:4])
        (tree,) = drafts(index, [1], TreeShape(topk=1, depth=2, nodes=3))
        index.end(1, 0)
        return tree.tokens == text[3:6]

    assert knows(texts[0]), "seen again and again"
    assert knows(texts[-1]), "just seen"
    assert not any(knows(text) for text in texts[1:40])


def test_counts_are_those_of_all_ngrams() -> None:
    text = [1, 2, 1, 2, 1]
    index = NgramIndex(1, 100, 5000, 3)
    index.begin(0, text[:2])
    drafts(index, [0], TreeShape(1, 1, 2))
    index.append(0, text[2:])
    drafts(index, [0], TreeShape(1, 1, 2))
    root = int(index.roots[0])
    for ngram, times in {
        (1,): 3,
        (2,): 2,
        (1, 2): 2,
        (2, 1): 2,
        (1, 2, 1): 2,
        (2, 1, 2): 1,
    }.items():
        at = root
        for token in ngram:
            at = find(index.nodes, index.buckets, at, token)
        assert index.nodes[at, COUNT] == times, ngram
        assert len(ngram) < 3 or index.nodes[at, CHILD] == 0, "no n-gram is longer than the depth"


def test_a_trie_without_room_for_one_ngram_is_refused() -> None:
    with pytest.raises(ValueError, match="capacity 13: must be 14 or more"):
        NgramIndex(requests=4, positions=10, capacity=13, depth=8)
