"""Trees, depth by depth: a network runs on each depth's lanes (EAGLE-2, arXiv 2406.16858).

Shapes: b requests, k lanes, O outputs of the network.
"""

import numpy as np
from torch import Tensor

from mamba_eagle.backend.contexts import LaneRows, Lanes
from mamba_eagle.backend.pools import KVPool
from mamba_eagle.backend.state import StateScheme
from mamba_eagle.core import TreeShape
from mamba_eagle.drafting.base import DraftParts, KeyedNoise
from mamba_eagle.drafting.network import DraftNetwork
from mamba_eagle.drafting.vocabulary import DraftVocabulary
from mamba_eagle.kernels.top_log_probs.torch import TopTokens
from mamba_eagle.tree.candidates import Candidates
from mamba_eagle.tree.tree import Tree


class Growth:
    """Grows trees from the roots' outputs; ``kv`` and ``scheme`` hold the entries before them."""

    def __init__(
        self,
        network: DraftNetwork,
        vocabulary: DraftVocabulary,
        parts: DraftParts,
        scheme: StateScheme,
        kv: KVPool,
        max_lanes: int,
    ) -> None:
        """max_lanes: spare KV slots of ``kv`` per request, for the lanes of all depths."""
        self.network, self.vocabulary = network, vocabulary
        self.table, self.backend = parts.table, parts.backend
        self.scheme, self.kv, self.max_lanes = scheme, kv, max_lanes
        self.min_probability = np.array([0.0])  # of a node that is kept

    def grow(
        self, slots: Tensor, above: Tensor, shape: TreeShape, noise: KeyedNoise | None
    ) -> Tree:
        """above: [b, 1, O], the roots' outputs."""
        table, network = self.table, self.network
        root = table.processed[slots]  # [b]: position of the root
        grown = self.backend.candidates(table.last_token[slots], shape.topk, shape.depth)
        frontier = grown.expand(self._best(0, above, root, noise, shape.topk))
        if noise is not None:
            noise.follow(frontier)
        if shape.depth > 1:
            lanes = self._lanes(slots, root + 1, shape.depth)
        # with noise or a grammar each request's tree is as large as was planned
        least = float(self.min_probability[0]) if noise is None else 0.0
        doubts = grown.doubts(least)
        for depth in range(1, shape.depth):
            if doubts:
                break
            left = shape.depth - depth
            if noise is not None and (forced := noise.forced(len(slots), shape.topk, left)):
                self._add_forced(grown, forced, noise, left)
                break
            if network.reads_above and shape.topk > 1:
                index = frontier.lanes[..., None].expand(-1, -1, above.shape[2])
                above = above.gather(1, index)
            above = network.lanes(
                depth,
                frontier.tokens.reshape(-1),
                above.flatten(0, 1),
                lanes.context(frontier.lanes, root + depth),
            ).unflatten(0, frontier.tokens.shape)
            frontier = grown.expand(self._best(depth, above, root, noise, shape.topk))
            doubts = grown.doubts(least)
            if noise is not None:
                noise.follow(frontier)
        return grown.select(grown.likely_nodes(least, shape.nodes))

    def _add_forced(
        self, grown: Candidates, children: TopTokens, noise: KeyedNoise, levels: int
    ) -> None:
        """The last levels of a tree, without the network: ``children`` and what follows them."""
        b, _, k = children.tokens.shape
        for left in reversed(range(levels)):
            noise.follow(grown.expand(children))
            if left:
                forced = noise.forced(b, k, 0)
                assert forced is not None, "levels 0"
                children = forced

    def _best(
        self, depth: int, outputs: Tensor, root: Tensor, noise: KeyedNoise | None, k: int
    ) -> TopTokens:
        """The k best next tokens of each lane at a depth: outputs [b, lanes, O], root [b], the
        roots' positions -> [b, lanes, k]."""
        shape = outputs.shape[:2]
        logits = self.network.logits(depth, outputs.flatten(0, 1)).unflatten(0, shape)
        if noise is None:
            return self.vocabulary.best(logits, k)
        return noise.best(logits, self.vocabulary, root + (depth + 1), k)

    def _lanes(self, slots: Tensor, prefix: Tensor, depth: int) -> Lanes:
        """Lanes that continue the first ``prefix`` [b] tokens, which include the root."""
        stem = self.scheme.stem(slots, self.max_lanes)
        rows = None if stem is None else LaneRows(self.scheme, stem, depth)
        attention = self.backend.lane_attention(
            self.kv, self.table.kv_slots, slots, prefix, self.max_lanes
        )
        return Lanes(attention, rows, self.scheme)
