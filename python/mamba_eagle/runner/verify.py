"""How recurrent state survives speculation: rows and folds, or one state a node.

Both schemes answer the same five calls. A step is ``begin`` (a tree is about to be verified),
``verify`` in each Mamba2 layer, ``accept``. ``start`` and ``finish`` bracket a request's life:
after prefill its state slot holds the state after the prompt, and at its end it is brought to a
position of the caller's choice.

Convolution inputs live in one buffer a request: K-1 places for the tokens before the state slot
(the history), then W rows. ``path`` lists places in sequence order, history first, so the K-1
nearest ancestors of a tree's root are a slice of it. What the nodes feed into the recurrence is
written to their rows while they are verified: rows are free until ``accept`` puts them into the
journal, which moves no tensor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from mamba_eagle.kernels import gpu, numba_math
from mamba_eagle.kernels.causal_conv.naive import causal_conv_windows
from mamba_eagle.kernels.tree_verify.naive import Rows, fold, snapshot_verify, tree_verify
from mamba_eagle.layers.mamba2 import Mamba2Mixer
from mamba_eagle.model_config import Mamba2Config
from mamba_eagle.runner.pools import RequestTable, StatePool
from mamba_eagle.tree.accept import Truncated
from mamba_eagle.tree.tree import Tree


class VerifyScheme(ABC):
    """Recurrent state of running requests, in all Mamba2 layers."""

    name: str
    on_device = False  # nothing waits for the host, so that a captured graph can repeat a step

    @abstractmethod
    def start(self, slots: Tensor, state_slots: Tensor) -> None:
        """Prefill has ended: the state slots [n] hold all that was run of the requests [n]."""

    @abstractmethod
    def finish(self, slots: Tensor, state_slots: Tensor, keep: Tensor) -> None:
        """Move each state slot ``keep`` [n] tokens on from where it is; its request leaves."""

    @abstractmethod
    def begin(self, slots: Tensor, tree: Tree) -> None:
        """A tree of each request in ``slots`` [b] is about to be verified."""

    @abstractmethod
    def verify(self, layer: Mamba2Mixer, xbc: Tensor, dt: Tensor) -> Tensor:
        """xbc [b*T, conv_dim] before the convolution, dt [b*T, H] raw -> y [b*T, H*P]."""

    @abstractmethod
    def accept(self, accepted: Truncated, features: Tensor) -> None:
        """Make the accepted nodes part of the sequence. features [b, T, F]: of the nodes, kept
        for a later state slot."""

    @abstractmethod
    def folded(self, slots: Tensor) -> Tensor:
        """Position of each request's state slot, [b]."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Memory of the scheme itself, state slots apart."""


class SchemeSize(NamedTuple):
    """What a recurrent scheme has room for."""

    layers: int
    features: int  # numbers of a token's feature
    rows: int  # W: of a request
    nodes: int  # most nodes in a step
    accepts: int  # most tokens accepted in a step
    spare: int = 0  # rows that a step leaves free for others (drafted lanes)


class Step(NamedTuple):
    """The nodes of b trees, where they stand and what is before them."""

    slots: Tensor  # [b]: whose row buffers
    state_slots: Tensor  # [b]: where S0 is
    rows: Tensor  # [b, T]: each node's row
    parents: Tensor  # [b, T]
    ancestors: Tensor  # [b, T, T] bool
    path: Tensor  # [b, places + …]: history and journal before each root
    journal_len: Tensor  # [b]


class LayerConstants(NamedTuple):
    """What each step reads of a layer's weights, in the form it reads them."""

    conv_weight: Tensor  # [K, conv_dim]
    conv_bias: Tensor | None  # [conv_dim]
    skip: Tensor  # [H, 1] float32: D


class Inputs(NamedTuple):
    """A layer's nodes behind the convolution."""

    x: Tensor  # [b, T, H, P]
    B: Tensor  # [b, T, G, N]
    C: Tensor  # [b, T, G, N]
    dt: Tensor  # [b, T, H] float32, after softplus


