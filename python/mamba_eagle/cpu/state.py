"""Both state schemes on a CPU in float32: one fused call per layer, no gathers.

The buffers are torch tensors; numpy views of them are created once, since kernels take arrays.
"""

from abc import abstractmethod
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mamba_eagle.backend.pools import RequestTable, StatePool
from mamba_eagle.backend.rows import RequestRows, gate_rows, layer_rows
from mamba_eagle.backend.state import KeptRows, SchemeSize, StateScheme
from mamba_eagle.backend.stateless import StatelessScheme
from mamba_eagle.backend.torch.state import make_node_states
from mamba_eagle.backend.zeros import zeros
from mamba_eagle.cpu.ops import tree_verify as cpu
from mamba_eagle.cpu.programs.layers import FusedLayers
from mamba_eagle.cpu.weights import Mixer, layer_weights
from mamba_eagle.kernels.tree_verify.layout import RowBuffers, TreeLayout
from mamba_eagle.model_config import RecurrenceConfig
from mamba_eagle.tree.accept import Truncated
from mamba_eagle.tree.tree import Tree


class CpuScheme(StateScheme):
    """The common part of both schemes: the buffers as arrays, and the kernel call per layer.
    Layouts are TreeLayouts of arrays."""

    def __init__(
        self, config: RecurrenceConfig, size: SchemeSize, table: RequestTable, pool: StatePool
    ) -> None:
        self.config, self.size, self.table, self.pool = config, size, table, pool
        self.rows = RequestRows(config, size, table, pool)
        self._path, self._journal_len = self.rows.path.numpy(), self.rows.journal_len.numpy()
        self._processed, self._state_slot = table.processed.numpy(), table.state_slot.numpy()
        self._layers: dict[int, tuple[cpu.LayerWeights, Any]] = {}
        self._kept: tuple[KeptRows, list[np.ndarray]] | None = None  # and its arrays

    def start(self, slots: Tensor, state_slots: Tensor) -> None:
        self.rows.start(slots, state_slots)

    def verify(self, layer: Mixer, layout: TreeLayout, xbc: Tensor, dt: Tensor) -> Tensor:
        cached = self._layers.get(layer.index)
        if cached is None:
            cached = self._layers[layer.index] = (layer_weights(layer), self._buffers(layer.index))
        y = torch.empty(xbc.shape[0], self.config.inner_size)
        inputs = (xbc.contiguous().numpy(), dt.contiguous().numpy())
        self._run(*inputs, layout, *cached, y.numpy())
        return y

    def keep_rows(
        self, slots: Tensor, accepted: Truncated, features: Tensor, kept: KeptRows
    ) -> None:
        if self._kept is None or self._kept[0] is not kept:
            self._kept = (kept, [part.numpy() for part in kept])
        conv_in, kept_dt, feature, trail, processed = self._kept[1]
        lengths, dt = self._newest()
        cpu.keep_rows(
            slots.numpy(),
            accepted.nodes.numpy(),
            accepted.count.numpy(),
            processed,
            trail,
            self._path,
            lengths,
            self.rows.history,
            (self.rows.conv_in.numpy(), dt.numpy()),
            features.numpy(),
            (conv_in, kept_dt, feature),
        )

    @abstractmethod
    def _newest(self) -> tuple[np.ndarray, Tensor]:
        """For ``keep_rows``: how many rows each path has, of which the last are the tokens accepted
        last, [R]; and dt of all rows, [layers, R, W, H]."""

    @abstractmethod
    def _run(self, *arguments: Any) -> None:
        """The layer's pass, with the arguments that its kernel takes."""

    @abstractmethod
    def _buffers(self, layer: int) -> Any:
        """The layer's buffers, in the form that the kernel takes."""


