"""Pending entries of a drafter on a CPU: one kernel call appends them."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from mamba_eagle.backend.pending import PendingEntries
from mamba_eagle.kernels.accept.cpu import append_pending
from mamba_eagle.tree.accept import Truncated


class CpuPendingEntries(PendingEntries):
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
        waiting = (self.tokens, self.features, self.pending)
        append_pending(*(part.numpy() for part in (*new, *waiting)))
