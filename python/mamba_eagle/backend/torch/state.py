"""Both state schemes in torch: rows and folds, or one state per node."""

from __future__ import annotations

from abc import abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from mamba_eagle.backend.pools import RequestTable, StatePool
from mamba_eagle.backend.rows import (
    RequestRows,
    clear_rows,
    layer_rows,
    recurrence_rows,
    step_sizes,
)
from mamba_eagle.backend.state import SchemeSize, StateScheme
from mamba_eagle.backend.zeros import zeros
from mamba_eagle.kernels.causal_conv.torch import causal_conv_windows
from mamba_eagle.kernels.tree_verify.layout import TreeLayout
from mamba_eagle.kernels.tree_verify.torch import Rows, fold, snapshot_verify, tree_verify
from mamba_eagle.layers.context import MambaView
from mamba_eagle.model_config import Mamba2Config
from mamba_eagle.tree.accept import Truncated
from mamba_eagle.tree.tree import Tree


class LayerConstants(NamedTuple):
    """A layer's weights in the form that each step needs."""

    conv_weight: Tensor  # [K, conv_dim]
    conv_bias: Tensor | None  # [conv_dim]
    skip: Tensor  # [H, 1] float32: D


class Inputs(NamedTuple):
    """A layer's inputs to the recurrence, for all nodes."""

    x: Tensor  # [b, T, H, P]
    B: Tensor  # [b, T, G, N]
    C: Tensor  # [b, T, G, N]
    dt: Tensor  # [b, T, H] float32, after softplus


class TorchLayout(NamedTuple):
    """A TreeLayout, and the index tables that the torch path derives from it."""

    nodes: TreeLayout
    windows: Tensor  # [b, T, K] places of each node's K-1 nearest ancestors and its own
    packed: Tensor | None = None  # [b, R + T] rows: the journal's, R at most, then the nodes'
    mask_bias: Tensor | None = None  # [b, T, R + T] float32: 0 where a node sees a row, else -inf
    ancestors: Tensor | None = None  # [b, T, T] float32

    @property
    def shape(self) -> tuple[int, int]:
        """b, T"""
        return self.nodes.rows.shape


class TorchScheme(StateScheme):
    """The common part of both schemes: convolution inputs, paths and rows."""

    def __init__(
        self, config: Mamba2Config, size: SchemeSize, table: RequestTable, pool: StatePool
    ) -> None:
        self.config, self.size, self.table, self.pool = config, size, table, pool
        self.rows = RequestRows(config, size, table, pool)
        self.constants: dict[int, LayerConstants] = {}

    def start(self, slots: Tensor, state_slots: Tensor) -> None:
        self.rows.start(slots, state_slots)

    def verify(self, layer: MambaView, layout: TorchLayout, xbc: Tensor, dt: Tensor) -> Tensor:
        nodes, shape = layout.nodes, layout.shape
        weight, bias, skip = self._constants(layer)
        conv_in, slots = self.rows.conv_in[layer.index], nodes.slots[:, None]
        conv_in[slots, nodes.rows + self.rows.history] = xbc.view(*shape, -1)
        windows = conv_in[slots[..., None], layout.windows].flatten(0, 1)  # [b*T, K, conv_dim]
        convolved = causal_conv_windows(windows, weight, bias).view(*shape, -1)
        x, B, C = layer.split_xbc(convolved)
        y = self._recur(layer, layout, Inputs(x, B, C, layer.step_size(dt).view(*shape, -1)))
        return torch.addcmul(y, skip, x).to(xbc.dtype).reshape(xbc.shape[0], -1)

    @abstractmethod
    def _recur(self, layer: MambaView, layout: TorchLayout, inputs: Inputs) -> Tensor:
        """The recurrence -> y [b, T, H, P] float32, without the D skip."""

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

    def _constants(self, layer: MambaView) -> LayerConstants:
        constants = self.constants.get(layer.index)
        if constants is None:
            constants = self.constants[layer.index] = layer_constants(layer)
        return constants


def layer_constants(layer: MambaView) -> LayerConstants:
    return LayerConstants(
        layer.conv1d.weight.detach()[:, 0].t().contiguous(),
        None if layer.conv1d.bias is None else layer.conv1d.bias.detach(),
        layer.D.detach().float()[:, None],
    )


