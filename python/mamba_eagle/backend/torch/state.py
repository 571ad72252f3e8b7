"""Both state schemes in torch: rows and folds, or one state per node."""

from abc import abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from mamba_eagle.backend.pools import RequestTable, StatePool
from mamba_eagle.backend.rows import DeferredScheme, RowScheme, SnapshotScheme
from mamba_eagle.backend.state import SchemeSize
from mamba_eagle.kernels.causal_conv.torch import causal_conv_windows
from mamba_eagle.kernels.tree_verify.layout import TreeLayout, free_rows
from mamba_eagle.layers.recurrent import Inputs, Journal, Recurrent, TreeMask
from mamba_eagle.model_config import RecurrenceConfig
from mamba_eagle.tree.accept import Truncated
from mamba_eagle.tree.tree import Tree


class TorchLayout(NamedTuple):
    """A TreeLayout, and the index tables that the torch path derives from it."""

    nodes: TreeLayout
    windows: Tensor  # [b, T, K] places of each node's K-1 nearest ancestors and its own
    mask: TreeMask | None = None  # None for snapshots

    @property
    def shape(self) -> tuple[int, int]:
        """b, T"""
        return self.nodes.rows.shape


class TorchScheme(RowScheme):
    """The common part of both schemes: convolution inputs, paths and rows."""

    def __init__(
        self, config: RecurrenceConfig, size: SchemeSize, table: RequestTable, pool: StatePool
    ) -> None:
        super().__init__(config, size, table, pool)
        self.layers: dict[int, Recurrent] = {}  # as they come by

    def verify(
        self, layer: Recurrent, layout: TorchLayout, channels: Tensor, raw: Tensor
    ) -> Tensor:
        self.layers[layer.index] = layer
        nodes, shape = layout.nodes, layout.shape
        conv_in, slots = self.rows.conv_in[layer.index], nodes.slots[:, None]
        conv_in[slots, nodes.rows + self.rows.history] = channels.view(*shape, -1)
        windows = conv_in[slots[..., None], layout.windows].flatten(0, 1)  # [b*T, K, conv_dim]
        convolved = causal_conv_windows(windows, *layer.taps(), self.config.conv_silu).view(
            *shape, -1
        )
        gates = layer.gates(raw).view(*shape, -1)
        y = self._recur(layer, layout, Inputs(convolved, gates))
        self.gates[layer.index, slots, nodes.rows] = gates
        return y.to(channels.dtype).flatten(0, 1)

    @abstractmethod
    def _recur(self, layer: Recurrent, layout: TorchLayout, inputs: Inputs) -> Tensor:
        """The recurrence -> y [b, T, inner_size] float32."""

    def _nodes(self, slots: Tensor, rows: Tensor, parents: Tensor) -> TreeLayout:
        """The layout of nodes with these rows [b, T] and parents [b, T]; slots [b]."""
        own, h = self.rows, self.rows.history
        path, length = own.path[slots], own.journal_len[slots]
        journal = (path[:, h : h + int(length.max())] - h).clamp_(0, self.size.rows - 1)
        tail = path.gather(1, length[:, None] + own.offsets)
        state_slots = self.table.state_slot[slots]
        return TreeLayout(slots, state_slots, journal, length, rows, parents, None, tail)

    def _windows(self, nodes: TreeLayout) -> Tensor:
        """Places of each node's K-1 nearest predecessors, oldest first, then its own. [b, T, K]

        Predecessors follow the parents up to the root, then the tail; never the nodes' order.
        """
        h, (b, T) = self.rows.history, nodes.rows.shape
        places = torch.cat([nodes.tail, nodes.rows + h], dim=1)  # [b, K-1+T]
        # parent of entry j: j-1 in the tail, the tail's end for the root
        in_tail = (self.rows.offsets - 1).clamp_(min=0).expand(b, -1)
        parent = torch.cat([in_tail, nodes.parents + h], dim=1)
        parent[:, h].fill_(h - 1)
        climbed = [torch.arange(h, h + T, device=places.device).expand(b, -1)]
        for _ in range(h):
            climbed.append(parent.gather(1, climbed[-1]))
        entries = torch.stack(climbed[::-1], dim=2)  # [b, T, K]
        return places.gather(1, entries.flatten(1)).view(entries.shape)

    def _extend(self, nodes: TreeLayout, accepted: Truncated) -> None:
        """The rows of the accepted nodes join the path."""
        own = self.rows
        rows = nodes.rows.gather(1, accepted.nodes)  # [b, D]
        ends = own.history + nodes.journal_len
        columns = ends[:, None] + torch.arange(rows.shape[1], device=rows.device)
        own.path[nodes.slots[:, None], columns] = rows + own.history
        own.journal_len[nodes.slots] += accepted.count


