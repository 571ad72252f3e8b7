"""Token trees: the nodes that the target verifies.

Shapes: b requests, T tree nodes including the root.
A chain is the tree with ``parents[i] == i - 1``; plain decoding is the tree with one node.

Nothing here waits for the device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Tree(NamedTuple):
    """One tree per request. Parents come before their children; ``depths`` never decrease."""

    tokens: Tensor  # [b, T] int64; node 0 is the root: accepted, not yet processed by the target
    parents: Tensor  # [b, T] int64; the parent's node index, below the node's own; root: 0
    depths: Tensor  # [b, T] int64; root: 0
    ancestors: Tensor  # [b, T, T] bool; [:, i, j]: node j is node i or one of its ancestors
    scores: Tensor  # [b, T] float32; cumulative log-probability of the drafter; root: 0

    def packed(self) -> Tensor:
        """All but the scores in one tensor, for other ranks: [24 + T per node] uint8, or a few
        more. One kernel, and none to unpack it."""
        parts = []
        for part in (self.tokens, self.parents, self.depths):
            own = part.contiguous().view(torch.uint8).flatten()
            parts += [own, own[: _filler(len(own))]]
        return torch.cat([*parts, self.ancestors.contiguous().view(torch.uint8).flatten()])

    @classmethod
    def unpacked(cls, packed: Tensor, scores: Tensor) -> Tree:
        """The trees that were ``packed``, with scores of one's own [b, T]."""
        (b, nodes), size = scores.shape, 8 * scores.numel()
        *parts, ancestors = packed.split([size + _filler(size)] * 3 + [nodes * scores.numel()])
        tokens, parents, depths = (part[:size].view(torch.int64).view(b, nodes) for part in parts)
        above = ancestors.view(torch.bool).view(b, nodes, nodes)
        return cls(tokens, parents, depths, above, scores)


def _filler(size: int) -> int:
    """Bytes of padding after ``size``, which align the next tensor for Triton's kernels."""
    return -size % 16


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
    """A chain of ``tokens`` [b, T] int64: the parent of each node is the node before it."""
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
    """``chain_tree(tokens)`` without launching a kernel: views of ``chain``, one chain that has at
    least as many nodes as tokens [b, T]."""
    b, nodes = tokens.shape
    parents, depths, ancestors, scores = (
        part[:, :nodes].expand(b, *[-1] * (part.dim() - 1)) for part in chain[1:]
    )
    return Tree(tokens, parents, depths, ancestors[..., :nodes], scores)


def ancestor_matrix(parents: Tensor, max_depth: int) -> Tensor:
    """Whether node j is node i or one of its ancestors: parents [b, T] int64 -> [b, T, T] bool.

    With P the matrix of the parent edges, entry (i, j) of ``(I + P)**m`` counts the ways to get
    from i to j in m moves that stay or climb to the parent. It is positive if and only if j is at
    most m levels above i. max_depth: the depth of the deepest node, or more.
    """
    nodes = parents.shape[1]
    reach = torch.eye(nodes, device=parents.device).repeat(parents.shape[0], 1, 1)
    reach.scatter_(2, parents.unsqueeze(2), 1.0)
    climbed = 1
    while climbed < min(max_depth, nodes - 1):
        reach = reach @ reach
        climbed *= 2
    return reach > 0


def empty_trees(b: int, nodes: int, device: torch.device) -> Tree:
    """b trees in which all other nodes are children of the root."""
    zeros = torch.zeros(b, nodes, dtype=torch.int64, device=device)
    own = torch.eye(nodes, dtype=torch.bool, device=device).repeat(b, 1, 1)
    own[:, :, 0] = True
    depths = zeros.clone()
    depths[:, 1:] = 1
    return Tree(zeros, zeros.clone(), depths, own, zeros.float())
