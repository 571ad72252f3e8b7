"""Trees of candidates on a CPU: one kernel call per expansion and one for the selection."""

import torch

from mamba_eagle.cpu.ops import draft_tree as cpu
from mamba_eagle.kernels.top_log_probs.torch import TopTokens
from mamba_eagle.tree.candidates import Candidates, Frontier
from mamba_eagle.tree.tree import Tree


class CpuCandidates(Candidates):
    def expand(self, best: TopTokens) -> Frontier:
        tokens = best.tokens.flatten(1)
        parents, scores = torch.empty_like(tokens), torch.empty(tokens.shape)
        parent_lanes, order = (
            torch.empty(len(tokens), self.topk, dtype=torch.int64) for _ in range(2)
        )
        cpu.expand(
            best.log_probs.contiguous().numpy(),
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
        self._depth += 1
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