class TorchDeferred(TorchScheme):
    """Rows and folds: each step reads the state, which is written only when rows run out."""

    has_journal = True

    def __init__(
        self, config: Mamba2Config, size: SchemeSize, table: RequestTable, pool: StatePool
    ) -> None:
        super().__init__(config, size, table, pool)
        self.recurrence = recurrence_rows(config, size, self.rows.conv_in)

    def start(self, slots: Tensor, state_slots: Tensor) -> None:
        super().start(slots, state_slots)
        clear_rows(self.recurrence, slots)

    def finish(self, slots: Tensor, state_slots: Tensor, keep: Tensor) -> None:
        moved = keep > 0
        if bool(moved.any()):
            self._fold(slots[moved], keep[moved])
        self.rows.store_history(slots, state_slots)

    def begin(self, slots: Tensor, tree: Tree) -> TorchLayout:
        T = tree.tokens.shape[1]
        self._fold_crowded(slots, T)
        nodes = self._nodes(slots, self._free_rows(slots, T), tree.parents)
        return self._derived(nodes, tree.ancestors)

    def accept(self, layout: TorchLayout, accepted: Truncated, features: Tensor) -> None:
        nodes, feature = layout.nodes, self.rows.feature
        feature[nodes.slots[:, None], nodes.rows] = features.to(feature.dtype)
        self._extend(nodes, accepted)

    def folded(self, slots: Tensor) -> Tensor:
        return self.rows.folded(slots)

    def journal_len(self, slots: Tensor) -> Tensor:
        return self.rows.journal_len[slots]

    def accepted_inputs(self, slots: Tensor, accepted: Truncated) -> tuple[Tensor, Tensor]:
        width = accepted.nodes.shape[1]
        return self.rows.newest(slots, accepted.count, width, self.recurrence.dt)

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
        return TorchLayout(
            nodes,
            self._windows(nodes),
            torch.cat([nodes.journal, nodes.rows], dim=1),
            mask_bias.masked_fill_(~visible, float("-inf")),
            ancestors.float(),
        )

    def _free_rows(self, slots: Tensor, count: int) -> Tensor:
        """The ``count`` lowest rows outside each request's journal. [b, count] int64"""
        own, h, W = self.rows, self.rows.history, self.size.rows
        in_journal = torch.arange(W, device=slots.device) < own.journal_len[slots][:, None]
        used_rows = torch.where(in_journal, own.path[slots, h : h + W] - h, W)
        is_used = torch.zeros(len(slots), W + 1, dtype=torch.int8, device=slots.device)
        is_used.scatter_(1, used_rows, 1)
        return is_used[:, :W].argsort(dim=1, stable=True)[:, :count]

    def _fold_crowded(self, slots: Tensor, nodes: int) -> None:
        # the same limit for trees of all sizes: with small trees, rarer folds would gain less than
        # longer journals would cost
        max_journal = self.size.rows - max(nodes, self.size.nodes) - self.size.spare
        crowded = self.rows.journal_len[slots] > max_journal
        if bool(crowded.any()):
            self._fold(slots[crowded])

    def _recur(self, layer: MambaView, layout: TorchLayout, inputs: Inputs) -> Tensor:
        i, nodes = layer.index, layout.nodes
        slots = nodes.slots[:, None]
        xB, dt, log_decay = layer_rows(self.recurrence, i)
        decays = inputs.dt * layer.decay_rate()
        L = self._journal_decay(log_decay, nodes)[:, None]
        if layout.shape[1] == 1:
            L = L + decays
        else:
            assert layout.ancestors is not None
            L = torch.baddbmm(L, layout.ancestors, decays)
        node_xB = torch.cat([inputs.x.flatten(2), inputs.B.flatten(2)], dim=2)
        xB[slots, nodes.rows], dt[slots, nodes.rows] = node_xB, inputs.dt
        log_decay[slots, nodes.rows] = L
        assert layout.mask_bias is not None
        at = (slots, layout.packed)
        rows = self._as_rows(xB[at], dt[at], log_decay[at])
        state = self.pool.ssm[i][nodes.state_slots]
        return tree_verify(rows, inputs.C, L, state, layout.mask_bias)

    def _journal_decay(self, log_decay: Tensor, nodes: TreeLayout) -> Tensor:
        """log_decay of each journal's last row, 0 for an empty journal. [b, H] float32"""
        if not nodes.journal.shape[1]:
            return log_decay.new_zeros(len(nodes.slots), log_decay.shape[2])
        last = nodes.journal.gather(1, (nodes.journal_len - 1).clamp(min=0)[:, None])[:, 0]
        return (nodes.journal_len > 0).float()[:, None] * log_decay[nodes.slots, last]

    def _as_rows(self, xB: Tensor, dt: Tensor, log_decay: Tensor) -> Rows:
        c = self.config
        x, B = xB[..., : c.inner_size], xB[..., c.inner_size :]
        return Rows(
            x.unflatten(-1, (c.num_heads, c.head_dim)),
            B.unflatten(-1, (c.num_groups, c.state_size)),
            dt,
            log_decay,
        )

    def _fold(self, slots: Tensor, keep: Tensor | None = None) -> None:
        """Write the states after the journals, or after their first ``keep`` [f] tokens, to the
        state slots of the requests in ``slots`` [f], and empty the journals."""
        own, h = self.rows, self.rows.history
        length = own.journal_len[slots] if keep is None else keep
        longest = int(length.max())
        journal = (own.path[slots, h : h + longest] - h).clamp_(0, self.size.rows - 1)  # [f, R]
        valid = torch.arange(longest, device=slots.device) < length[:, None]
        last = own.path[slots, h + length - 1] - h
        state_slots, at = self.table.state_slot[slots], (slots[:, None], journal)
        rounding = self.pool.rounding
        keys = rounding.keys(slots, own.folded(slots) + length)
        for layer in range(self.size.layers):
            xB, dt, log_decay = layer_rows(self.recurrence, layer)
            rows = self._as_rows(xB[at], dt[at], log_decay[at])
            ssm = self.pool.ssm[layer]
            folded = fold(rows, valid, log_decay[slots, last], ssm[state_slots])
            ssm.index_copy_(0, state_slots, rounding.round(folded, keys, layer))
        self.pool.feature[state_slots] = own.feature[slots, last]
        own.move_history(slots, length)
        own.journal_len.index_fill_(0, slots, 0)

    @property
    def num_bytes(self) -> int:
        return self.rows.num_bytes + sum(part.nbytes for part in self.recurrence)