class RecurrentVerify(VerifyScheme):
    """What both schemes share: convolution inputs, paths and rows."""

    def __init__(
        self, config: Mamba2Config, size: SchemeSize, table: RequestTable, pool: StatePool
    ) -> None:
        self.config, self.size, self.table, self.pool = config, size, table, pool
        self.history = config.conv_kernel - 1
        device, dtype = pool.conv.device, pool.conv.dtype
        requests, places = table.processed.shape[0], self.history + size.rows
        self.conv_in = torch.zeros(
            size.layers, requests, places, config.conv_dim, dtype=dtype, device=device
        )
        # accepted nodes are appended all at once, valid or not; hence the spare columns
        self.path = torch.zeros(requests, places + size.accepts, dtype=torch.int64, device=device)
        self.path[:, : self.history] = torch.arange(self.history, device=device)
        self.journal_len = torch.zeros(requests, dtype=torch.int64, device=device)
        self.feature = torch.zeros(requests, size.rows, size.features, dtype=dtype, device=device)
        self.offsets = torch.arange(self.history, device=device)
        self.constants: dict[int, LayerConstants] = {}

    def start(self, slots: Tensor, state_slots: Tensor) -> None:
        self.journal_len[slots] = 0
        self.conv_in[:, slots, : self.history] = self.pool.conv[:, state_slots]

    def begin(self, slots: Tensor, tree: Tree) -> None:
        self.begin_step(self._step(slots, self._choose_rows(slots, tree), tree))

    def begin_step(self, step: Step) -> None:
        """Look up what all layers read of it."""
        self.step = step
        self.batch, self.nodes = step.rows.shape
        self.windows = self._windows()

    def verify(self, layer: Mamba2Mixer, xbc: Tensor, dt: Tensor) -> Tensor:
        shape, step = (self.batch, self.nodes), self.step
        weight, bias, skip = self._constants(layer)
        conv_in, slots = self.conv_in[layer.index], step.slots[:, None]
        conv_in[slots, step.rows + self.history] = xbc.view(*shape, -1)
        windows = conv_in[slots[..., None], self.windows].flatten(0, 1)  # [b*T, K, conv_dim]
        convolved = causal_conv_windows(windows, weight, bias).view(*shape, -1)
        x, B, C = layer.split_xbc(convolved)
        y = self._recur(layer, Inputs(x, B, C, layer.step_size(dt).view(*shape, -1)))
        return torch.addcmul(y, skip, x).to(xbc.dtype).reshape(xbc.shape[0], -1)

    # ── what the schemes differ in ──

    @abstractmethod
    def _choose_rows(self, slots: Tensor, tree: Tree) -> Tensor:
        """A row for each node, [b, T]."""

    @abstractmethod
    def _recur(self, layer: Mamba2Mixer, inputs: Inputs) -> Tensor:
        """-> y [b, T, H, P] float32 without the skip."""

    # ── what they share ──

    def _step(self, slots: Tensor, rows: Tensor, tree: Tree) -> Step:
        return Step(
            slots,
            self.table.state_slot[slots],
            rows,
            tree.parents,
            tree.ancestors,
            self.path[slots],
            self.journal_len[slots],
        )

    def _extend(self, accepted: Truncated) -> None:
        """The rows of the accepted nodes join the path."""
        step = self.step
        rows = step.rows.gather(1, accepted.nodes)  # [b, D]
        ends = self.history + step.journal_len
        columns = ends[:, None] + torch.arange(rows.shape[1], device=rows.device)
        self.path[step.slots[:, None], columns] = rows + self.history
        self.journal_len[step.slots] += accepted.count

    def _windows(self) -> Tensor:
        """The places of each node's K-1 nearest ancestors and its own: tree parents first, then
        the tail of the path. Never packed order. [b, T, K]"""
        h, step = self.history, self.step
        tail = step.path.gather(1, step.journal_len[:, None] + self.offsets)  # [b, K-1]
        places = torch.cat([tail, step.rows + h], dim=1)  # [b, K-1+T]
        # parent of entry j: j-1 in the tail, the tail's end for the root
        in_tail = (self.offsets - 1).clamp_(min=0).expand(self.batch, -1)
        parent = torch.cat([in_tail, step.parents + h], dim=1)
        parent[:, h] = h - 1
        climbed = [torch.arange(h, h + self.nodes, device=places.device).expand(self.batch, -1)]
        for _ in range(h):
            climbed.append(parent.gather(1, climbed[-1]))
        entries = torch.stack(climbed[::-1], dim=2)  # [b, T, K]
        return places.gather(1, entries.flatten(1)).view(entries.shape)

    def _constants(self, layer: Mamba2Mixer) -> LayerConstants:
        known = self.constants.get(layer.index)
        if known is None:
            known = LayerConstants(
                layer.conv1d.weight.detach()[:, 0].t().contiguous(),
                None if layer.conv1d.bias is None else layer.conv1d.bias.detach(),
                layer.D.detach().float()[:, None],
            )
            self.constants[layer.index] = known
        return known

    def _move_history(self, slots: Tensor, keep: Tensor) -> None:
        """The history becomes that of the token ``keep`` tokens along the path; slots, keep [f]."""
        places = self.path[slots].gather(1, keep[:, None] + self.offsets)  # [f, K-1]
        # indexing copies before anything is overwritten: old and new history may overlap
        moved = self.conv_in[:, slots[:, None], places]
        self.conv_in[:, slots[:, None], self.offsets] = moved


