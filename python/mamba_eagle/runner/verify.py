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

import torch
from torch import Tensor

from mamba_eagle.kernels.causal_conv.naive import causal_conv_windows
from mamba_eagle.kernels.tree_verify.naive import Rows, fold, snapshot_verify, tree_verify
from mamba_eagle.layers.mamba2 import Mamba2Mixer
from mamba_eagle.models.config import Mamba2Config
from mamba_eagle.runner.pools import CheckpointPool, RequestTable
from mamba_eagle.spec.accept import Truncated
from mamba_eagle.spec.tree import Tree


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
        self.weights: dict[int, Tensor] = {}  # layer -> convolution weight, transposed

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
        """Choose rows for the tree's nodes and find each node's convolution window."""
        self.slots, self.tree = slots, tree
        self.batch, self.nodes = tree.tokens.shape
        self.checkpoints = self.table.checkpoint[slots]
        self.rows = self._choose_rows()  # [b, T]
        row_ids = slots[:, None] * self.num_rows + self.rows
        self.flat_rows = row_ids.reshape(-1)
        self._find_windows()

    def verify(self, layer: Mamba2Mixer, xbc: Tensor, dt: Tensor) -> Tensor:
        """xbc [b*T, conv_dim] before the convolution, dt [b*T, H] raw -> y [b*T, H*P]."""
        places = self.conv_in[layer.index].flatten(0, 1)
        places.index_copy_(0, self.flat_places, xbc.to(places.dtype))
        windows = places.index_select(0, self.windows).view(*xbc.shape[:1], -1, xbc.shape[1])
        weight = self.weights.get(layer.index)
        if weight is None:
            weight = layer.conv1d.weight.detach()[:, 0].t().contiguous()
            self.weights[layer.index] = weight
        convolved = causal_conv_windows(windows, weight, layer.conv1d.bias)
        shape = (self.batch, self.nodes)
        y, x = self._recur(
            layer, convolved.unflatten(0, shape), layer.step_size(dt).unflatten(0, shape)
        )
        y = torch.addcmul(y, layer.D.float()[:, None], x.float())
        return y.to(xbc.dtype).flatten(2).flatten(0, 1)

    @abstractmethod
    def accept(self, accepted: Truncated, hidden: Tensor) -> None:
        """Make the accepted nodes part of the sequence. hidden [b, T, hidden_size]: the target's
        hidden states of the nodes, kept as the features of a later checkpoint."""

    @abstractmethod
    def folded(self, slots: Tensor) -> Tensor:
        """Position of each request's checkpoint, [b]."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Memory of the scheme itself, checkpoints apart."""

    # ── below: what the schemes differ in, and what they share ──

    @abstractmethod
    def _choose_rows(self) -> Tensor: ...

    @abstractmethod
    def _recur(self, layer: Mamba2Mixer, convolved: Tensor, dt: Tensor) -> tuple[Tensor, Tensor]:
        """-> y [b, T, H, P] without the skip, x [b, T, H, P]."""

    def _find_windows(self) -> None:
        """Places of each node's K-1 nearest ancestors and its own: tree parents first, then the
        tail of the chain, then the history. Never packed order."""
        h = self.history
        places = self.num_rows + h
        offsets = torch.arange(h, device=self.slots.device)
        tail = self.path[self.slots[:, None], self.chain_len[self.slots][:, None] + offsets]
        known = torch.cat([tail, self.rows + h], dim=1)  # [b, h + T]: places, ancestors first
        own = torch.arange(h, h + self.nodes, device=tail.device).expand(self.batch, -1)
        if self.nodes == 1:
            window = known[:, None, :]
        else:
            # parent of known[j]: j-1 in the tail, the tail's end for the root
            parent = torch.cat(
                [
                    (offsets - 1).clamp_(0).expand(self.batch, -1),
                    self.tree.parents + h,
                ],
                dim=1,
            )
            parent[:, h] = h - 1
            steps = [own]
            for _ in range(h):
                steps.append(parent.gather(1, steps[-1]))
            index = torch.stack(steps[::-1], dim=2)  # [b, T, K]
            window = known.gather(1, index.flatten(1)).view_as(index)
        base = self.slots * places
        self.windows = (window + base[:, None, None]).reshape(-1)
        self.flat_places = (known[:, h:] + base[:, None]).reshape(-1)

    def _append(self, accepted: Truncated) -> Tensor:
        """The accepted nodes' rows join the path. Returns the last one's row, [b]."""
        rows = self.rows.gather(1, accepted.nodes)  # [b, D]
        columns = (self.history + self.chain_len[self.slots])[:, None] + torch.arange(
            rows.shape[1], device=rows.device
        )
        self.path[self.slots[:, None], columns] = rows + self.history
        self.chain_len[self.slots] += accepted.count
        return rows.gather(1, (accepted.count - 1).clamp(min=0)[:, None])[:, 0]

    def _move_history(self, slots: Tensor, keep: Tensor) -> None:
        """The history becomes that of the token ``keep`` tokens along the path; slots, keep [f]."""
        offsets = keep[:, None] + torch.arange(self.history, device=slots.device)
        places = self.path[slots].gather(1, offsets)  # [f, K-1]
        # indexing copies before anything is overwritten: old and new history may overlap
        moved = self.conv_in[:, slots[:, None], places]
        self.conv_in[:, slots[:, None], offsets - keep[:, None]] = moved


