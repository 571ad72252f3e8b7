"""Trees of candidates on a GPU: one kernel per expansion and one for the selection."""

from __future__ import annotations

import torch
from torch import Tensor

from mamba_eagle.kernels.draft_tree.triton import Grown, Lanes, expand, select
from mamba_eagle.kernels.top_log_probs.torch import TopTokens
from mamba_eagle.tree.candidates import Candidates, Frontier
from mamba_eagle.tree.tree import Tree, single_node_tree


class TritonCandidates(Candidates):
    """Candidates in buffers with room for ``depth`` expansions."""

    def __init__(self, roots: Tensor, topk: int, depth: int) -> None:
        self.roots, self.topk = roots.unsqueeze(1), topk
        self._seen, self._depth = 1, 0
        self._lanes: Lanes | None = None
        shape = (len(roots), 1 + topk + (depth - 1) * topk * topk)
        self._grown = Grown(
            tokens=roots.new_empty(shape),
            parents=roots.new_empty(shape),
            scores=torch.empty(shape, device=roots.device),
        )

    def expand(self, best: TopTokens) -> Frontier:
        self._lanes = lanes = expand(*best, self.roots, self._lanes, self._grown, self._seen)
        self._seen += best.tokens[0].numel()
        self._depth += 1
        return Frontier(lanes.tokens, lanes.lanes, lanes.scores)

    def select(self, num_nodes: int) -> Tree:
        self._check(num_nodes)
        if not self._depth:
            return single_node_tree(self.roots[:, 0])
        shape, device = (len(self.roots), num_nodes), self.roots.device
        tree = Tree(
            tokens=self.roots.new_empty(shape),
            parents=self.roots.new_empty(shape),
            depths=self.roots.new_empty(shape),
            ancestors=torch.empty(*shape, num_nodes, dtype=torch.bool, device=device),
            scores=torch.empty(shape, device=device),
        )
        select(self._grown, self._seen, self.topk, self._depth, *tree)
        return tree
