"""Trees of candidates on a GPU: a kernel for each expansion and one for the choice."""

from __future__ import annotations

import torch
from torch import Tensor

from mamba_eagle.kernels.draft_tree.triton import Grown, Lanes, expand, select
from mamba_eagle.kernels.top_log_probs import TopTokens
from mamba_eagle.tree.tree import Candidates, Frontier, Tree, single_node_tree


class TritonCandidates(Candidates):
    """The same, in buffers that hold the candidates of ``steps`` expansions."""

    def __init__(self, roots: Tensor, topk: int, steps: int) -> None:
        self.roots, self.topk = roots.unsqueeze(1), topk
        self._seen, self._steps = 1, 0
        self._lanes: Lanes | None = None
        shape = (len(roots), 1 + topk + (steps - 1) * topk * topk)
        self._grown = Grown(
            tokens=roots.new_empty(shape),
            parents=roots.new_empty(shape),
            scores=torch.empty(shape, device=roots.device),
        )

    def expand(self, best: TopTokens) -> Frontier:
        self._lanes = lanes = expand(*best, self.roots, self._lanes, self._grown, self._seen)
        self._seen += best.tokens[0].numel()
        self._steps += 1
        return Frontier(lanes.tokens, lanes.lanes, lanes.scores)

    def select(self, num_nodes: int) -> Tree:
        self._check(num_nodes)
        if not self._steps:
            return single_node_tree(self.roots[:, 0])
        shape, device = (len(self.roots), num_nodes), self.roots.device
        tree = Tree(
            tokens=self.roots.new_empty(shape),
            parents=self.roots.new_empty(shape),
            depths=self.roots.new_empty(shape),
            ancestors=torch.empty(*shape, num_nodes, dtype=torch.bool, device=device),
            scores=torch.empty(shape, device=device),
        )
        select(self._grown, self._seen, self.topk, self._steps, *tree)
        return tree
