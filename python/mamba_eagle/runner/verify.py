"""How recurrent state survives speculation: rows and folds, or one state a node.

Both schemes answer the same five calls. A step is ``begin`` (a tree is about to be verified),
``verify`` in each Mamba2 layer, ``accept``. ``start`` and ``finish`` bracket a request's life:
after prefill its checkpoint holds the state after the prompt, and at its end it is brought to a
position of the caller's choice.

Convolution inputs live in one buffer a request: K-1 places for the tokens before the checkpoint
(the history), then W rows. ``path`` lists places in sequence order, history first, so the K-1
nearest ancestors of a tree's root are a slice of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mamba_eagle.kernels import numba_math
from mamba_eagle.kernels.causal_conv.naive import causal_conv_windows
from mamba_eagle.kernels.tree_verify.naive import Rows, fold, snapshot_verify, tree_verify
from mamba_eagle.layers.mamba2 import Mamba2Mixer
from mamba_eagle.models.config import Mamba2Config
from mamba_eagle.runner.pools import CheckpointPool, RequestTable
from mamba_eagle.spec.accept import Truncated
from mamba_eagle.spec.tree import Tree


class LayerConstants(NamedTuple):
    """What each step reads of a layer's weights, in the form it reads them."""

    conv_weight: Tensor  # [K, conv_dim]
    conv_bias: Tensor | None  # [conv_dim]
    skip: Tensor  # [H, 1] float32: D


