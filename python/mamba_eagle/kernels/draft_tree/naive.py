"""Growing a draft tree and keeping its best nodes: one request, in plain Python.

EAGLE-2 (arXiv 2406.16858, section 4). A candidate's score is the sum of the drafter's
log-probabilities on its path. The root gets ``topk`` children; then, at each depth, the ``topk``
best new candidates (the *lanes*) get ``topk`` children each. At the end the root and the best
candidates of all depths are the tree.

Candidates are numbered as they come. Of equal scores the lower number ranks first. No child scores
above its parent, so a parent always ranks before its children, and the best n candidates are a
tree.
"""

import math
from typing import NamedTuple


class Candidate(NamedTuple):
    token: int
    parent: int  # its number; the root's own is 0
    depth: int
    score: float


class Lane(NamedTuple):
    """A candidate to draft from next."""

    token: int
    lane: int  # of its parent among the last lanes
    number: int
    score: float


class DraftTree(NamedTuple):
    """Nodes by depth, within a depth by score; node 0 is the root."""

    tokens: list[int]
    parents: list[int]  # node indices; the root's is 0
    depths: list[int]
    ancestors: list[list[bool]]  # [i][j]: node j is node i or above it
    scores: list[float]


class Candidates:
    def __init__(self, root_token: int, topk: int) -> None:
        self.topk = topk
        self.all = [Candidate(root_token, 0, 0, 0.0)]
        self.lanes = [Lane(root_token, 0, 0, 0.0)]

    def expand(self, best: list[list[tuple[int, float]]]) -> list[Lane]:
        """Add children to every lane. best: for each lane its k (token, log-probability), best
        first. Returns the next lanes, best first."""
        new = []
        for lane, (above, children) in enumerate(zip(self.lanes, best)):
            for token, log_prob in children:
                # rounding may leave a log-probability above 0, and a network that overflows gives
                # none
                gain = -math.inf if math.isnan(log_prob) else min(log_prob, 0.0)
                score = above.score + gain
                new.append(Lane(token, lane, len(self.all), score))
                depth = self.all[above.number].depth + 1
                self.all.append(Candidate(token, above.number, depth, score))
        self.lanes = sorted(new, key=lambda lane: (-lane.score, lane.number))[: self.topk]
        return self.lanes

    def select(self, num_nodes: int) -> DraftTree:
        """The root and the best ``num_nodes - 1`` candidates."""
        numbers = range(len(self.all))
        ranked = sorted(numbers, key=lambda n: (-self.all[n].score, n))[:num_nodes]
        ordered = sorted(ranked, key=lambda n: self.all[n].depth)  # stable: then by score
        nodes = [self.all[n] for n in ordered]
        parents = [ordered.index(node.parent) for node in nodes]
        ancestors: list[list[bool]] = []
        for i, parent in enumerate(parents):
            above = list(ancestors[parent]) if i else [False] * len(nodes)
            above[i] = True
            ancestors.append(above)
        return DraftTree(
            tokens=[node.token for node in nodes],
            parents=parents,
            depths=[node.depth for node in nodes],
            ancestors=ancestors,
            scores=[node.score for node in nodes],
        )
