"""Rows and folds on a GPU: two kernels per layer, without waiting for the device.

Two things differ from the torch scheme. First, whether a request folds is a flag on the device.
Second, the history is not copied after a fold: ``path`` still refers to the places of the last K-1
tokens, and their rows are not reused.
"""

from abc import abstractmethod

import torch
from torch import Tensor

from mamba_eagle.backend.pools import RequestTable, StatePool
from mamba_eagle.backend.rows import DeferredScheme, layer_rows
from mamba_eagle.backend.state import SchemeSize
from mamba_eagle.backend.triton.layer import conv_weights, sizes_of, skip_weights
from mamba_eagle.kernels.causal_conv.triton import tree_conv
from mamba_eagle.kernels.tree_verify.gluon import tree_verify
from mamba_eagle.kernels.tree_verify.layout import (
    Folds,
    Paths,
    Room,
    RowBuffers,
    TreeLayout,
    free_rows,
)
from mamba_eagle.kernels.tree_verify.triton_fold import fold_journals
from mamba_eagle.kernels.tree_verify.triton_rows import accept_rows, begin_rows
from mamba_eagle.layers.mamba2 import Mamba2Mixer
from mamba_eagle.model_config import DeltaConfig, Mamba2Config
from mamba_eagle.tree.accept import Truncated
from mamba_eagle.tree.tree import Tree


class TritonRows(DeferredScheme):
    """What the recurrences have in common. A journal has at most ``max_journal`` rows; a step that
    might exceed them folds first.

    Rows per request: W = max_journal + K-1 rows of history + nodes of a tree + spare rows.
    """

    on_device = True

    def __init__(
        self,
        config: Mamba2Config | DeltaConfig,
        size: SchemeSize,
        table: RequestTable,
        pool: StatePool,
    ) -> None:
        """Raises: ValueError if there is no room for the tokens that a step may accept."""
        super().__init__(config, size, table, pool)
        self.max_journal = size.rows - self.rows.history - size.nodes - size.spare
        if self.max_journal < size.accepts:
            required = size.rows - self.max_journal + size.accepts
            raise ValueError(f"{size.rows} rows per request: this tree needs {required} on a GPU")
        self.sizes = sizes_of(config)
        self.paths = Paths(table.state_slot, self.rows.path, self.rows.journal_len)
        self.room = Room(self.rows.history, size.rows, self.max_journal, size.accepts)

    def start(self, slots: Tensor, state_slots: Tensor) -> None:
        super().start(slots, state_slots)
        self.rows.path[slots[:, None], self.rows.offsets] = self.rows.offsets

    def finish(self, slots: Tensor, state_slots: Tensor, keep: Tensor) -> None:
        """Afterwards only the state slot is valid; journal and history are not updated."""
        h, path, pool = self.rows.history, self.rows.path[slots], self.pool
        journal = (path[:, h : h + self.max_journal] - h).contiguous()
        keys = pool.rounding.keys(slots, self.folded(slots) + keep)
        self._fold(Folds(slots, state_slots, journal, keep, round_keys=keys))
        last = journal.gather(1, (keep - 1).clamp(min=0)[:, None])[:, 0].clamp(min=0)
        old, new = pool.feature[state_slots], self.rows.feature[slots, last]
        pool.feature[state_slots] = torch.where((keep > 0)[:, None], new, old)
        history = path.gather(1, keep[:, None] + self.rows.offsets)
        pool.conv[:, state_slots] = self.rows.conv_in[:, slots[:, None], history]

    def begin(self, slots: Tensor, tree: Tree) -> TreeLayout:
        layout = begin_rows(slots, tree.parents, tree.ancestors, self.paths, self.room)
        if not self.pool.rounding.keyed:
            return layout
        ends = self.table.processed[slots]  # where the journals end
        return layout._replace(round_keys=self.pool.rounding.keys(slots, ends))

    @abstractmethod
    def _fold(self, folds: Folds) -> None:
        """In all layers."""

    def accept(self, layout: TreeLayout, accepted: Truncated, features: Tensor) -> None:
        """Updates indices and features; folded states have already been written."""
        tables = (self.paths, self.room, self.rows.feature, self.pool.feature)
        accept_rows(layout, accepted.nodes, accepted.count, *tables, features)

    def ancestor_bits(self, layout: TreeLayout) -> Tensor | None:
        return layout.ancestors

    def stem(self, slots: Tensor, lanes: int) -> TreeLayout:
        """Lanes do not fold, since they are not kept."""
        h, path, length = self.rows.history, self.rows.path[slots], self.rows.journal_len[slots]
        return TreeLayout(
            slots=slots,
            state_slots=self.table.state_slot[slots],
            journal=path[:, h : h + self.max_journal] - h,
            journal_len=length,
            rows=free_rows(path, length, h, self.size.rows, lanes),
            parents=None,
            ancestors=None,
            tail=path.gather(1, length[:, None] + self.rows.offsets),
        )

    def lane_layout(self, lanes: TreeLayout) -> TreeLayout:
        return lanes._replace(
            journal=lanes.journal.contiguous(),
            rows=lanes.rows.contiguous(),
            ancestors=torch.ones_like(lanes.parents),  # bit 0: itself
            tail=lanes.tail.contiguous(),
        )


class TritonDeferred(TritonRows):
    """Mamba2. The verify kernel also folds: it computes outputs from the old state and the whole
    journal, while the nodes' log_decay already starts from the new state."""

    def __init__(
        self, config: Mamba2Config, size: SchemeSize, table: RequestTable, pool: StatePool
    ) -> None:
        super().__init__(config, size, table, pool)
        xB, log_decay = self.parts
        self.recurrence = RowBuffers(xB, self.gates, log_decay)

    def verify(self, layer: Mamba2Mixer, layout: TreeLayout, xbc: Tensor, dt: Tensor) -> Tensor:
        i, rows = layer.index, layer_rows(self.recurrence, layer.index)
        conv_in, state = self.rows.conv_in[i], self.pool.ssm[i]
        C = tree_conv(xbc, dt, conv_weights(layer), conv_in, rows, layout, self.sizes)
        return tree_verify(rows, C, skip_weights(layer), state, layout, self.sizes, layer=i)

    def _fold(self, folds: Folds) -> None:
        fold_journals(self.recurrence, self.pool.ssm, folds, self.sizes)
