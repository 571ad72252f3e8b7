"""Rows and folds on a GPU: two kernels a layer, and nothing that waits for the device.

As DeferredVerify, but for two things. Whether a request folds is a flag on the device, and the
kernel that verifies also folds: outputs are made from the old state slot and the whole journal, the
nodes' L already counts from the new one. And the history is not copied after a fold: ``path`` goes
on naming the places where the last K-1 tokens stand, and those rows are not given away.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mamba_eagle.kernels.causal_conv.triton import tree_conv
from mamba_eagle.kernels.tree_attention.triton_masks import pack_paths
from mamba_eagle.kernels.tree_verify.naive_rows import free_rows
from mamba_eagle.kernels.tree_verify.triton import RowBuffers, TreeStep, tree_verify
from mamba_eagle.kernels.tree_verify.triton_fold import fold_journals
from mamba_eagle.kernels.tree_verify.triton_rows import Paths, Room, accept_rows, begin_rows
from mamba_eagle.layers.mamba2 import Mamba2Mixer
from mamba_eagle.model_config import Mamba2Config
from mamba_eagle.runner.pools import RequestTable, StatePool
from mamba_eagle.runner.triton_layer import conv_weights, sizes_of
from mamba_eagle.runner.triton_snapshot import TritonSnapshotVerify
from mamba_eagle.runner.verify import DeferredVerify, RecurrentVerify, SchemeSize, Step
from mamba_eagle.tree.accept import Truncated
from mamba_eagle.tree.tree import Tree


class TritonDeferredVerify(DeferredVerify):
    """``max_journal`` rows are the journal's at most, and a step in which a journal might outgrow them
    folds it:

    W rows = max_journal + K-1 of history + nodes of a tree + spare ones
    """

    on_device = True

    def __init__(
        self, config: Mamba2Config, size: SchemeSize, table: RequestTable, pool: StatePool
    ) -> None:
        """Raises: ValueError when a step's accepted tokens find no room."""
        super().__init__(config, size, table, pool)
        self.max_journal = size.rows - self.history - size.nodes - size.spare
        if self.max_journal < size.accepts:
            least = size.rows - self.max_journal + size.accepts
            raise ValueError(f"{size.rows} rows a request: this tree needs {least} on a GPU")
        self.sizes = sizes_of(config)
        self.paths = Paths(table.state_slot, self.path, self.journal_len)
        self.room = Room(self.history, size.rows, self.max_journal, size.accepts)

    def start(self, slots: Tensor, state_slots: Tensor) -> None:
        super().start(slots, state_slots)
        self.path[slots[:, None], self.offsets] = self.offsets

    def finish(self, slots: Tensor, state_slots: Tensor, keep: Tensor) -> None:
        """Nothing of the request but its state slot is in order afterwards."""
        h, path = self.history, self.path[slots]
        journal = (path[:, h : h + self.max_journal] - h).contiguous()
        buffers = RowBuffers(self.xB, self.dt, self.log_decay)
        fold_journals(buffers, self.pool.ssm, slots, state_slots, journal, keep, self.sizes)
        last = journal.gather(1, (keep - 1).clamp(min=0)[:, None])[:, 0].clamp(min=0)
        before = self.pool.feature[state_slots]
        made = self.feature[slots, last]
        self.pool.feature[state_slots] = torch.where((keep > 0)[:, None], made, before)
        history = path.gather(1, keep[:, None] + self.offsets)
        self.pool.conv[:, state_slots] = self.conv_in[:, slots[:, None], history]

    def begin(self, slots: Tensor, tree: Tree) -> None:
        self.tree_step = begin_rows(slots, tree.parents, tree.ancestors, self.paths, self.room)

    def begin_step(self, step: Step) -> None:
        """Lanes: they do not fold, since nothing of them stays."""
        h = self.history
        self.tree_step = TreeStep(
            slots=step.slots,
            state_slots=step.state_slots,
            journal=(step.path[:, h : h + self.max_journal] - h).contiguous(),
            journal_len=step.journal_len,
            rows=step.rows.contiguous(),
            parents=step.parents,
            ancestors=pack_paths(step.ancestors)[..., 0],
            tail=step.path.gather(1, step.journal_len[:, None] + self.offsets),  # [b, K-1]
        )

    def verify(self, layer: Mamba2Mixer, xbc: Tensor, dt: Tensor) -> Tensor:
        i = layer.index
        buffers = RowBuffers(self.xB[i], self.dt[i], self.log_decay[i])
        weights, skip = conv_weights(layer), self._constants(layer).skip
        C = tree_conv(xbc, dt, weights, self.conv_in[i], buffers, self.tree_step, self.sizes)
        ssm = self.pool.ssm[i]
        return tree_verify(buffers, C, skip[:, 0], ssm, self.tree_step, self.sizes)

    def accept(self, accepted: Truncated, features: Tensor) -> None:
        """The kernels have written the folded journals to their state slots: indices follow."""
        tables = (self.paths, self.room, self.feature, self.pool.feature)
        accept_rows(self.tree_step, accepted.nodes, accepted.count, *tables, features)

    def free_rows(self, slots: Tensor, count: int) -> Tensor:
        """Neither the journal's nor those that serve as history."""
        lengths = self.journal_len[slots]
        return free_rows(self.path[slots], lengths, self.history, self.size.rows, count)


TRITON_SCHEMES: dict[str, type[RecurrentVerify]] = {
    scheme.name: scheme for scheme in (TritonDeferredVerify, TritonSnapshotVerify)
}
