"""The state scheme of models without recurrent layers, which have no recurrent state."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, where

from mamba_eagle.backend.pools import RequestTable, StatePool
from mamba_eagle.backend.state import StateScheme
from mamba_eagle.kernels.tree_verify.layout import TreeLayout
from mamba_eagle.tree.accept import Truncated
from mamba_eagle.tree.tree import Tree


class StatelessScheme(StateScheme):
    """Keeps only the feature of the last token, which a draft head needs."""

    on_device = True

    def __init__(
        self, table: RequestTable, pool: StatePool, pack: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        """pack: turns ancestors [b, T, T] bool into bits [b, T, 1], if attention reads bits."""
        self.table, self.pool, self.pack = table, pool, pack

    def start(self, slots: Tensor, state_slots: Tensor) -> None: ...

    def finish(self, slots: Tensor, state_slots: Tensor, keep: Tensor) -> None: ...

    def begin(self, slots: Tensor, tree: Tree) -> TreeLayout:
        return TreeLayout(
            slots=slots,
            state_slots=self.table.state_slot[slots],
            journal=None,
            journal_len=None,
            rows=None,
            parents=tree.parents,
            ancestors=None if self.pack is None else self.pack(tree.ancestors)[..., 0],
            tail=None,
        )

    def verify(self, layer: Any, layout: TreeLayout, channels: Tensor, raw: Tensor) -> Tensor:
        raise AssertionError("the model has no recurrent layer")

    def accept(self, layout: TreeLayout, accepted: Truncated, features: Tensor) -> None:
        if not features.shape[2]:
            return  # a drafter without a carry
        last = accepted.nodes.gather(1, (accepted.count - 1).clamp(min=0)[:, None])  # [b, 1]
        new = features.gather(1, last[..., None].expand(-1, -1, features.shape[2]))[:, 0]
        # a request that had ended accepts no node and keeps its feature
        feature, alive = self.pool.feature, (accepted.count > 0)[:, None]
        old = feature[layout.state_slots]
        feature[layout.state_slots] = where(alive, new.to(feature.dtype), old)

    def ancestor_bits(self, layout: TreeLayout) -> Tensor | None:
        return layout.ancestors

    def folded(self, slots: Tensor) -> Tensor:
        return self.table.processed[slots]

    @property
    def num_bytes(self) -> int:
        return 0
