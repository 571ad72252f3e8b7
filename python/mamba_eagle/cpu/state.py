"""Both state schemes on a CPU in float32: one fused call per layer, no gathers.

The buffers are torch tensors; numpy views of them are created once, since kernels take arrays.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mamba_eagle.backend.pools import RequestTable, StatePool
from mamba_eagle.backend.rows import RowScheme, layer_rows
from mamba_eagle.backend.state import KeptRows, SchemeSize, StatelessScheme
from mamba_eagle.cpu.ops import tree_verify as cpu
from mamba_eagle.cpu.programs.layers import FusedLayers, new_layout
from mamba_eagle.cpu.weights import Mixer, layer_weights
from mamba_eagle.kernels.tree_verify.layout import RowBuffers, TreeLayout
from mamba_eagle.model_config import RecurrenceConfig
from mamba_eagle.tree.accept import Truncated
from mamba_eagle.tree.tree import Tree


class CpuDeferred(RowScheme):
    """Rows and folds; a journal consists of ``path`` and ``journal_len`` alone. Layouts are
    TreeLayouts of arrays."""

    has_journal = True
    recurrent = True

    def __init__(
        self, config: RecurrenceConfig, size: SchemeSize, table: RequestTable, pool: StatePool
    ) -> None:
        super().__init__(config, size, table, pool)
        self._path, self._journal_len = self.rows.path.numpy(), self.rows.journal_len.numpy()
        self._processed, self._state_slot = table.processed.numpy(), table.state_slot.numpy()
        self._buffers: dict[int, cpu.Buffers] = {}  # by layer
        self._kept: tuple[KeptRows, list[np.ndarray]] | None = None  # and its arrays
        # what a state is written by, gates and decays, as ``cpu.Buffers``
        (H, P, N), groups = config.state_shape, config.num_groups
        self.recurrence = RowBuffers(self.buffer(H * P + groups * N), self.gates, self.buffer(H))
        self._fused = FusedLayers(self)

    def verify(self, layer: Mixer, layout: TreeLayout, xbc: Tensor, dt: Tensor) -> Tensor:
        y = torch.empty(xbc.shape[0], self.config.inner_size)
        (H, P, N), rows = self.config.state_shape, layout.journal.shape[1] + layout.rows.shape[1]
        work = len(xbc) * H * P * (N + rows)  # at most
        weights, buffers = layer_weights(layer), self.buffers_of(layer.index)
        inputs = (xbc.contiguous().numpy(), dt.contiguous().numpy())
        cpu.deferred_verify(work, *inputs, layout, weights, buffers, y.numpy())
        return y

    def keep_rows(
        self, slots: Tensor, accepted: Truncated, features: Tensor, kept: KeptRows
    ) -> None:
        if self._kept is None or self._kept[0] is not kept:
            self._kept = (kept, [part.numpy() for part in kept])
        *to, trail, processed = self._kept[1]
        new = (slots.numpy(), accepted.nodes.numpy(), accepted.count.numpy(), processed, trail)
        paths = (self._path, self._newest(), self.rows.history)
        rows = (self.rows.conv_in.numpy(), self.recurrence.dt.numpy())
        cpu.keep_rows(*new, *paths, rows, features.numpy(), tuple(to))

    def run(
        self, layers: Sequence[nn.Module], hidden: Tensor, ctx: Any, layout: Any
    ) -> Tensor | None:
        return self._fused.run(layers, hidden, ctx, layout)

    def _newest(self) -> np.ndarray:
        """How many rows each path has, of which the last are the tokens accepted last: [R]."""
        return self._journal_len

    def finish(self, slots: Tensor, state_slots: Tensor, keep: Tensor) -> None:
        lengths = self.rows.journal_len[slots]
        if bool((keep > lengths).any()):  # rows that are not there would be read at any address
            raise ValueError(
                f"keep {keep.tolist()} exceeds the journals of slots {slots.tolist()}, which have "
                f"{lengths.tolist()} tokens: a release folds to a position that was processed"
            )
        moved = keep > 0
        if bool(moved.any()):
            self._fold(slots[moved].numpy(), keep[moved].numpy())
        self.rows.store_history(slots, state_slots)

    def begin(self, slots: Tensor, tree: Tree) -> TreeLayout:
        nodes = tree.parents.shape[1]
        max_journal = self.size.rows - max(nodes, self.size.nodes) - self.size.spare
        host_slots = slots.numpy()
        crowded = self._journal_len[host_slots] > max_journal
        if crowded.any():
            folded = host_slots[crowded]
            self._fold(folded, self._journal_len[folded])
        layout = self._layout(host_slots, nodes, tree.parents.numpy())
        cpu.fold_in_step(layout, *self._kept_by_slot())
        return layout

    def accept(self, layout: TreeLayout, accepted: Truncated, features: Tensor) -> None:
        nodes, count = accepted.nodes.numpy(), accepted.count.numpy()
        new = (layout.slots, layout.rows, nodes, count, features.flatten(0, 1).numpy())
        journals = (self._path, self._journal_len, self.rows.feature.numpy())
        cpu.extend_journals(*new, self.rows.history, *journals)

    def folded(self, slots: Tensor) -> Tensor:
        index = slots.numpy()
        return torch.from_numpy(self._processed[index] - self._journal_len[index])

    def stem(self, slots: Tensor, lanes: int) -> TreeLayout:
        layout = self._layout(slots.numpy(), lanes, None)
        return TreeLayout(*(None if part is None else torch.from_numpy(part) for part in layout))

    def lane_layout(self, lanes: TreeLayout) -> TreeLayout:
        arrays = (None if part is None else part.contiguous().numpy() for part in lanes)
        return TreeLayout(*arrays)._replace(fold=np.zeros(len(lanes.slots), np.bool_))

    def _layout(self, slots: np.ndarray, nodes: int, parents: np.ndarray | None) -> TreeLayout:
        layout = new_layout(len(slots), nodes, self.size.rows, self.rows.history)
        layout = layout._replace(slots=slots, parents=parents)
        kept = (self._state_slot, self._path, self._journal_len)
        journals = (layout.state_slots, layout.journal, layout.journal_len)
        cpu.begin(slots, *kept, *journals, layout.rows, layout.tail)
        return layout

    def buffers_of(self, layer: int) -> cpu.Buffers:
        if layer not in self._buffers:
            parts = (self.rows.conv_in[layer], *layer_rows(self.recurrence, layer))
            own = (part.numpy() for part in (*parts, self.pool.ssm[layer]))
            self._buffers[layer] = cpu.Buffers(*own)
        return self._buffers[layer]

    def _fold(self, slots: np.ndarray, lengths: np.ndarray) -> None:
        """Write the states after the first ``lengths`` [f] tokens of the journals to the state
        slots of the requests in ``slots`` [f], and empty the journals."""
        history, state_slots = self.rows.history, self._state_slot[slots]
        work = int(lengths.sum()) * prod(self.config.state_shape)
        for layer in range(self.size.layers):
            buffers = self.buffers_of(layer)
            cpu.fold(work, slots, lengths, self._path, state_slots, history, buffers)
        cpu.empty_journals(slots, lengths, *self._kept_by_slot())

    def _kept_by_slot(self) -> tuple[Any, ...]:
        """What ``empty_journals`` takes behind slots and lengths."""
        rows = self.rows
        arrays = (part.numpy() for part in (rows.conv_in, rows.feature, self.pool.feature))
        return (self._state_slot, self._path, self._journal_len, rows.history, *arrays)

    @property
    def num_bytes(self) -> int:
        return self.rows.num_bytes + sum(part.nbytes for part in self.recurrence)


class CpuSnapshot(CpuDeferred):
    """Journals are folded as they are made: between steps there are states alone, as with a state
    per node, which would be written for every node and not for the accepted ones."""

    has_journal = False

    def accept(self, layout: TreeLayout, accepted: Truncated, features: Tensor) -> None:
        super().accept(layout, accepted, features)
        self._accepted = self._journal_len.copy()
        self._fold(layout.slots, self._accepted[layout.slots])

    def _newest(self) -> np.ndarray:
        return self._accepted


class CpuStateless(StatelessScheme):
    """For models without recurrent layers."""

    recurrent = False

    def __init__(self, table: RequestTable, pool: StatePool) -> None:
        super().__init__(table, pool)
        self._fused = FusedLayers(self)

    def run(
        self, layers: Sequence[nn.Module], hidden: Tensor, ctx: Any, layout: Any
    ) -> Tensor | None:
        return self._fused.run(layers, hidden, ctx, layout)


CPU_SCHEMES = {"deferred": CpuDeferred, "snapshot": CpuSnapshot}