class DeferredVerify(RecurrentVerify):
    """Rows and folds: the state is read in each step and written only when rows run out."""

    name = "deferred"

    def __init__(
        self, config: Mamba2Config, size: SchemeSize, table: RequestTable, pool: StatePool
    ) -> None:
        super().__init__(config, size, table, pool)
        device = self.conv_in.device

        def buffer(width: int, dtype: torch.dtype = torch.float32) -> Tensor:
            shape = (*self.conv_in.shape[:2], size.rows, width)
            return torch.zeros(shape, dtype=dtype, device=device)

        # x and B of a row side by side
        self.inner = config.inner_size
        self.xB = buffer(self.inner + config.num_groups * config.state_size, self.conv_in.dtype)
        self.dt = buffer(config.num_heads)
        self.log_decay = buffer(config.num_heads)

    def finish(self, slots: Tensor, state_slots: Tensor, keep: Tensor) -> None:
        moved = keep > 0
        if bool(moved.any()):
            self._fold(slots[moved], keep[moved])
        self.pool.conv[:, state_slots] = self.conv_in[:, slots, : self.history]

    def begin_step(self, step: Step) -> None:
        super().begin_step(step)
        # packed rows: the journal's, then the nodes'
        longest = int(step.journal_len.max())
        h, device = self.history, step.rows.device
        journal = (step.path[:, h : h + longest] - h).clamp_(0, self.size.rows - 1)
        self.packed = torch.cat([journal, step.rows], dim=1)  # [b, R+T]
        in_journal = torch.arange(longest, device=device) < step.journal_len[:, None]
        visible = torch.cat([in_journal[:, None].expand(-1, self.nodes, -1), step.ancestors], dim=2)
        self.mask_bias = torch.zeros(visible.shape, device=device)
        self.mask_bias.masked_fill_(~visible, float("-inf"))  # [b, T, R+T]
        last = step.path.gather(1, (h + step.journal_len - 1)[:, None])[:, 0] - h
        self.last = last.clamp_(min=0)  # of an empty journal: any row, its L is not read
        self.has_journal = (step.journal_len > 0).float()[:, None, None]
        self.ancestors = step.ancestors.float()

    def accept(self, accepted: Truncated, features: Tensor) -> None:
        step = self.step
        self.feature[step.slots[:, None], step.rows] = features.to(self.feature.dtype)
        self._extend(accepted)

    def folded(self, slots: Tensor) -> Tensor:
        return self.table.processed[slots] - self.journal_len[slots]

    def free_rows(self, slots: Tensor, count: int) -> Tensor:
        """``count`` rows of each request that are not in its journal, the lowest first. [b, count]"""
        h, W = self.history, self.size.rows
        columns = torch.arange(W, device=slots.device)
        in_journal = columns < self.journal_len[slots][:, None]
        taken = torch.where(in_journal, self.path[slots, h : h + W] - h, W)
        marks = torch.zeros(len(slots), W + 1, dtype=torch.int8, device=slots.device)
        marks.scatter_(1, taken, 1)
        return marks[:, :W].argsort(dim=1, stable=True)[:, :count]

    def _choose_rows(self, slots: Tensor, tree: Tree) -> Tensor:
        # one limit for trees of all sizes: a small one would gain less by folding less often than
        # it would lose to a longer journal
        nodes = tree.tokens.shape[1]
        most = self.size.rows - max(nodes, self.size.nodes) - self.size.spare
        crowded = self.journal_len[slots] > most
        if bool(crowded.any()):
            self._fold(slots[crowded])
        return self.free_rows(slots, nodes)

    def _recur(self, layer: Mamba2Mixer, inputs: Inputs) -> Tensor:
        i, step = layer.index, self.step
        slots = step.slots[:, None]
        xB, dt, log_decay = self.xB[i], self.dt[i], self.log_decay[i]
        decays = inputs.dt * layer.decay_rate()
        before = self.has_journal * log_decay[step.slots, self.last][:, None]  # L of the journal
        L = before + decays if self.nodes == 1 else torch.baddbmm(before, self.ancestors, decays)
        fed = torch.cat([inputs.x.flatten(2), inputs.B.flatten(2)], dim=2)
        xB[slots, step.rows], dt[slots, step.rows] = fed, inputs.dt
        log_decay[slots, step.rows] = L
        at = (slots, self.packed)
        return tree_verify(
            self._as_rows(xB[at], dt[at], log_decay[at]),
            inputs.C,
            L,
            self.pool.ssm[i][step.state_slots],
            self.mask_bias,
        )

    def _as_rows(self, xB: Tensor, dt: Tensor, log_decay: Tensor) -> Rows:
        c = self.config
        x, B = xB[..., : self.inner], xB[..., self.inner :]
        return Rows(
            x.unflatten(-1, (c.num_heads, c.head_dim)),
            B.unflatten(-1, (c.num_groups, c.state_size)),
            dt,
            log_decay,
        )

    def _fold(self, slots: Tensor, keep: Tensor | None = None) -> None:
        """Write the state after the journal, or its first ``keep`` tokens, back to S0."""
        h = self.history
        length = self.journal_len[slots] if keep is None else keep
        longest = int(length.max())
        journal = (self.path[slots, h : h + longest] - h).clamp_(0, self.size.rows - 1)  # [f, R]
        valid = torch.arange(longest, device=slots.device) < length[:, None]
        last = self.path[slots, h + length - 1] - h
        state_slots, at = self.table.state_slot[slots], (slots[:, None], journal)
        for layer in range(self.size.layers):
            rows = self._as_rows(self.xB[layer][at], self.dt[layer][at], self.log_decay[layer][at])
            ssm = self.pool.ssm[layer]
            folded = fold(rows, valid, self.log_decay[layer, slots, last], ssm[state_slots])
            ssm.index_copy_(0, state_slots, folded.to(ssm.dtype))
        self.pool.feature[state_slots] = self.feature[slots, last]
        self._move_history(slots, length)
        self.journal_len[slots] = 0

    @property
    def num_bytes(self) -> int:
        parts = (self.conv_in, self.xB, self.dt, self.log_decay, self.feature)
        return sum(part.nbytes for part in parts)


