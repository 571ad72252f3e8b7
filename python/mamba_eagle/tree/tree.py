"""Draft trees: from the drafter's log-probabilities to the nodes that the target verifies.

Shapes: b requests, T tree nodes (the root among them), k = topk lanes, C candidates.
A chain is the tree with ``parents[i] == i - 1``; plain decoding is the tree with one node.

Nothing here waits for the device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mamba_eagle.kernels import gpu, numba_math
from mamba_eagle.kernels.draft_tree import cpu
from mamba_eagle.kernels.top_log_probs import MAX_TOP, TopTokens


class Tree(NamedTuple):
    """One tree a request. Parents come before their children; ``depths`` never decrease."""

    tokens: Tensor  # [b, T] int64; node 0 is the root: accepted, not yet run through the target
    parents: Tensor  # [b, T] int64; the parent's node index, below the node's own; root: 0
    depths: Tensor  # [b, T] int64; root: 0
    ancestors: Tensor  # [b, T, T] bool; [:, i, j]: node j is node i or one of its ancestors
    scores: Tensor  # [b, T] float32; cumulative log-probability of the drafter; root: 0


class Frontier(NamedTuple):
    """The lanes to draft from next, best first."""

    tokens: Tensor  # [b, k] int64
    lanes: Tensor  # [b, k] int64; the lane of the previous frontier that is the parent
    scores: Tensor  # [b, k] float32; cumulative log-probability


def single_node_tree(roots: Tensor) -> Tree:
    """The tree of plain decoding. roots: [b] int64."""
    tokens = roots.unsqueeze(1)
    zeros = torch.zeros_like(tokens)
    return Tree(
        tokens=tokens,
        parents=zeros,
        depths=zeros,
        ancestors=torch.ones_like(zeros, dtype=torch.bool).unsqueeze(2),
        scores=torch.zeros_like(zeros, dtype=torch.float32),
    )


def chain_tree(tokens: Tensor) -> Tree:
    """Each token behind the one before it. tokens: [b, T] int64."""
    index = torch.arange(tokens.shape[1], device=tokens.device)
    shape = tokens.shape
    return Tree(
        tokens=tokens,
        parents=(index - 1).clamp_(min=0).expand(shape).contiguous(),
        depths=index.expand(shape),
        ancestors=(index[:, None] >= index).expand(*shape, -1),
        scores=torch.zeros(shape, device=tokens.device),
    )


def chain_prefix(chain: Tree, tokens: Tensor) -> Tree:
    """``chain_tree(tokens)`` without a launch: views of the one longer ``chain`` [1, …]."""
    b, nodes = tokens.shape
    parents, depths, ancestors, scores = (
        part[:, :nodes].expand(b, *[-1] * (part.dim() - 1)) for part in chain[1:]
    )
    return Tree(tokens, parents, depths, ancestors[..., :nodes], scores)


def ancestor_matrix(parents: Tensor, max_depth: int) -> Tensor:
    """Who is above whom. parents: [b, T] int64, root 0 -> [b, T, T] bool, a node above itself too.

    With P the matrix of the parent edges, entry (i, j) of ``(I + P)**m`` counts the ways to go
    from i to j in m steps that stay or climb: above 0 if and only if j is at most m above i.
    """
    nodes = parents.shape[1]
    reach = torch.eye(nodes, device=parents.device).repeat(parents.shape[0], 1, 1)
    reach.scatter_(2, parents.unsqueeze(2), 1.0)
    climbed = 1
    while climbed < min(max_depth, nodes - 1):
        reach = reach @ reach
        climbed *= 2
    return reach > 0


class Candidates:
    """Grows a tree of candidates, then keeps its best nodes (EAGLE-2, arXiv 2406.16858).

    Step 0 gives the root ``topk`` children. Each further step gives ``topk`` children to each of
    the ``topk`` best candidates of the step before. A candidate's score is the sum of the
    log-probabilities on its path.

    Candidates are numbered in the order in which they are seen: a parent before its children, and
    with a score no lower. So the order by (score, falling; number, rising) puts every candidate
    behind all its ancestors, equal scores or not, and any head of that order is a tree.
    """

    def __init__(self, roots: Tensor, topk: int) -> None:
        """roots: [b] int64, the last accepted token of each request."""
        self.roots = roots.unsqueeze(1)
        self.topk = topk
        self._tokens = [self.roots]
        self._parents: list[Tensor] = [torch.zeros_like(self.roots)]  # candidate numbers; root: 0
        self._scores = [torch.zeros_like(self.roots, dtype=torch.float32)]
        self._seen, self._steps = 1, 0  # the root among them
        # the lanes: their candidate numbers and scores, both [b, lanes]
        self._numbers = self._parents[0]
        self._frontier_scores = self._scores[0]

    def expand(self, best: TopTokens) -> Frontier:
        """Add the best children of every lane.

        best: [b, lanes, k], of one lane (the root) at first, then of the lanes of the last
        Frontier in its order.
        """
        # a rounding above 0 must not lift a child above its parent
        scores = self._frontier_scores.unsqueeze(2) + best.log_probs.clamp(max=0.0)
        tokens, scores = best.tokens.flatten(1), scores.flatten(1)  # [b, lanes * k]
        self._tokens.append(tokens)
        self._parents.append(self._numbers.repeat_interleave(self.topk, dim=1))
        self._scores.append(scores)

        order = scores.sort(dim=1, descending=True, stable=True).indices[:, : self.topk]
        self._numbers = order + self._seen
        self._frontier_scores = scores.gather(1, order)
        self._seen += tokens.shape[1]
        self._steps += 1
        return Frontier(tokens.gather(1, order), order // self.topk, self._frontier_scores)

    def select(self, num_nodes: int) -> Tree:
        """The root and the best ``num_nodes - 1`` candidates, by depth, then by score."""
        self._check(num_nodes)
        seen = torch.cat(self._scores, dim=1)  # [b, C]
        order = seen.sort(dim=1, descending=True, stable=True).indices[:, :num_nodes]  # [b, T]
        # Numbers are dense: 1 root, k of depth 1, then k² a depth.
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
            ancestors=ancestor_matrix(parents, max_depth=self._steps),
            scores=seen.gather(1, chosen),
        )

    def _check(self, num_nodes: int) -> None:
        if not 1 <= num_nodes <= self._seen:
            raise ValueError(
                f"num_nodes = {num_nodes}: must be between 1 and {self._seen}, the root and the "
                f"candidates of {self._steps} steps with topk {self.topk}"
            )


class FusedCandidates(Candidates):
    """The same on a CPU, a call for each expansion and one for the choice."""

    def expand(self, best: TopTokens) -> Frontier:
        tokens = best.tokens.flatten(1)
        parents, scores = torch.empty_like(tokens), torch.empty(tokens.shape)
        parent_lanes, order = (
            torch.empty(len(tokens), self.topk, dtype=torch.int64) for _ in range(2)
        )
        cpu.expand(
            best.log_probs.numpy(),
            self._frontier_scores.numpy(),
            self._numbers.numpy(),
            *(part.numpy() for part in (parents, scores, parent_lanes, order)),
        )
        self._tokens.append(tokens)
        self._parents.append(parents)
        self._scores.append(scores)
        self._numbers = order + self._seen
        self._frontier_scores = scores.gather(1, order)
        self._seen += tokens.shape[1]
        self._steps += 1
        return Frontier(tokens.gather(1, order), parent_lanes, self._frontier_scores)

    def select(self, num_nodes: int) -> Tree:
        self._check(num_nodes)
        shape = (self.roots.shape[0], num_nodes)
        tree = Tree(
            tokens=torch.empty(shape, dtype=torch.int64),
            parents=torch.empty(shape, dtype=torch.int64),
            depths=torch.empty(shape, dtype=torch.int64),
            ancestors=torch.empty(*shape, num_nodes, dtype=torch.bool),
            scores=torch.empty(shape),
        )
        seen = (torch.cat(part, dim=1) for part in (self._tokens, self._parents, self._scores))
        cpu.select(*(part.numpy() for part in seen), self.topk, *(part.numpy() for part in tree))
        return tree


def candidates(roots: Tensor, topk: int, steps: int) -> Candidates:
    """For ``steps`` expansions at most; the fastest on the roots' device."""
    if numba_math.usable(roots.device):
        return FusedCandidates(roots, topk)
    if topk <= MAX_TOP and gpu.usable(roots.device):
        from mamba_eagle.tree.triton_tree import TritonCandidates  # needs triton

        return TritonCandidates(roots, topk, steps)
    return Candidates(roots, topk)
