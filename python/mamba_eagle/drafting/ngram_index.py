"""The index of the NGRAM drafter: texts of running requests, and n-grams of all texts it has seen.

No torch; tokens are kept on the host.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mamba_eagle.core import TreeShape
from mamba_eagle.drafting import ngram_trie as cpu


class NgramIndex:
    """N-grams of up to ``depth`` tokens in one trie, which has two kinds of roots:

        finished          one root for the texts of all finished requests
        roots[slot]       one root per running request, for its prompt and output

    When a request leaves, the kept part of its text is counted below ``finished``, and its root is
    released.
    The n-grams below that root are no longer used, so they are the first to be evicted. All n-grams
    share ``capacity`` nodes; when these run out, the least recently seen ones are evicted.
    """

    def __init__(self, requests: int, positions: int, capacity: int, depth: int) -> None:
        """requests: number of request slots. positions: length of the longest text, in tokens.

        Raises: ValueError if ``capacity`` is below ``min_capacity``.
        """
        minimum = self.min_capacity(requests, depth)
        if capacity < minimum:
            raise ValueError(f"capacity {capacity}: must be {minimum} or more")
        self.depth = depth
        # untouched pages of zeros cost no memory
        self.nodes = np.zeros((capacity + 1, cpu.FIELDS), np.int32)
        self.buckets = np.zeros(1 << capacity.bit_length(), np.int32)
        self.state = np.zeros(2, np.int64)
        self.texts = np.zeros((requests, positions), np.int32)
        self.lengths = np.zeros(requests, np.int64)
        self.counted = np.zeros(requests, np.int64)  # tokens counted below the request's root
        self.roots = np.zeros(requests, np.int64)  # node of the request's root; 0: no request
        self.finished = int(cpu.new_root(self.nodes, self.buckets, self.state))

    @staticmethod
    def min_capacity(requests: int, depth: int) -> int:
        """Nodes for all roots, one n-gram, and one node to reuse."""
        return requests + 1 + depth + 1

    def begin(self, slot: int, tokens: Sequence[int]) -> None:
        """A request takes request slot ``slot``; ``tokens`` are the start of its text."""
        self.roots[slot] = cpu.new_root(self.nodes, self.buckets, self.state)
        self.lengths[slot] = self.counted[slot] = 0
        self.append(slot, tokens)

    def append(self, slot: int, tokens: Sequence[int]) -> None:
        """Append ``tokens`` to the request's text; n-grams are counted when it is next drafted
        for."""
        first = int(self.lengths[slot])
        self.texts[slot, first : first + len(tokens)] = tokens
        self.lengths[slot] += len(tokens)

    def end(self, slot: int, keep: int) -> None:
        """The request leaves; the first ``keep`` tokens of its text join the finished texts."""
        self.nodes[self.roots[slot], cpu.USED] = 0
        self.roots[slot] = 0
        trie, end = (self.nodes, self.buckets, self.state), min(keep, int(self.lengths[slot]))
        cpu.count(*trie, self.finished, self.texts[slot], 0, end, self.depth)

    def draft(self, slots: Sequence[int], shape: TreeShape, *tree: NDArray[Any]) -> None:
        """The most probable tree of ``shape`` for each of the request slots ``slots`` [b].

        tree: arrays to write to, shaped and typed like the fields of ``tree.tree.Tree``.
        """
        cpu.draft(
            *(self.nodes, self.buckets, self.state),
            *(self.finished, self.roots, self.texts, self.lengths, self.counted),
            *(np.array(slots), self.depth, shape.topk, shape.depth),
            *tree,
        )

    @property
    def num_bytes(self) -> int:
        return self.nodes.nbytes + self.buckets.nbytes + self.texts.nbytes