class SnapshotVerify(RecurrentVerify):
    """One full state a node; accepting copies the accepted node's state to the request's.

    What servers do today; here to be held to the same oracle and measured beside rows.
    """

    name = "snapshot"

    def __init__(
        self, config: Mamba2Config, size: SchemeSize, table: RequestTable, pool: StatePool
    ) -> None:
        super().__init__(config, size, table, pool)
        layers, requests = self.conv_in.shape[:2]
        shape = (layers, requests, size.rows, *pool.ssm.shape[2:])
        self.node_states = torch.zeros(shape, device=self.path.device)

    def finish(self, slots: Tensor, state_slots: Tensor, keep: Tensor) -> None:
        """``keep`` is 0: the state slots already hold every accepted token."""
        self.pool.conv[:, state_slots] = self.conv_in[:, slots, : self.history]

    def accept(self, accepted: Truncated, features: Tensor) -> None:
        self._extend(accepted)
        step = self.step
        last = accepted.nodes.gather(1, (accepted.count - 1).clamp(min=0)[:, None])[:, 0]
        # a request that had ended accepts nothing: its state stays
        alive = accepted.count > 0
        slots, last, state_slots = step.slots[alive], last[alive], step.state_slots[alive]
        self.pool.ssm[:, state_slots] = self.node_states[:, slots, last].to(self.pool.ssm.dtype)
        self.pool.feature[state_slots] = features[alive, last].to(self.pool.feature.dtype)
        self._move_history(slots, accepted.count[alive])
        self.journal_len[step.slots] = 0

    def folded(self, slots: Tensor) -> Tensor:
        return self.table.processed[slots]

    def _choose_rows(self, slots: Tensor, tree: Tree) -> Tensor:
        # node i stands in row i
        return torch.arange(tree.tokens.shape[1], device=slots.device).expand(len(slots), -1)

    def _recur(self, layer: Mamba2Mixer, inputs: Inputs) -> Tensor:
        step, x, B, C, dt = self.step, *inputs
        state = self.pool.ssm[layer.index][step.state_slots]
        y, states = snapshot_verify(x, dt, layer.decay_rate(), B, C, state, step.parents)
        self.node_states[layer.index, step.slots, : self.nodes] = states
        return y

    @property
    def num_bytes(self) -> int:
        return self.conv_in.nbytes + self.node_states.nbytes


def _make_scheme(
    scheme: type[RecurrentVerify],
    config: Mamba2Config,
    size: SchemeSize,
    table: RequestTable,
    pool: StatePool,
) -> RecurrentVerify:
    """``scheme``, or its twin with kernels where there is one for the pool's device and dtypes."""
    device, dtypes = pool.conv.device, (pool.conv.dtype, pool.ssm.dtype)
    # imported here: they extend the classes above
    if numba_math.usable(device, *dtypes):
        from mamba_eagle.runner.fused_verify import FUSED_SCHEMES

        scheme = FUSED_SCHEMES[scheme.name]
    elif gpu.usable(device, *dtypes):
        from mamba_eagle.runner.triton_layer import sizes_known
        from mamba_eagle.runner.triton_verify import TRITON_SCHEMES

        if sizes_known(config):
            scheme = TRITON_SCHEMES[scheme.name]
    return scheme(config, size, table, pool)


# name -> maker, which takes RecurrentVerify's arguments
VERIFY_SCHEMES = {
    scheme.name: partial(_make_scheme, scheme) for scheme in (DeferredVerify, SnapshotVerify)
}