class TorchSnapshot(TorchScheme):
    """One full state per node; ``accept`` copies the last accepted node's state to the state slot.

    Most servers do this today; it is here to be tested against the same oracle and to be compared
    with rows and folds.
    """

    def __init__(
        self, config: Mamba2Config, size: SchemeSize, table: RequestTable, pool: StatePool
    ) -> None:
        super().__init__(config, size, table, pool)
        self.node_states = make_node_states(self.rows, pool)
        self.dt = step_sizes(config, size, self.rows.conv_in)  # for those who keep rows

    def finish(self, slots: Tensor, state_slots: Tensor, keep: Tensor) -> None:
        """``keep`` is always 0: the states already include all accepted tokens."""
        self.rows.store_history(slots, state_slots)

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
        pool.feature[state_slots] = features[alive, last].to(pool.feature.dtype)
        own.move_history(slots, accepted.count[alive])
        own.journal_len.index_fill_(0, nodes.slots, 0)

    def folded(self, slots: Tensor) -> Tensor:
        return self.table.processed[slots]

    def accepted_inputs(self, slots: Tensor, accepted: Truncated) -> tuple[Tensor, Tensor]:
        return self.rows.of_nodes(slots, accepted.nodes, self.dt)

    def _recur(self, layer: MambaView, layout: TorchLayout, inputs: Inputs) -> Tensor:
        nodes, (x, B, C, dt) = layout.nodes, inputs
        self.dt[layer.index, nodes.slots, : layout.shape[1]] = dt
        state = self.pool.ssm[layer.index][nodes.state_slots]
        y, states = snapshot_verify(x, dt, layer.decay_rate(), B, C, state, nodes.parents)
        self.node_states[layer.index, nodes.slots, : layout.shape[1]] = states
        return y

    @property
    def num_bytes(self) -> int:
        return self.rows.conv_in.nbytes + self.node_states.nbytes + self.dt.nbytes


def make_node_states(rows: RequestRows, pool: StatePool) -> Tensor:
    """A buffer for the states of all nodes: [layers, R, W, H, P, N] float32."""
    layers, requests = rows.conv_in.shape[:2]
    shape = (layers, requests, rows.size.rows, *pool.ssm.shape[2:])
    return zeros(*shape, dtype=torch.float32, device=rows.path.device)


TORCH_SCHEMES: dict[str, type[TorchScheme]] = {"deferred": TorchDeferred, "snapshot": TorchSnapshot}
