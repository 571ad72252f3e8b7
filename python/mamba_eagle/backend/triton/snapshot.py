"""One full state per node on a GPU, as in most servers today; written for a fair comparison."""

import torch
from torch import Tensor

from mamba_eagle.backend.pools import RequestTable, StatePool
from mamba_eagle.backend.rows import SnapshotScheme
from mamba_eagle.backend.state import SchemeSize
from mamba_eagle.backend.triton.layer import conv_weights, sizes_of, skip_weights
from mamba_eagle.kernels.causal_conv.triton import tree_conv
from mamba_eagle.kernels.tree_attention.torch import pack_paths
from mamba_eagle.kernels.tree_verify.layout import RowBuffers, TreeLayout
from mamba_eagle.kernels.tree_verify.triton_snapshot import commit_snapshots, snapshot_verify
from mamba_eagle.layers.mamba2 import Mamba2Mixer
from mamba_eagle.model_config import Mamba2Config
from mamba_eagle.tree.accept import Truncated
from mamba_eagle.tree.tree import Tree


class TritonSnapshot(SnapshotScheme):
    """Node i of a tree uses row i; between steps only the history is kept."""

    on_device = True

    def __init__(
        self, config: Mamba2Config, size: SchemeSize, table: RequestTable, pool: StatePool
    ) -> None:
        super().__init__(config, size, table, pool)
        self.sizes = sizes_of(config)
        requests, like = table.processed.shape[0], pool.conv
        width = config.inner_size + config.num_groups * config.state_size

        def inputs(width: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(requests, size.rows, width, dtype=dtype, device=like.device)

        # xB and L are shared by all layers, which run one after the other; the keeper of rows reads
        # dt afterwards
        xB, log_decay = inputs(width, like.dtype), inputs(config.num_heads)
        self.inputs = [RowBuffers(xB, dt, log_decay) for dt in self.gates]

    def begin(self, slots: Tensor, tree: Tree) -> TreeLayout:
        b, nodes = tree.parents.shape
        return TreeLayout(
            slots=slots,
            state_slots=self.table.state_slot[slots],
            journal=slots.new_zeros(b, 0),
            journal_len=self.rows.journal_len[slots],
            rows=torch.arange(nodes, device=slots.device).expand(b, -1).contiguous(),
            parents=tree.parents.contiguous(),
            ancestors=pack_paths(tree.ancestors)[..., 0],
            tail=self.rows.offsets.expand(b, -1).contiguous(),
        )

    def verify(self, layer: Mamba2Mixer, layout: TreeLayout, xbc: Tensor, dt: Tensor) -> Tensor:
        i, weights, conv_in = layer.index, conv_weights(layer), self.rows.conv_in[layer.index]
        C = tree_conv(xbc, dt, weights, conv_in, self.inputs[i], layout, self.sizes)
        state, skip, node_states = self.pool.ssm[i], skip_weights(layer), self.node_states[i]
        states = (state, node_states)
        return snapshot_verify(self.inputs[i], C, weights.A, skip, *states, layout, self.sizes)

    def accept(self, layout: TreeLayout, accepted: Truncated, features: Tensor) -> None:
        count, pool, own = accepted.count, self.pool, self.rows
        last = accepted.nodes.gather(1, (count - 1).clamp(min=0)[:, None])  # [b, 1]
        at = (layout.slots, layout.state_slots, last[:, 0])
        keys = None
        if pool.rounding.keyed:
            keys = pool.rounding.keys(layout.slots, self.table.processed[layout.slots] + count)
        commit_snapshots(self.node_states, pool.ssm, *at, count, round_keys=keys)
        # a request that had ended accepts no node and keeps its state, feature and history
        pool.keep_features(layout.state_slots, accepted, features)
        rows = layout.rows.gather(1, accepted.nodes) + own.history
        path = torch.cat([own.offsets.expand(len(count), -1), rows], dim=1)
        places = path.gather(1, count[:, None] + own.offsets)
        slots, history = layout.slots[:, None], own.conv_in
        history[:, slots, own.offsets] = history[:, slots, places]

    def ancestor_bits(self, layout: TreeLayout) -> Tensor | None:
        return layout.ancestors