class DeferredVerify(VerifyScheme):
    """Rows and folds: the state is read in each step and written only when rows run out."""

    name = "deferred"

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        c = self.config
        layers, requests = self.conv_in.shape[:2]
        W, device = self.num_rows, self.conv_in.device

        def buffer(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(layers, requests, *shape, dtype=dtype, device=device)

        # x and B of a row side by side: one write a layer
        self.inner = c.inner_size
        self.xB = buffer(W, self.inner + c.num_groups * c.state_size, dtype=self.conv_in.dtype)
        self.dt = buffer(W, c.num_heads)
        self.log_decay = buffer(W, c.num_heads)
        self.chain_decay = buffer(c.num_heads)  # L of the chain's last token
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
        h = self.chain_decay[:, slots]
        self.node_start = h  # [layers, b, H]
        visible = self.in_chain[slots][:, None].repeat(1, self.nodes, 1)  # [b, T, W]
        visible.scatter_(2, self.rows[:, None].expand(-1, self.nodes, -1), tree.ancestors)
        self.mask_bias = torch.zeros_like(visible, dtype=torch.float32)
        self.mask_bias.masked_fill_(~visible, float("-inf"))
        self.ancestors = tree.ancestors.float()

    def _choose_rows(self) -> Tensor:
        # rows outside the chain are free; rejected nodes' rows are free by omission
        order = self.in_chain[self.slots].to(torch.int8).argsort(dim=1, stable=True)
        return order[:, : self.nodes]

    def _recur(self, layer: Mamba2Mixer, convolved: Tensor, dt: Tensor) -> tuple[Tensor, Tensor]:
        i, c = layer.index, self.config
        xB, C = convolved.split(
            [self.xB.shape[-1], convolved.shape[-1] - self.xB.shape[-1]], dim=-1
        )
        steps = dt * layer.decay_rate()
        log_decay = torch.baddbmm(self.node_start[i][:, None], self.ancestors, steps)
        for buffer, values in (
            (self.xB, xB),
            (self.dt, dt),
            (self.log_decay, log_decay),
        ):
            rows = buffer[i].flatten(0, 1)
            rows.index_copy_(0, self.flat_rows, values.flatten(0, 1).to(rows.dtype))
        y = tree_verify(
            self._rows(i, self.slots),
            C.unflatten(-1, (c.num_groups, c.state_size)),
            log_decay,
            _take(self.pool.ssm[i], self.checkpoints),
            self.mask_bias,
        )
        return y, xB[..., : self.inner].unflatten(-1, (c.num_heads, c.head_dim))

    def _rows(self, layer: int, slots: Tensor) -> Rows:
        c = self.config
        xB = _take(self.xB[layer], slots)
        return Rows(
            xB[..., : self.inner].unflatten(-1, (c.num_heads, c.head_dim)),
            xB[..., self.inner :].unflatten(-1, (c.num_groups, c.state_size)),
            _take(self.dt[layer], slots),
            _take(self.log_decay[layer], slots),
        )

    def accept(self, accepted: Truncated, hidden: Tensor) -> None:
        self.feature.flatten(0, 1).index_copy_(
            0, self.flat_rows, hidden.flatten(0, 1).to(self.feature.dtype)
        )
        last = self._append(accepted)
        self.chain_decay[:, self.slots] = self.log_decay[:, self.slots, last]
        rows = self.rows.gather(1, accepted.nodes)
        self.in_chain[self.slots[:, None], rows] = True

    def folded(self, slots: Tensor) -> Tensor:
        return self.table.run[slots] - self.chain_len[slots]

    def _fold(self, slots: Tensor, keep: int | None = None) -> None:
        """Write the state after the chain, or its first ``keep`` tokens, back to S0."""
        h = self.history
        length = self.chain_len[slots] if keep is None else torch.full_like(slots, keep)
        columns = torch.arange(self.path.shape[1] - h, device=slots.device)
        valid = columns < length[:, None]  # [f, columns]
        rows = torch.where(valid, self.path[slots, h:] - h, self.num_rows)
        in_chain = torch.zeros(
            slots.shape[0], self.num_rows + 1, dtype=torch.bool, device=slots.device
        )
        in_chain = in_chain.scatter_(1, rows, True)[:, :-1]
        last = self.path[slots, h + length - 1] - h
        checkpoints = self.table.checkpoint[slots]
        for layer in range(self.xB.shape[0]):
            folded = fold(
                self._rows(layer, slots),
                in_chain,
                self.log_decay[layer, slots, last],
                self.pool.ssm[layer, checkpoints],
            )
            self.pool.ssm[layer].index_copy_(0, checkpoints, folded.to(self.pool.ssm.dtype))
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

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        layers, requests = self.conv_in.shape[:2]
        self.states = torch.zeros(
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
        state = _take(self.pool.ssm[layer.index], self.checkpoints)
        y, states = snapshot_verify(x, dt, layer.decay_rate(), B, C, state, self.tree.parents)
        self.states[layer.index, self.slots, : self.nodes] = states
        return y, x

    def accept(self, accepted: Truncated, hidden: Tensor) -> None:
        last = self._append(accepted)
        # a request that had ended accepts nothing: its state stays
        alive = accepted.count > 0
        slots, last, checkpoints = self.slots[alive], last[alive], self.checkpoints[alive]
        self.pool.ssm[:, checkpoints] = self.states[:, slots, last].to(self.pool.ssm.dtype)
        self.pool.feature[checkpoints] = hidden[alive, last].to(self.pool.feature.dtype)
        self._move_history(slots, accepted.count[alive])
        self.chain_len[self.slots] = 0

    def folded(self, slots: Tensor) -> Tensor:
        return self.table.run[slots]

    @property
    def num_bytes(self) -> int:
        return self.conv_in.nbytes + self.states.nbytes


VERIFY_SCHEMES = {scheme.name: scheme for scheme in (DeferredVerify, SnapshotVerify)}


def _take(pool: Tensor, slots: Tensor) -> Tensor:
    """pool[slots]; for one request a view, which saves a copy of its state."""
    if slots.shape[0] == 1 and pool.device.type == "cpu":
        slot = int(slots[0])
        return pool[slot : slot + 1]
    return pool.index_select(0, slots)
