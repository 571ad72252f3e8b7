"""The verify scheme of models without recurrent state: attention alone remembers."""

from __future__ import annotations

from torch import Tensor, where

from mamba_eagle.layers.mamba2 import Mamba2Mixer
from mamba_eagle.runner.pools import RequestTable, StatePool
from mamba_eagle.runner.verify import VerifyScheme
from mamba_eagle.tree.accept import Truncated
from mamba_eagle.tree.tree import Tree


class StatelessVerify(VerifyScheme):
    """Only the feature of the last token, which a draft head needs, follows the sequence."""

    name = "stateless"

    def __init__(self, table: RequestTable, pool: StatePool) -> None:
        self.table, self.pool = table, pool

    on_device = True

    def start(self, slots: Tensor, state_slots: Tensor) -> None: ...

    def finish(self, slots: Tensor, state_slots: Tensor, keep: Tensor) -> None: ...

    def begin(self, slots: Tensor, tree: Tree) -> None:
        self.state_slots = self.table.state_slot[slots]

    def verify(self, layer: Mamba2Mixer, xbc: Tensor, dt: Tensor) -> Tensor:
        raise AssertionError("the model has no Mamba2 layer")

    def accept(self, accepted: Truncated, features: Tensor) -> None:
        if not features.shape[2]:
            return  # a drafter that carries nothing along
        last = accepted.nodes.gather(1, (accepted.count - 1).clamp(min=0)[:, None])  # [b, 1]
        made = features.gather(1, last[..., None].expand(-1, -1, features.shape[2]))[:, 0]
        # a request that had ended accepts nothing: its feature stays
        feature, alive = self.pool.feature, (accepted.count > 0)[:, None]
        before = feature[self.state_slots]
        feature[self.state_slots] = where(alive, made.to(feature.dtype), before)

    def folded(self, slots: Tensor) -> Tensor:
        return self.table.processed[slots]

    @property
    def num_bytes(self) -> int:
        return 0
