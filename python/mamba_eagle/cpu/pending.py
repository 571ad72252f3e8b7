"""Pending entries of a drafter on a CPU: one kernel call appends them."""

from collections.abc import Callable

from torch import Tensor

from mamba_eagle.backend.pending import PendingEntries, PendingSize
from mamba_eagle.backend.pools import RequestTable
from mamba_eagle.cpu.abi import Append
from mamba_eagle.cpu.span_kernels import Call
from mamba_eagle.cpu.spans.steps import APPEND
from mamba_eagle.tree.accept import Truncated


class CpuPendingEntries(PendingEntries):
    def __init__(self, table: RequestTable, size: PendingSize) -> None:
        super().__init__(table, size)
        requests, places, features = self.features.shape
        self._counted = (table.remaining.numpy(), self.pending.numpy())
        own = Append(size=features, R=requests, places=places)
        own.point(waiting_tokens=self.tokens, waiting=self.features, pending=self.pending)
        self._call = Call(APPEND, own)

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
        given.slots, given.nodes, given.tokens, given.count, given.entries = (
            part.data_ptr() for part in kept
        )
        given.b, given.T, given.D = *features.shape[:2], accepted.nodes.shape[1]
        self._call.run(1, 0)
