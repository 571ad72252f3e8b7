"""The verify schemes of verify.py on a CPU in float32: one fused call a layer, no gathers.

Index tables and buffers are those of the torch schemes; numpy views of them are made once, since
the kernels take arrays.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mamba_eagle.kernels.tree_verify import cpu
from mamba_eagle.layers.mamba2 import Mamba2Mixer
from mamba_eagle.runner.verify import DeferredVerify, RecurrentVerify, SnapshotVerify, Step
from mamba_eagle.tree.accept import Truncated
from mamba_eagle.tree.tree import Tree


class _Fused(RecurrentVerify):
    """What both schemes share: the step's arrays and the call a layer."""

    kernel: Callable[..., None]

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._path, self._journal_len = self.path.numpy(), self.journal_len.numpy()
        self._run = self.table.processed.numpy()
        self._layers: dict[int, tuple[cpu.LayerWeights, Any]] = {}

    def begin_step(self, step: Step) -> None:
        self.step = step
        self.nodes_at = cpu.Nodes(
            *(
                part.numpy()
                for part in (
                    step.slots,
                    step.rows,
                    step.parents,
                    step.path,
                    step.journal_len,
                    step.state_slots,
                )
            )
        )

    def verify(self, layer: Mamba2Mixer, xbc: Tensor, dt: Tensor) -> Tensor:
        known = self._layers.get(layer.index)
        if known is None:
            known = self._layers[layer.index] = (layer_weights(layer), self._buffers(layer.index))
        y = torch.empty(xbc.shape[0], self.config.inner_size)
        inputs = (xbc.contiguous().numpy(), dt.contiguous().numpy())
        self.kernel(*inputs, self.nodes_at, *known, y.numpy())
        return y

    @abstractmethod
    def _buffers(self, layer: int) -> Any:
        """The layer's buffers, as the kernel takes them."""


class FusedDeferredVerify(_Fused, DeferredVerify):
    """Rows and folds; the journal is ``path`` and ``journal_len`` and nothing else."""

    kernel = staticmethod(cpu.deferred_verify)

    def accept(self, accepted: Truncated, features: Tensor) -> None:
        cpu.extend_journals(
            self.nodes_at.slots,
            self.nodes_at.rows,
            accepted.nodes.numpy(),
            accepted.count.numpy(),
            features.flatten(0, 1).numpy(),
            self.history,
            self._path,
            self._journal_len,
            self.feature.numpy(),
        )

    def folded(self, slots: Tensor) -> Tensor:
        used = slots.numpy()
        return torch.from_numpy(self._run[used] - self._journal_len[used])

    def free_rows(self, slots: Tensor, count: int) -> Tensor:
        rows = torch.empty(len(slots), count, dtype=torch.int64)
        cpu.free_rows(slots.numpy(), self._path, self._journal_len, self.history, rows.numpy())
        return rows

    def _buffers(self, layer: int) -> cpu.Buffers:
        own = (self.conv_in, self.xB, self.dt, self.log_decay, self.pool.ssm)
        return cpu.Buffers(*(part[layer].numpy() for part in own))

    def _fold(self, slots: Tensor, keep: Tensor | None = None) -> None:
        folded = slots.numpy()
        lengths = self._journal_len[folded] if keep is None else keep.numpy()
        state_slots = self.table.state_slot[slots].numpy()
        for layer in range(self.size.layers):
            buffers = self._buffers(layer)
            cpu.fold(folded, lengths, self._path, state_slots, self.history, buffers)
        last = self._path[folded, self.history + lengths - 1] - self.history
        self.pool.feature.numpy()[state_slots] = self.feature.numpy()[folded, last]
        cpu.move_history(folded, lengths, self._path, self.history, self.conv_in.numpy())
        self.journal_len[slots] = 0


class FusedSnapshotVerify(_Fused, SnapshotVerify):
    """One full state a node, written where the torch scheme writes it."""

    kernel = staticmethod(cpu.snapshot_verify)

    def accept(self, accepted: Truncated, features: Tensor) -> None:
        step, count = self.nodes_at, accepted.count.numpy()
        nodes = accepted.nodes.numpy()
        cpu.commit_snapshots(
            step.slots,
            nodes,
            count,
            features.flatten(0, 1).numpy(),
            step.state_slots,
            self.node_states.numpy(),
            self.pool.ssm.numpy(),
            self.pool.feature.numpy(),
        )
        # node i stands in row i
        self._path[step.slots, self.history : self.history + nodes.shape[1]] = nodes + self.history
        cpu.move_history(step.slots, count, self._path, self.history, self.conv_in.numpy())

    def _choose_rows(self, slots: Tensor, tree: Tree) -> Tensor:
        return super()._choose_rows(slots, tree).contiguous()

    def _buffers(self, layer: int) -> cpu.SnapshotBuffers:
        own = (self.conv_in, self.node_states, self.pool.ssm)
        return cpu.SnapshotBuffers(*(part[layer].numpy() for part in own))


def layer_weights(layer: Mamba2Mixer) -> cpu.LayerWeights:
    """A layer's weights in the form the kernels read."""
    taps = layer.conv1d.weight.detach()[:, 0].t()  # [K, C]
    bias = layer.conv1d.bias
    last = taps.new_zeros(taps.shape[1]) if bias is None else bias.detach()
    heads = torch.stack([layer.decay_rate(), layer.dt_bias.detach(), layer.D.detach()])
    low, high = layer.config.time_step_limit
    return cpu.LayerWeights(
        torch.cat([taps, last[None]]).float().numpy(),
        heads.detach().float().numpy(),
        np.float32(low),
        np.float32(high),
    )


FUSED_SCHEMES = {scheme.name: scheme for scheme in (FusedDeferredVerify, FusedSnapshotVerify)}
