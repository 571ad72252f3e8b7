"""Pending entries of a drafter on a CPU: one kernel call appends them."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from mamba_eagle.backend.pending import PendingEntries, PendingSize
from mamba_eagle.backend.pools import RequestTable
from mamba_eagle.kernels.numba_steps import APPEND
from mamba_eagle.kernels.vector_code import Call
from mamba_eagle.tree.accept import Truncated


class CpuPendingEntries(PendingEntries):
    def __init__(self, table: RequestTable, size: PendingSize) -> None:
        super().__init__(table, size)
        requests, places, features = self.features.shape
        waiting = (part.data_ptr() for part in (self.tokens, self.features, self.pending))
        sizes = (0, 0, 0, features)
        self._counted = (table.remaining.numpy(), self.pending.numpy())
        self._call = Call(APPEND, *[0] * 5, *sizes, *waiting, requests, places)

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
        given = self._call.arguments
        given[:5] = [part.data_ptr() for part in kept]
        given[5:8] = [*features.shape[:2], accepted.nodes.shape[1]]
        self._call.run(1, 0)