class VerifyScheme(ABC):
    """Recurrent state of running requests, in all Mamba2 layers."""

    name: str

    def __init__(
        self,
        config: Mamba2Config,
        num_layers: int,
        hidden_size: int,
        num_rows: int,
        max_depth: int,
        table: RequestTable,
        pool: CheckpointPool,
    ) -> None:
        self.config, self.table, self.pool = config, table, pool
        self.num_rows = num_rows
        self.history = config.conv_kernel - 1
        device, dtype = pool.conv.device, pool.conv.dtype
        requests = table.run.shape[0]
        places = self.history + num_rows
        self.conv_in = torch.zeros(
            num_layers, requests, places, config.conv_dim, dtype=dtype, device=device
        )
        # accepted nodes are appended max_depth at a time, valid or not; hence the spare columns
        self.path = torch.zeros(requests, places + max_depth, dtype=torch.int64, device=device)
        self.path[:, : self.history] = torch.arange(self.history, device=device)
        self.chain_len = torch.zeros(requests, dtype=torch.int64, device=device)
        self.feature = torch.zeros(requests, num_rows, hidden_size, dtype=dtype, device=device)
        self.offsets = torch.arange(self.history, device=device)
        self.constants: dict[int, LayerConstants] = {}

    # ── the life of a request ──

    def start(self, slot: int, checkpoint: int) -> None:
        """Prefill has ended: the checkpoint holds all that was run; the chain is empty."""
        self.chain_len[slot] = 0
        self.conv_in[:, slot, : self.history] = self.pool.conv[:, checkpoint]

    @abstractmethod
    def finish(self, slot: int, checkpoint: int, keep: int) -> None:
        """Move the checkpoint ``keep`` tokens of the chain on, history and feature included."""

    # ── a verify step ──

    def begin(self, slots: Tensor, tree: Tree) -> None:
        """Choose rows for the tree's nodes and gather what all layers read of the past."""
        self.slots, self.tree = slots, tree
        self.batch, self.nodes = tree.tokens.shape
        self.checkpoints = self.table.checkpoint[slots]
        self.rows = self._choose_rows()  # [b, T]
        self.states = _all_layers(self.pool.ssm, self.checkpoints)
        tail = self.chain_len[slots][:, None] + self.offsets
        places = self.path[slots[:, None], tail]  # [b, K-1]
        self.tails = self.conv_in[:, slots[:, None], places].unbind(0)
        self.windows = None if self.nodes == 1 else self._windows()
        self.inputs: list[Tensor] = []  # raw convolution inputs of the nodes, a layer each

    def verify(self, layer: Mamba2Mixer, xbc: Tensor, dt: Tensor) -> Tensor:
        """xbc [b*T, conv_dim] before the convolution, dt [b*T, H] raw -> y [b*T, H*P]."""
        shape = (self.batch, self.nodes)
        weight, bias, skip = self._constants(layer)
        inputs = xbc.view(*shape, -1)
        self.inputs.append(inputs)
        known = torch.cat([self.tails[layer.index], inputs], dim=1)  # [b, K-1+T, conv_dim]
        if self.windows is not None:
            known = known.flatten(0, 1).index_select(0, self.windows)
        windows = known.view(xbc.shape[0], -1, xbc.shape[1])
        convolved = causal_conv_windows(windows, weight, bias).view(*shape, -1)
        y, x = self._recur(layer, convolved, layer.step_size(dt).view(*shape, -1))
        y = torch.addcmul(y, skip, x)
        return y.to(xbc.dtype).reshape(xbc.shape[0], -1)

    def accept(self, accepted: Truncated, hidden: Tensor) -> None:
        """Make the accepted nodes part of the sequence: an index rewrite.

        hidden [b, T, hidden_size]: the target's hidden states of the nodes, kept as the features
        of a later checkpoint.
        """
        self.conv_in[:, self.slots[:, None], self.rows + self.history] = torch.stack(self.inputs)
        # rows that the accepted nodes stand in join the path
        rows = self.rows.gather(1, accepted.nodes)  # [b, D]
        columns = (self.history + self.chain_len[self.slots])[:, None] + torch.arange(
            rows.shape[1], device=rows.device
        )
        self.path[self.slots[:, None], columns] = rows + self.history
        self.chain_len[self.slots] += accepted.count
        self._accept(accepted, hidden, rows)

    @abstractmethod
    def folded(self, slots: Tensor) -> Tensor:
        """Position of each request's checkpoint, [b]."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Memory of the scheme itself, checkpoints apart."""

    # ── below: what the schemes differ in, and what they share ──

    @abstractmethod
    def _choose_rows(self) -> Tensor:
        """A row for each node, [b, T]."""

    @abstractmethod
    def _recur(self, layer: Mamba2Mixer, convolved: Tensor, dt: Tensor) -> tuple[Tensor, Tensor]:
        """-> y [b, T, H, P] without the skip, x [b, T, H, P]."""

    @abstractmethod
    def _accept(self, accepted: Truncated, hidden: Tensor, rows: Tensor) -> None:
        """rows [b, D] of the accepted nodes, padded as ``accepted.nodes`` is."""

    def _windows(self) -> Tensor:
        """For each node its K-1 nearest ancestors and itself, as indices of [tail ; nodes] of all
        requests: tree parents first, then the tail of the path. Never packed order. [b*T*K]"""
        h, device = self.history, self.slots.device
        # parent of entry j: j-1 in the tail, the tail's end for the root
        parent = torch.cat(
            [
                (self.offsets - 1).clamp_(min=0).expand(self.batch, -1),
                self.tree.parents + h,
            ],
            dim=1,
        )
        parent[:, h] = h - 1
        steps = [torch.arange(h, h + self.nodes, device=device).expand(self.batch, -1)]
        for _ in range(h):
            steps.append(parent.gather(1, steps[-1]))
        window = torch.stack(steps[::-1], dim=2)  # [b, T, K]
        first = torch.arange(self.batch, device=device) * (h + self.nodes)
        return (window + first[:, None, None]).reshape(-1)

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


