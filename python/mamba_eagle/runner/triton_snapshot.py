"""One full state a node on a GPU: what servers do today, as well as we can write it."""

from __future__ import annotations

import torch
from torch import Tensor

from mamba_eagle.kernels.causal_conv.triton import move_history, tree_conv
from mamba_eagle.kernels.tree_attention.triton_masks import pack_paths
from mamba_eagle.kernels.tree_verify.triton import RowBuffers, TreeStep
from mamba_eagle.kernels.tree_verify.triton_snapshot import commit_snapshots, snapshot_verify
from mamba_eagle.layers.mamba2 import Mamba2Mixer
from mamba_eagle.model_config import Mamba2Config
from mamba_eagle.runner.pools import RequestTable, StatePool
from mamba_eagle.runner.triton_layer import conv_weights, sizes_of
from mamba_eagle.runner.verify import SchemeSize, SnapshotVerify, Step
from mamba_eagle.tree.accept import Truncated


class TritonSnapshotVerify(SnapshotVerify):
    """Node i of a tree stands in row i; between steps only the history is kept."""

    on_device = True

    def __init__(
        self, config: Mamba2Config, size: SchemeSize, table: RequestTable, pool: StatePool
    ) -> None:
        super().__init__(config, size, table, pool)
        self.sizes = sizes_of(config)
        requests, device = self.conv_in.shape[1], self.conv_in.device
        width = config.inner_size + config.num_groups * config.state_size

        def rows(width: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(requests, size.rows, width, dtype=dtype, device=device)

        # of one layer at a time: layers run one after the other
        self.inputs = RowBuffers(
            rows(width, self.conv_in.dtype), rows(config.num_heads), rows(config.num_heads)
        )

    def begin_step(self, step: Step) -> None:
        self.step = step
        b = len(step.slots)
        self.tree_step = TreeStep(
            slots=step.slots,
            state_slots=step.state_slots,
            chain=step.rows.new_zeros(b, 0),
            journal_len=step.journal_len,
            rows=step.rows.contiguous(),
            parents=step.parents,
            ancestors=pack_paths(step.ancestors)[..., 0],
            tail=self.offsets.expand(b, -1).contiguous(),
        )

    def verify(self, layer: Mamba2Mixer, xbc: Tensor, dt: Tensor) -> Tensor:
        i, weights, step = layer.index, conv_weights(layer), self.tree_step
        C = tree_conv(xbc, dt, weights, self.conv_in[i], self.inputs, step, self.sizes)
        state, skip = self.pool.ssm[i], self._constants(layer).skip[:, 0]
        return snapshot_verify(
            self.inputs, C, weights.A, skip, state, self.node_states[i], step, self.sizes
        )

    def accept(self, accepted: Truncated, features: Tensor) -> None:
        step, count, pool = self.step, accepted.count, self.pool
        last = accepted.nodes.gather(1, (count - 1).clamp(min=0)[:, None])  # [b, 1]
        commit_snapshots(
            self.node_states, pool.ssm, step.slots, step.state_slots, last[:, 0], count
        )
        # a request that had ended accepts nothing: its state, feature and history stay
        made = features.gather(1, last[..., None].expand(-1, -1, features.shape[2]))[:, 0]
        before = pool.feature[step.state_slots]
        alive = (count > 0)[:, None]
        pool.feature[step.state_slots] = torch.where(alive, made.to(before.dtype), before)
        rows = step.rows.gather(1, accepted.nodes) + self.history
        path = torch.cat([self.offsets.expand(len(count), -1), rows], dim=1)
        move_history(self.conv_in, step.slots, path.gather(1, count[:, None] + self.offsets), count)
