"""What drafters grow and keep, on a CPU: one kernel call per expansion of a tree, one for its
selection, and one that appends pending entries."""

from collections.abc import Callable

import torch
from torch import Tensor

from mamba_eagle.backend.pending import PendingEntries, PendingSize
from mamba_eagle.backend.pools import RequestTable
from mamba_eagle.cpu.abi import Append
from mamba_eagle.cpu.ops import draft_tree as cpu
from mamba_eagle.cpu.spans.steps import APPEND
from mamba_eagle.kernels.top_log_probs.torch import TopTokens
from mamba_eagle.tree.accept import Truncated
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
        return self._join(tokens, parents, scores, order, parent_lanes)

    def select(self, num_nodes: int) -> Tree:
        self._check(num_nodes)
        tree = room_for_trees(self.roots.shape[0], num_nodes)
        seen = (torch.cat(part, dim=1) for part in (self._tokens, self._parents, self._scores))
        cpu.select(*(part.numpy() for part in seen), self.topk, *(part.numpy() for part in tree))
        return tree


def room_for_trees(b: int, nodes: int) -> Tree:
    """Trees that are yet to be written."""
    tokens, parents, depths = torch.empty(3, b, nodes, dtype=torch.int64).unbind()
    ancestors = torch.empty(b, nodes, nodes, dtype=torch.bool)
    return Tree(tokens, parents, depths, ancestors, torch.empty(b, nodes))


class CpuPendingEntries(PendingEntries):
    def __init__(self, table: RequestTable, size: PendingSize) -> None:
        super().__init__(table, size)
        requests, places, features = self.features.shape
        self._counted = (table.remaining.numpy(), self.pending.numpy())
        own = self._append = Append(size=features, R=requests, places=places)
        own.point(waiting_tokens=self.tokens, waiting=self.features, pending=self.pending)

    def waiting(self, slots: list[int]) -> list[int]:
        remaining, pending = self._counted
        return [pending.item(slot) if remaining.item(slot) > 0 else 0 for slot in slots]

    def append(
        self,
        slots: Tensor,
        accepted: Truncated,
        features: Tensor,
        entry_features: Callable[[Tensor], Tensor],
    ) -> None:
        # computed for all nodes: in plain steps, where the cost matters, all are accepted
        entries = entry_features(features.flatten(0, 1)).unflatten(0, features.shape[:2])
        new = (slots, accepted.nodes, accepted.tokens, accepted.count, entries)
        kept = [part.contiguous() for part in new]
        given = self._append
        given.slots, given.nodes, given.tokens, given.count, given.entries = (
            part.data_ptr() for part in kept
        )
        given.b, given.T, given.D = *features.shape[:2], accepted.nodes.shape[1]
        APPEND(1, 0, given)