class DeferredVerify(VerifyScheme):
    """Rows and folds: the state is read in each step and written only when rows run out."""

    name = "deferred"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        c = self.config
        layers, requests = self.conv_in.shape[:2]
        W, device = self.num_rows, self.conv_in.device

        def buffer(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(layers, requests, *shape, dtype=dtype, device=device)

        # x and B of a row side by side, as they leave the convolution
        self.inner = c.inner_size
        self.xB = buffer(W, self.inner + c.num_groups * c.state_size, dtype=self.conv_in.dtype)
        self.dt = buffer(W, c.num_heads)
        self.log_decay = buffer(W, c.num_heads)
        self.chain_decay = buffer(1, c.num_heads)  # L of the chain's last token
        self.in_chain = torch.zeros(requests, W, dtype=torch.bool, device=device)

    def start(self, slot: int, checkpoint: int) -> None:
        super().start(slot, checkpoint)
        self._empty_chain(torch.tensor([slot], device=self.path.device))

    def finish(self, slot: int, checkpoint: int, keep: int) -> None:
        if keep:
            self._fold(torch.tensor([slot], device=self.path.device), keep)
        self.pool.conv[:, checkpoint] = self.conv_in[:, slot, : self.history]

    def begin(self, slots: Tensor, tree: Tree) -> None:
        crowded = self.chain_len[slots] + tree.tokens.shape[1] > self.num_rows
        if bool(crowded.any()):
            self._fold(slots[crowded])
        super().begin(slots, tree)
        # packed rows [chain ; tree]: the chain's are gathered here for all layers, the tree's
        # join them layer by layer
        length = self.chain_len[slots]
        longest = int(length.max())
        h = self.history
        chain = (self.path[slots, h : h + longest] - h).clamp_(0, self.num_rows - 1)
        at = (slice(None), slots[:, None], chain)
        self.chain = [
            buffer[at].unbind(0) for buffer in (self.xB, self.dt, self.log_decay)
        ]  # [b, R, …] a layer
        self.ends = self.chain_decay[:, slots].unbind(0)  # [b, 1, H] a layer
        valid = torch.arange(longest, device=slots.device) < length[:, None]
        visible = torch.cat([valid[:, None].expand(-1, self.nodes, -1), tree.ancestors], dim=2)
        self.mask_bias = torch.zeros(visible.shape, device=slots.device)
        self.mask_bias.masked_fill_(~visible, float("-inf"))  # [b, T, R+T]
        self.ancestors = tree.ancestors.float()
        self.made: list[tuple[Tensor, Tensor, Tensor]] = []  # xB, dt, L of the nodes, a layer each

    def _choose_rows(self) -> Tensor:
        # rows outside the chain are free; rejected nodes' rows are free by omission
        order = self.in_chain[self.slots].to(torch.int8).argsort(dim=1, stable=True)
        return order[:, : self.nodes]

    def _recur(self, layer: Mamba2Mixer, convolved: Tensor, dt: Tensor) -> tuple[Tensor, Tensor]:
        i, c = layer.index, self.config
        width = self.xB.shape[-1]
        xB, C = convolved[..., :width], convolved[..., width:]
        decays = dt * layer.decay_rate()
        if self.nodes == 1:
            log_decay = self.ends[i] + decays
        else:
            log_decay = torch.baddbmm(self.ends[i], self.ancestors, decays)
        made = (xB, dt, log_decay)
        self.made.append(made)
        packed = [torch.cat([past[i], new], 1) for past, new in zip(self.chain, made, strict=True)]
        x, B = packed[0][..., : self.inner], packed[0][..., self.inner :]
        y = tree_verify(
            Rows(
                x.unflatten(-1, (c.num_heads, c.head_dim)),
                B.unflatten(-1, (c.num_groups, c.state_size)),
                packed[1],
                packed[2],
            ),
            C.unflatten(-1, (c.num_groups, c.state_size)),
            log_decay,
            self.states[i],
            self.mask_bias,
        )
        return y, x[:, -self.nodes :].unflatten(-1, (c.num_heads, c.head_dim))

    def _accept(self, accepted: Truncated, hidden: Tensor, rows: Tensor) -> None:
        at = (slice(None), self.slots[:, None], self.rows)
        xB, dt, log_decay = (torch.stack(parts) for parts in zip(*self.made, strict=True))
        self.xB[at], self.dt[at], self.log_decay[at] = xB, dt, log_decay
        self.feature[self.slots[:, None], self.rows] = hidden.to(self.feature.dtype)
        # a request that had ended accepts nothing: its chain must stay as it is
        last = accepted.nodes.gather(1, (accepted.count - 1).clamp(min=0)[:, None])  # [b, 1]
        batch = torch.arange(self.batch, device=rows.device)[:, None]
        alive = (accepted.count > 0)[:, None, None]
        self.chain_decay[:, self.slots] = torch.where(
            alive, log_decay[:, batch, last], torch.stack(self.ends)
        )
        valid = torch.arange(rows.shape[1], device=rows.device) < accepted.count[:, None]
        marks = torch.zeros(
            rows.shape[0], self.num_rows + 1, dtype=torch.bool, device=rows.device
        ).scatter_(1, torch.where(valid, rows, self.num_rows), True)
        self.in_chain[self.slots] |= marks[:, :-1]

    def folded(self, slots: Tensor) -> Tensor:
        return self.table.run[slots] - self.chain_len[slots]

    def _fold(self, slots: Tensor, keep: int | None = None) -> None:
        """Write the state after the chain, or its first ``keep`` tokens, back to S0."""
        h, c = self.history, self.config
        length = self.chain_len[slots] if keep is None else torch.full_like(slots, keep)
        longest = int(length.max())
        chain = (self.path[slots, h : h + longest] - h).clamp_(0, self.num_rows - 1)  # [f, R]
        valid = torch.arange(longest, device=slots.device) < length[:, None]
        last = self.path[slots, h + length - 1] - h
        checkpoints = self.table.checkpoint[slots]
        for layer in range(self.xB.shape[0]):
            xB = self.xB[layer][slots[:, None], chain]
            rows = Rows(
                xB[..., : self.inner].unflatten(-1, (c.num_heads, c.head_dim)),
                xB[..., self.inner :].unflatten(-1, (c.num_groups, c.state_size)),
                self.dt[layer][slots[:, None], chain],
                self.log_decay[layer][slots[:, None], chain],
            )
            ssm = self.pool.ssm[layer]
            folded = fold(rows, valid, self.log_decay[layer, slots, last], ssm[checkpoints])
            ssm.index_copy_(0, checkpoints, folded.to(ssm.dtype))
        self.pool.feature[checkpoints] = self.feature[slots, last]
        self._move_history(slots, length)
        self._empty_chain(slots)

    def _empty_chain(self, slots: Tensor) -> None:
        self.chain_len[slots] = 0
        self.in_chain[slots] = False
        self.chain_decay[:, slots] = 0.0

    @property
    def num_bytes(self) -> int:
        parts = (self.conv_in, self.xB, self.dt, self.log_decay, self.feature)
        return sum(part.nbytes for part in parts)


class SnapshotVerify(VerifyScheme):
    """One full state a node; accepting copies the accepted node's state to the request's.

    What servers do today; here to be held to the same oracle and measured beside rows.
    """

    name = "snapshot"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        layers, requests = self.conv_in.shape[:2]
        self.node_states = torch.zeros(
            layers, requests, self.num_rows, *self.pool.ssm.shape[2:], device=self.path.device
        )

    def finish(self, slot: int, checkpoint: int, keep: int) -> None:
        assert keep == 0, "the checkpoint already holds every accepted token"
        self.pool.conv[:, checkpoint] = self.conv_in[:, slot, : self.history]

    def _choose_rows(self) -> Tensor:
        rows = torch.arange(self.nodes, device=self.slots.device)
        return rows.expand(self.batch, -1)

    def _recur(self, layer: Mamba2Mixer, convolved: Tensor, dt: Tensor) -> tuple[Tensor, Tensor]:
        x, B, C = layer.split_xbc(convolved)
        state = self.states[layer.index]
        y, states = snapshot_verify(x, dt, layer.decay_rate(), B, C, state, self.tree.parents)
        self.node_states[layer.index, self.slots, : self.nodes] = states
        return y, x

    def _accept(self, accepted: Truncated, hidden: Tensor, rows: Tensor) -> None:
        last = rows.gather(1, (accepted.count - 1).clamp(min=0)[:, None])[:, 0]
        # a request that had ended accepts nothing: its state stays
        alive = accepted.count > 0
        slots, last, checkpoints = self.slots[alive], last[alive], self.checkpoints[alive]
        self.pool.ssm[:, checkpoints] = self.node_states[:, slots, last].to(self.pool.ssm.dtype)
        self.pool.feature[checkpoints] = hidden[alive, last].to(self.pool.feature.dtype)
        self._move_history(slots, accepted.count[alive])
        self.chain_len[self.slots] = 0

    def folded(self, slots: Tensor) -> Tensor:
        return self.table.run[slots]

    @property
    def num_bytes(self) -> int:
        return self.conv_in.nbytes + self.node_states.nbytes


def _make_scheme(scheme: type[VerifyScheme], *args: Any) -> VerifyScheme:
    """``scheme``, or its fused twin where there is one for the pool's device and dtypes."""
    pool = args[-1]
    if numba_math.usable(pool.conv.device, pool.conv.dtype, pool.ssm.dtype):
        from mamba_eagle.runner.fused_verify import FUSED_SCHEMES  # it extends the classes above

        scheme = FUSED_SCHEMES[scheme.name]
    return scheme(*args)


# name -> maker, which takes VerifyScheme's arguments
VERIFY_SCHEMES = {
    scheme.name: partial(_make_scheme, scheme) for scheme in (DeferredVerify, SnapshotVerify)
}


def _all_layers(pool: Tensor, slots: Tensor) -> tuple[Tensor, ...]:
    """pool[:, slots], a layer each; for one request a view, which saves a copy of its state."""
    if slots.shape[0] == 1 and pool.device.type == "cpu":
        slot = int(slots[0])
        return pool[:, slot : slot + 1].unbind(0)
    return pool[:, slots].unbind(0)