class CpuDeferred(CpuScheme):
    """Rows and folds; a journal consists of ``path`` and ``journal_len`` alone."""

    has_journal = True
    recurrent = True

    def __init__(
        self, config: RecurrenceConfig, size: SchemeSize, table: RequestTable, pool: StatePool
    ) -> None:
        super().__init__(config, size, table, pool)
        self.recurrence = rows_of(config, size, self.rows.conv_in)
        self._fused = FusedLayers(self)

    def run(
        self, layers: Sequence[nn.Module], hidden: Tensor, ctx: Any, layout: Any
    ) -> Tensor | None:
        return self._fused.run(layers, hidden, ctx, layout)

    def buffers_of(self, layer: Mixer) -> cpu.Buffers:
        return self._buffers(layer.index)

    def weights_of(self, layer: Mixer) -> cpu.LayerWeights:
        return layer_weights(layer)

    def finish(self, slots: Tensor, state_slots: Tensor, keep: Tensor) -> None:
        lengths = self.rows.journal_len[slots]
        if bool((keep > lengths).any()):  # rows that are not there would be read at any address
            raise ValueError(
                f"keep {keep.tolist()} exceeds the journals of slots {slots.tolist()}, which have "
                f"{lengths.tolist()} tokens: a release folds to a position that was processed"
            )
        moved = keep > 0
        if bool(moved.any()):
            self._fold(slots[moved].numpy(), keep[moved].numpy())
        self.rows.store_history(slots, state_slots)

    def begin(self, slots: Tensor, tree: Tree) -> TreeLayout:
        nodes = tree.parents.shape[1]
        max_journal = self.size.rows - max(nodes, self.size.nodes) - self.size.spare
        host_slots = slots.numpy()
        crowded = self._journal_len[host_slots] > max_journal
        if crowded.any():
            folded = host_slots[crowded]
            self._fold(folded, self._journal_len[folded])
        layout = self._layout(host_slots, nodes, tree.parents.numpy())
        cpu.fold_in_step(layout, *self._kept_by_slot())
        return layout

    def accept(self, layout: TreeLayout, accepted: Truncated, features: Tensor) -> None:
        cpu.extend_journals(
            layout.slots,
            layout.rows,
            accepted.nodes.numpy(),
            accepted.count.numpy(),
            features.flatten(0, 1).numpy(),
            self.rows.history,
            self._path,
            self._journal_len,
            self.rows.feature.numpy(),
        )

    def folded(self, slots: Tensor) -> Tensor:
        index = slots.numpy()
        return torch.from_numpy(self._processed[index] - self._journal_len[index])

    def journal_len(self, slots: Tensor) -> Tensor:
        return self.rows.journal_len[slots]

    def _newest(self) -> tuple[np.ndarray, Tensor]:
        return self._journal_len, self.recurrence.dt

    def stem(self, slots: Tensor, lanes: int) -> TreeLayout:
        layout = self._layout(slots.numpy(), lanes, None)
        return TreeLayout(*(None if part is None else torch.from_numpy(part) for part in layout))

    def lane_layout(self, lanes: TreeLayout) -> TreeLayout:
        arrays = (None if part is None else part.contiguous().numpy() for part in lanes)
        return TreeLayout(*arrays)._replace(fold=np.zeros(len(lanes.slots), np.bool_))

    def _layout(self, slots: np.ndarray, nodes: int, parents: np.ndarray | None) -> TreeLayout:
        b = len(slots)
        layout = TreeLayout(
            slots=slots,
            state_slots=np.empty(b, np.int64),
            journal=np.empty((b, self.size.rows), np.int64),
            journal_len=np.empty(b, np.int64),
            rows=np.empty((b, nodes), np.int64),
            parents=parents,
            ancestors=None,
            tail=np.empty((b, self.rows.history), np.int64),
            fold=np.zeros(b, np.bool_),
        )
        cpu.begin(
            slots,
            self._state_slot,
            self._path,
            self._journal_len,
            layout.state_slots,
            layout.journal,
            layout.journal_len,
            layout.rows,
            layout.tail,
        )
        return layout

    def _run(self, *arguments: Any) -> None:
        xbc, _, nodes = arguments[:3]
        (H, P, N), seen = (
            self.config.state_shape,
            nodes.journal.shape[1] + nodes.rows.shape[1],
        )  # at most
        work = len(xbc) * H * P * (N + seen)
        cpu.deferred_verify(work, *arguments)

    def _buffers(self, layer: int) -> cpu.Buffers:
        parts = (self.rows.conv_in[layer], *layer_rows(self.recurrence, layer))
        return cpu.Buffers(*(part.numpy() for part in (*parts, self.pool.ssm[layer])))

    def _fold(self, slots: np.ndarray, lengths: np.ndarray) -> None:
        """Write the states after the first ``lengths`` [f] tokens of the journals to the state
        slots of the requests in ``slots`` [f], and empty the journals."""
        history, state_slots = self.rows.history, self._state_slot[slots]
        work = int(lengths.sum()) * prod(self.config.state_shape)
        for layer in range(self.size.layers):
            buffers = self._buffers(layer)
            cpu.fold(work, slots, lengths, self._path, state_slots, history, buffers)
        cpu.empty_journals(slots, lengths, *self._kept_by_slot())

    def _kept_by_slot(self) -> tuple[Any, ...]:
        """What ``empty_journals`` takes behind slots and lengths."""
        rows = self.rows
        arrays = (part.numpy() for part in (rows.conv_in, rows.feature, self.pool.feature))
        return (self._state_slot, self._path, self._journal_len, rows.history, *arrays)

    @property
    def num_bytes(self) -> int:
        return self.rows.num_bytes + sum(part.nbytes for part in self.recurrence)


