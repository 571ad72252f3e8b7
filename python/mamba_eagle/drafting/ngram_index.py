"""What the NGRAM drafter knows: the running requests' texts and the n-grams of all it has seen.

No torch; tokens are kept on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mamba_eagle.core import TreeShape
from mamba_eagle.kernels.ngram_trie import cpu


class NgramIndex:
    """N-grams of up to ``depth`` tokens in one trie, which has two kinds of roots:

        finished          one root; texts of requests that ended well
        roots[slot]       a root a running request, its prompt and its output

    A request that leaves gives its root up. Nobody looks at its n-grams any more, so they are the
    next that the trie forgets; those of its text are counted below ``finished`` anew. All n-grams
    share ``capacity`` nodes: when these run out, the ones not seen for long make room.
    """

    def __init__(self, requests: int, positions: int, capacity: int, depth: int) -> None:
        """requests: request slots. positions: the longest text, in tokens."""
        least = self.min_capacity(requests, depth)
        if capacity < least:
            raise ValueError(f"capacity {capacity}: must be {least} or more")
        self.depth = depth
        # untouched pages of zeros cost no memory
        self.nodes = np.zeros((capacity + 1, cpu.FIELDS), np.int32)
        self.buckets = np.zeros(1 << capacity.bit_length(), np.int32)
        self.state = np.zeros(2, np.int64)
        self.texts = np.zeros((requests, positions), np.int32)
        self.lengths = np.zeros(requests, np.int64)
        self.counted = np.zeros(requests, np.int64)  # of the text, below the request's root
        self.roots = np.zeros(requests, np.int64)  # 0: no request there
        self.finished = int(cpu.new_root(self.nodes, self.buckets, self.state))

    @staticmethod
    def min_capacity(requests: int, depth: int) -> int:
        """Room for every root, one n-gram, and a node to be used again."""
        return requests + 1 + depth + 1

    def begin(self, slot: int, tokens: Sequence[int]) -> None:
        """A request takes ``slot``; ``tokens`` of its prompt are known."""
        self.roots[slot] = cpu.new_root(self.nodes, self.buckets, self.state)
        self.lengths[slot] = self.counted[slot] = 0
        self.append(slot, tokens)

    def append(self, slot: int, tokens: Sequence[int]) -> None:
        """More of its prompt or output; counted when it is drafted for."""
        first = int(self.lengths[slot])
        self.texts[slot, first : first + len(tokens)] = tokens
        self.lengths[slot] += len(tokens)

    def end(self, slot: int, keep: int) -> None:
        """The request leaves; the first ``keep`` tokens of its text join the finished ones."""
        self.nodes[self.roots[slot], cpu.USED] = 0
        self.roots[slot] = 0
        trie, end = (self.nodes, self.buckets, self.state), min(keep, int(self.lengths[slot]))
        cpu.count(*trie, self.finished, self.texts[slot], 0, end, self.depth)

    def draft(self, slots: Sequence[int], shape: TreeShape, *tree: NDArray[Any]) -> None:
        """The most probable tree of ``shape`` for each of ``slots`` [b]. tree: where to write it,
        arrays as the fields of a spec.tree.Tree."""
        cpu.draft(
            *(self.nodes, self.buckets, self.state),
            *(self.finished, self.roots, self.texts, self.lengths, self.counted),
            *(np.array(slots), self.depth, shape.topk, shape.depth),
            *tree,
        )

    @property
    def num_nodes(self) -> int:
        """Rows that were ever used: nodes in the trie, roots among them."""
        return int(self.state[0])

    @property
    def num_bytes(self) -> int:
        return self.nodes.nbytes + self.buckets.nbytes + self.texts.nbytes
