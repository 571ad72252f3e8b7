"""Draft trees from a drafter's log-probabilities (EAGLE-2, arXiv 2406.16858).

Shapes: b requests, T tree nodes including the root, k = topk lanes, C candidates.

Nothing here but ``doubts`` and ``likely_nodes`` waits for the device.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mamba_eagle.kernels.top_log_probs.torch import TopTokens
from mamba_eagle.tree.tree import Tree, ancestor_matrix


class Frontier(NamedTuple):
    """The lanes to draft from next, best first."""

    tokens: Tensor  # [b, k] int64
    lanes: Tensor  # [b, k] int64; the parent's lane in the previous frontier
    scores: Tensor  # [b, k] float32; cumulative log-probability


def likely_nodes(scores: np.ndarray, least: float, nodes: int) -> int:
    """How many of ``nodes`` to keep, the root included and at least two: those whose rank among a
    request's candidates is accepted with a probability of ``least``, on average over requests, by
    the drafter's own scores [b, C]."""
    if least <= 0:
        return nodes
    ranked = np.sort(-scores, axis=1)[:, 1:nodes]
    likely = np.exp(-ranked.astype(np.float64)).mean(axis=0)
    return max(2, 1 + int((likely >= least).sum()))


class Candidates:
    """Grows a tree of candidates, then keeps its best nodes (EAGLE-2, arXiv 2406.16858).

    The first depth gives the root ``topk`` children. Each further depth gives ``topk`` children to
    each of the ``topk`` best candidates of the one before. A candidate's score is the sum of the
    log-probabilities on its path.

    Candidates are numbered in the order in which they are added. A parent has a lower number than
    its children and a score that is not lower. So the order by falling score, then by rising
    number, puts every candidate after all its ancestors, and the first n of that order are a tree
    for any n.
    """

    def __init__(self, roots: Tensor, topk: int) -> None:
        """roots: [b] int64, the last accepted token of each request."""
        self.roots = roots.unsqueeze(1)
        self.topk = topk
        self._tokens = [self.roots]
        self._parents: list[Tensor] = [torch.zeros_like(self.roots)]  # candidate numbers; root: 0
        self._scores = [torch.zeros_like(self.roots, dtype=torch.float32)]
        self._seen, self._depth = 1, 0  # candidates so far, including the root
        # the lanes: their candidate numbers and scores, both [b, lanes]
        self._numbers = self._parents[0]
        self._frontier_scores = self._scores[0]

    def expand(self, best: TopTokens) -> Frontier:
        """Add the best children of every lane.

        best: [b, lanes, k]; at first of one lane, the root, then of the lanes of the last
        ``Frontier``, in its order.
        """
        # a log-probability rounded above 0, or none, must not lift a child above its parent
        gains = best.log_probs.nan_to_num(nan=-math.inf, posinf=0.0, neginf=-math.inf)
        scores = self._frontier_scores.unsqueeze(2) + gains.clamp(max=0.0)
        tokens, scores = best.tokens.flatten(1), scores.flatten(1)  # [b, lanes * k]
        order = scores.sort(dim=1, descending=True, stable=True).indices[:, : self.topk]
        parents = self._numbers.repeat_interleave(self.topk, dim=1)
        return self._join(tokens, parents, scores, order, order // self.topk)

    def _join(
        self, tokens: Tensor, parents: Tensor, scores: Tensor, order: Tensor, lanes: Tensor
    ) -> Frontier:
        """The children of all lanes become candidates: tokens, parents, scores [b, lanes * k]. The
        next lanes are those at ``order`` [b, k], and continue the former ``lanes`` [b, k]."""
        self._tokens.append(tokens)
        self._parents.append(parents)
        self._scores.append(scores)
        self._numbers = order + self._seen
        self._frontier_scores = scores.gather(1, order)
        self._seen += tokens.shape[1]
        self._depth += 1
        return Frontier(tokens.gather(1, order), lanes, self._frontier_scores)

    def doubts(self, probability: float) -> bool:
        """Whether trees should end before the depth that was added last: by the drafter's own
        scores, fewer than ``probability`` of them would be accepted up to there, on average."""
        if probability <= 0:
            return False
        likely = self._frontier_scores[:, 0].double().exp().sum()
        return bool(likely < probability * len(self.roots))

    def likely_nodes(self, probability: float, nodes: int) -> int:
        if probability <= 0:
            return nodes
        return likely_nodes(torch.cat(self._scores, dim=1).numpy(force=True), probability, nodes)

    def select(self, num_nodes: int) -> Tree:
        """The root and the best ``num_nodes - 1`` candidates, by depth, then by score.

        Raises: ValueError if there are fewer candidates.
        """
        self._check(num_nodes)
        seen = torch.cat(self._scores, dim=1)  # [b, C]
        order = seen.sort(dim=1, descending=True, stable=True).indices[:, :num_nodes]  # [b, T]
        # Numbers are dense: 1 root, k candidates of depth 1, then k² per depth.
        square = self.topk * self.topk
        below_root = (order + (square - self.topk - 1)).div(square, rounding_mode="floor") + 1
        depths, by_depth = torch.where(order == 0, 0, below_root).sort(dim=1, stable=True)
        chosen = order.gather(1, by_depth)

        node_of = torch.zeros_like(seen, dtype=torch.int64)
        index = torch.arange(num_nodes, device=chosen.device).expand_as(chosen)
        node_of.scatter_(1, chosen, index)
        parents = node_of.gather(1, torch.cat(self._parents, dim=1).gather(1, chosen))
        return Tree(
            tokens=torch.cat(self._tokens, dim=1).gather(1, chosen),
            parents=parents,
            depths=depths,
            ancestors=ancestor_matrix(parents, max_depth=self._depth),
            scores=seen.gather(1, chosen),
        )

    def _check(self, num_nodes: int) -> None:
        if not 1 <= num_nodes <= self._seen:
            raise ValueError(
                f"num_nodes = {num_nodes}: must be between 1 and {self._seen}, the root and the "
                f"candidates of {self._depth} depths with topk {self.topk}"
            )