def rows_of(config: RecurrenceConfig, size: SchemeSize, like: Tensor) -> RowBuffers:
    """The buffers of all layers: what a state is written by, gates and decays (``cpu.Buffers``)."""
    shape, (H, P, N) = (*like.shape[:2], size.rows), config.state_shape
    written, decay = (
        zeros(*shape, n, dtype=torch.float32, device=like.device)
        for n in (H * P + config.num_groups * N, H)
    )
    return RowBuffers(written, gate_rows(config, size, like), decay)


class CpuStateless(StatelessScheme):
    """For models without recurrent layers."""

    recurrent = False

    def __init__(self, table: RequestTable, pool: StatePool) -> None:
        super().__init__(table, pool)
        self._fused = FusedLayers(self)

    def run(
        self, layers: Sequence[nn.Module], hidden: Tensor, ctx: Any, layout: Any
    ) -> Tensor | None:
        return self._fused.run(layers, hidden, ctx, layout)


class CpuSnapshot(CpuScheme):
    """One full state per node. Node i uses row i, and between steps the journal is empty."""

    def __init__(
        self, config: RecurrenceConfig, size: SchemeSize, table: RequestTable, pool: StatePool
    ) -> None:
        super().__init__(config, size, table, pool)
        self.node_states = make_node_states(self.rows, pool)
        self.dt = gate_rows(config, size, self.rows.conv_in)
        self._accepted = np.zeros_like(
            self._journal_len
        )  # by request slot: tokens of its last step

    def finish(self, slots: Tensor, state_slots: Tensor, keep: Tensor) -> None:
        """``keep`` is always 0: the states already include all accepted tokens."""
        self.rows.store_history(slots, state_slots)

    def begin(self, slots: Tensor, tree: Tree) -> TreeLayout:
        b, nodes = tree.parents.shape
        host_slots, history = slots.numpy(), self.rows.history
        return TreeLayout(
            slots=host_slots,
            state_slots=self._state_slot[host_slots],
            journal=np.empty((b, 0), np.int64),
            journal_len=np.zeros(b, np.int64),
            rows=np.tile(np.arange(nodes), (b, 1)),
            parents=tree.parents.numpy(),
            ancestors=None,
            tail=np.tile(np.arange(history), (b, 1)),
        )

    def accept(self, layout: TreeLayout, accepted: Truncated, features: Tensor) -> None:
        nodes, count = accepted.nodes.numpy(), accepted.count.numpy()
        cpu.commit_snapshots(
            layout.slots,
            nodes,
            count,
            features.flatten(0, 1).numpy(),
            layout.state_slots,
            self.node_states.numpy(),
            self.pool.ssm.numpy(),
            self.pool.feature.numpy(),
        )
        history = self.rows.history
        self._path[layout.slots, history : history + nodes.shape[1]] = nodes + history
        self._accepted[layout.slots] = count
        cpu.move_history(layout.slots, count, self._path, history, self.rows.conv_in.numpy())

    def folded(self, slots: Tensor) -> Tensor:
        return self.table.processed[slots]

    def _newest(self) -> tuple[np.ndarray, Tensor]:
        return self._accepted, self.dt

    def _run(self, *arguments: Any) -> None:
        cpu.snapshot_verify(*arguments)

    def _buffers(self, layer: int) -> cpu.SnapshotBuffers:
        own = (self.rows.conv_in, self.dt, self.node_states, self.pool.ssm)
        return cpu.SnapshotBuffers(*(part[layer].numpy() for part in own))

    @property
    def num_bytes(self) -> int:
        return self.rows.conv_in.nbytes + self.node_states.nbytes + self.dt.nbytes


CPU_SCHEMES = {"deferred": CpuDeferred, "snapshot": CpuSnapshot}
