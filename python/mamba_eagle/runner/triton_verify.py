"""Rows and folds on a GPU: two kernels a layer, and nothing that waits for the device.

As DeferredVerify, but for two things. Whether a request folds is a flag on the device, and the
kernel that verifies also folds: outputs are made from the old checkpoint and the whole chain, the
nodes' L already counts from the new one. And the history is not copied after a fold: ``path`` goes
on naming the places where the last K-1 tokens stand, and those rows are not given away.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mamba_eagle.kernels.causal_conv.triton import tree_conv
from mamba_eagle.kernels.tree_verify.triton import (
    RowBuffers,
    TreeStep,
    ancestor_bits,
    tree_verify,
)
from mamba_eagle.kernels.tree_verify.triton_fold import fold_chains
from mamba_eagle.layers.mamba2 import Mamba2Mixer
from mamba_eagle.models.config import Mamba2Config
from mamba_eagle.runner.pools import CheckpointPool, RequestTable
from mamba_eagle.runner.triton_layer import conv_weights, sizes_of
from mamba_eagle.runner.triton_snapshot import TritonSnapshotVerify
from mamba_eagle.runner.verify import DeferredVerify, RecurrentVerify, SchemeSize, Step
from mamba_eagle.spec.accept import Truncated
from mamba_eagle.spec.tree import Tree


class TritonDeferredVerify(DeferredVerify):
    """``most_chain`` rows are the chain's at most, and a step in which a chain might outgrow them
    folds it:

    W rows = most_chain + K-1 of history + nodes of a tree + spare ones
    """

    on_device = True

    def __init__(
        self, config: Mamba2Config, size: SchemeSize, table: RequestTable, pool: CheckpointPool
    ) -> None:
        """Raises: ValueError when a step's accepted tokens find no room."""
        super().__init__(config, size, table, pool)
        self.most_chain = size.rows - self.history - size.nodes - size.spare
        if self.most_chain < size.accepts:
            least = size.rows - self.most_chain + size.accepts
            raise ValueError(f"{size.rows} rows a request: this tree needs {least} on a GPU")
        self.sizes = sizes_of(config)

    def start(self, slots: Tensor, checkpoints: Tensor) -> None:
        super().start(slots, checkpoints)
        self.path[slots[:, None], self.offsets] = self.offsets

    def finish(self, slots: Tensor, checkpoints: Tensor, keep: Tensor) -> None:
        """Nothing of the request but its checkpoint is in order afterwards."""
        h, path = self.history, self.path[slots]
        chain = (path[:, h : h + self.most_chain] - h).contiguous()
        buffers = RowBuffers(self.xB, self.dt, self.log_decay)
        fold_chains(buffers, self.pool.ssm, slots, checkpoints, chain, keep, self.sizes)
        last = chain.gather(1, (keep - 1).clamp(min=0)[:, None])[:, 0].clamp(min=0)
        before = self.pool.feature[checkpoints]
        made = self.feature[slots, last]
        self.pool.feature[checkpoints] = torch.where((keep > 0)[:, None], made, before)
        history = path.gather(1, keep[:, None] + self.offsets)
        self.pool.conv[:, checkpoints] = self.conv_in[:, slots[:, None], history]

    def begin(self, slots: Tensor, tree: Tree) -> None:
        self.fold: Tensor | None = self.chain_len[slots] + self.size.accepts > self.most_chain
        self._begin(self._step(slots, self._choose_rows(slots, tree), tree))

    def begin_step(self, step: Step) -> None:
        self.fold = None  # lanes: nothing of them stays
        self._begin(step)

    def _begin(self, step: Step) -> None:
        h = self.history
        self.step = step
        self.tail = step.path.gather(1, step.chain_len[:, None] + self.offsets)  # [b, K-1]
        self.tree_step = TreeStep(
            slots=step.slots,
            checkpoints=step.checkpoints,
            chain=(step.path[:, h : h + self.most_chain] - h).contiguous(),
            chain_len=step.chain_len,
            rows=step.rows.contiguous(),
            parents=step.parents,
            ancestors=ancestor_bits(step.ancestors),
            tail=self.tail,
            fold=self.fold,
        )

    def verify(self, layer: Mamba2Mixer, xbc: Tensor, dt: Tensor) -> Tensor:
        i = layer.index
        buffers = RowBuffers(self.xB[i], self.dt[i], self.log_decay[i])
        weights, skip = conv_weights(layer), self._constants(layer).skip
        C = tree_conv(xbc, dt, weights, self.conv_in[i], buffers, self.tree_step, self.sizes)
        ssm = self.pool.ssm[i]
        return tree_verify(buffers, C, skip[:, 0], ssm, self.tree_step, self.sizes)

    def accept(self, accepted: Truncated, features: Tensor) -> None:
        if self.fold is not None:
            self._empty_folded(self.fold)
        super().accept(accepted, features)

    def _empty_folded(self, fold: Tensor) -> None:
        """The kernels have written the folded chains to their checkpoints: indices follow."""
        step, h = self.step, self.history
        history = torch.where(fold[:, None], self.tail, step.path[:, :h])
        self.path[step.slots[:, None], self.offsets] = history
        # a chain's last row; of an empty chain any, whose feature is not taken
        last = (step.path.gather(1, (h + step.chain_len - 1)[:, None])[:, 0] - h).clamp_(min=0)
        moved = (fold & (step.chain_len > 0))[:, None]
        before = self.pool.feature[step.checkpoints]
        self.pool.feature[step.checkpoints] = torch.where(
            moved, self.feature[step.slots, last], before
        )
        length = torch.where(fold, 0, step.chain_len)
        self.chain_len[step.slots] = length
        self.step = step._replace(chain_len=length)

    def free_rows(self, slots: Tensor, count: int) -> Tensor:
        """Neither the chain's nor those that serve as history."""
        W, h = self.size.rows, self.history
        path = self.path[slots, : h + W]
        columns = torch.arange(h + W, device=slots.device)
        used = columns < (h + self.chain_len[slots])[:, None]
        # history places below h are no rows
        taken = torch.where(used & (path >= h), path - h, W)
        marks = torch.zeros(len(slots), W + 1, dtype=torch.int8, device=slots.device)
        marks.scatter_(1, taken, 1)
        return marks[:, :W].argsort(dim=1, stable=True)[:, :count]

    def _choose_rows(self, slots: Tensor, tree: Tree) -> Tensor:
        return self.free_rows(slots, tree.tokens.shape[1])


TRITON_SCHEMES: dict[str, type[RecurrentVerify]] = {
    scheme.name: scheme for scheme in (TritonDeferredVerify, TritonSnapshotVerify)
}