class TorchDeferred(DeferredScheme, TorchScheme):
    """Rows and folds: each step reads the state, which is written only when rows run out."""

    def finish(self, slots: Tensor, state_slots: Tensor, keep: Tensor) -> None:
        moved = keep > 0
        if bool(moved.any()):
            self._fold(slots[moved], keep[moved])
        self.rows.store_history(slots, state_slots)

    def begin(self, slots: Tensor, tree: Tree) -> TorchLayout:
        T = tree.tokens.shape[1]
        # the same limit for trees of all sizes: with small trees, rarer folds would gain less than
        # longer journals would cost
        max_journal = self.size.rows - max(T, self.size.nodes) - self.size.spare
        crowded = self.rows.journal_len[slots] > max_journal
        if bool(crowded.any()):
            self._fold(slots[crowded])
        nodes = self._nodes(slots, self._free_rows(slots, T), tree.parents)
        return self._derived(nodes, tree.ancestors)

    def accept(self, layout: TorchLayout, accepted: Truncated, features: Tensor) -> None:
        nodes, feature = layout.nodes, self.rows.feature
        feature[nodes.slots[:, None], nodes.rows] = features.to(feature.dtype)
        self._extend(nodes, accepted)

    def stem(self, slots: Tensor, lanes: int) -> TreeLayout:
        return self._nodes(slots, self._free_rows(slots, lanes), slots)

    def lane_layout(self, lanes: TreeLayout) -> TorchLayout:
        ones = torch.ones(len(lanes.slots), 1, 1, dtype=torch.bool, device=lanes.slots.device)
        return self._derived(lanes, ones)

    def _derived(self, nodes: TreeLayout, ancestors: Tensor) -> TorchLayout:
        device, longest = nodes.rows.device, nodes.journal.shape[1]
        in_journal = torch.arange(longest, device=device) < nodes.journal_len[:, None]
        above = in_journal[:, None].expand(-1, nodes.rows.shape[1], -1)
        visible = torch.cat([above, ancestors], dim=2)
        mask_bias = torch.zeros(visible.shape, device=device)
        mask = TreeMask(mask_bias.masked_fill_(~visible, float("-inf")), ancestors.float())
        return TorchLayout(nodes, self._windows(nodes), mask)

    def _free_rows(self, slots: Tensor, count: int) -> Tensor:
        own = self.rows
        path, length = own.path[slots], own.journal_len[slots]
        return free_rows(path, length, own.history, self.size.rows, count)

    def _recur(self, layer: Recurrent, layout: TorchLayout, inputs: Inputs) -> Tensor:
        i, nodes = layer.index, layout.nodes
        journal = self._journal(i, nodes.slots, nodes.journal, nodes.journal_len)
        assert layout.mask is not None
        state = self.pool.ssm[i][nodes.state_slots]
        found = layer.verify(inputs, journal, layout.mask, state)
        for part, own in zip(self.parts, found.parts):
            part[i, nodes.slots[:, None], nodes.rows] = own
        return found.y

    def _journal(self, layer: int, slots: Tensor, rows: Tensor, length: Tensor) -> Journal:
        """rows: [b, M], of which the first ``length`` [b] are the journals'."""
        at = (layer, slots[:, None], rows)
        return Journal(self.gates[at], tuple(part[at] for part in self.parts), length)

    def _fold(self, slots: Tensor, keep: Tensor | None = None) -> None:
        """Write the states after the journals, or after their first ``keep`` [f] tokens, to the
        state slots of the requests in ``slots`` [f], and empty the journals."""
        own, h = self.rows, self.rows.history
        length = own.journal_len[slots] if keep is None else keep
        longest = int(length.max())
        journal = (own.path[slots, h : h + longest] - h).clamp_(0, self.size.rows - 1)  # [f, R]
        last = own.path[slots, h + length - 1] - h
        state_slots = self.table.state_slot[slots]
        rounding = self.pool.rounding
        keys = rounding.keys(slots, self.folded(slots) + length)
        for i, layer in self.layers.items():  # a journal has passed all of them
            ssm = self.pool.ssm[i]
            folded = layer.fold(self._journal(i, slots, journal, length), ssm[state_slots])
            ssm.index_copy_(0, state_slots, rounding.round(folded, keys, i))
        self.pool.feature[state_slots] = own.feature[slots, last]
        own.move_history(slots, length)
        own.journal_len.index_fill_(0, slots, 0)


class TorchSnapshot(SnapshotScheme, TorchScheme):
    def begin(self, slots: Tensor, tree: Tree) -> TorchLayout:
        # node i uses row i
        rows = torch.arange(tree.tokens.shape[1], device=slots.device).expand(len(slots), -1)
        nodes = self._nodes(slots, rows, tree.parents)
        return TorchLayout(nodes, self._windows(nodes))

    def accept(self, layout: TorchLayout, accepted: Truncated, features: Tensor) -> None:
        nodes, own, pool = layout.nodes, self.rows, self.pool
        self._extend(nodes, accepted)
        last = accepted.nodes.gather(1, (accepted.count - 1).clamp(min=0)[:, None])[:, 0]
        # a request that had ended accepts no node and keeps its state
        alive = accepted.count > 0
        slots, last, state_slots = nodes.slots[alive], last[alive], nodes.state_slots[alive]
        processed = self.table.processed[slots] + accepted.count[alive]
        keys = pool.rounding.keys(slots, processed)
        for layer, states in enumerate(self.node_states):
            pool.ssm[layer, state_slots] = pool.rounding.round(states[slots, last], keys, layer)
        pool.keep_features(nodes.state_slots, accepted, features)
        own.move_history(slots, accepted.count[alive])
        own.journal_len.index_fill_(0, nodes.slots, 0)

    def _recur(self, layer: Recurrent, layout: TorchLayout, inputs: Inputs) -> Tensor:
        nodes = layout.nodes
        state = self.pool.ssm[layer.index][nodes.state_slots]
        y, states = layer.snapshots(inputs, state, nodes.parents)
        self.node_states[layer.index, nodes.slots, : layout.shape[1]] = states
        return y


TORCH_SCHEMES: dict[str, type[TorchScheme]] = {"deferred": TorchDeferred, "snapshot": TorchSnapshot}
