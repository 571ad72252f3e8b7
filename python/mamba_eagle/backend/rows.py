"""The buffers of running requests that hold rows, journals and convolution inputs.

See kernels/tree_verify/layout.py for places and paths. Verification writes the recurrent inputs of
a tree's nodes to free rows; ``accept`` adds the rows of accepted nodes to the journal, which only
changes indices. Every scheme for recurrent layers owns a ``RequestRows``.
"""

import torch
from torch import Tensor

from mamba_eagle.backend.place import zeros
from mamba_eagle.backend.pools import RequestTable, StatePool
from mamba_eagle.backend.state import SchemeSize, StateScheme
from mamba_eagle.kernels.tree_verify.layout import RowBuffers
from mamba_eagle.model_config import RecurrenceConfig
from mamba_eagle.tree.accept import Truncated


class RequestRows:
    """For each of R request slots: W rows in all layers, and the path to the last token."""

    def __init__(
        self, config: RecurrenceConfig, size: SchemeSize, table: RequestTable, pool: StatePool
    ) -> None:
        self.pool = pool
        self.history = config.conv_kernel - 1
        device, dtype = pool.conv.device, pool.conv.dtype
        requests, places = table.processed.shape[0], self.history + size.rows
        # raw convolution inputs by place: K-1 places of history, then one place per row
        self.conv_in = zeros(
            size.layers, requests, places, config.conv_dim, dtype=dtype, device=device
        )
        # a step also writes nodes past ``count``; hence the spare columns
        self.path = torch.zeros(requests, places + size.accepts, dtype=torch.int64, device=device)
        self.path[:, : self.history] = torch.arange(self.history, device=device)
        self.journal_len = torch.zeros(requests, dtype=torch.int64, device=device)
        self.feature = zeros(requests, size.rows, size.features, dtype=dtype, device=device)
        self.offsets = torch.arange(self.history, device=device)

    def store_history(self, slots: Tensor, state_slots: Tensor) -> None:
        """Copy the history of the request slots [n] to the state slots [n]."""
        self.pool.conv[:, state_slots] = self.conv_in[:, slots, : self.history]

    def move_history(self, slots: Tensor, keep: Tensor) -> None:
        """Replace the history by that of the token ``keep`` tokens along the journal. slots, keep:
        [f] int64, request slots and numbers of tokens."""
        places = self.path[slots].gather(1, keep[:, None] + self.offsets)  # [f, K-1]
        # indexing makes a copy first, since old and new history may overlap
        moved = self.conv_in[:, slots[:, None], places]
        self.conv_in[:, slots[:, None], self.offsets] = moved

    @property
    def num_bytes(self) -> int:
        return self.conv_in.nbytes + self.feature.nbytes


class RowScheme(StateScheme):
    """Of models with recurrent layers: what its rows alone say."""

    def __init__(
        self, config: RecurrenceConfig, size: SchemeSize, table: RequestTable, pool: StatePool
    ) -> None:
        self.config, self.size, self.table, self.pool = config, size, table, pool
        self.rows = RequestRows(config, size, table, pool)
        self.gates = self.buffer(config.gate_size)

    def buffer(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """For something of this shape in all rows: [layers, R, W, *shape]."""
        layers, requests = self.rows.conv_in.shape[:2]
        device = self.rows.conv_in.device
        return zeros(layers, requests, self.size.rows, *shape, dtype=dtype, device=device)

    def start(self, slots: Tensor, state_slots: Tensor) -> None:
        """Empties the journals, and loads the history from the state slots."""
        own = self.rows
        own.journal_len.index_fill_(0, slots, 0)
        own.conv_in[:, slots, : own.history] = self.pool.conv[:, state_slots]

    def folded(self, slots: Tensor) -> Tensor:
        """Where the journals start."""
        return self.table.processed[slots] - self.rows.journal_len[slots]

    def journal_len(self, slots: Tensor) -> Tensor:
        return self.rows.journal_len[slots]

    def accepted_inputs(self, slots: Tensor, accepted: Truncated) -> tuple[Tensor, Tensor]:
        """The last tokens of the journals."""
        own, at = self.rows, slots[:, None]
        first = own.history + own.journal_len[slots] - accepted.count
        columns = first[:, None] + torch.arange(accepted.nodes.shape[1], device=slots.device)
        places = own.path[at, columns]
        rows = (places - own.history).clamp_(min=0)
        return own.conv_in[:, at, places], self.gates[:, at, rows]


class DeferredScheme(RowScheme):
    """Rows and folds: a row also has what a fold needs of its token."""

    has_journal = True

    def __init__(
        self, config: RecurrenceConfig, size: SchemeSize, table: RequestTable, pool: StatePool
    ) -> None:
        super().__init__(config, size, table, pool)
        own = pool.conv.dtype
        self.parts = tuple(
            self.buffer(part.width, dtype=torch.float32 if part.exact else own)
            for part in config.row_parts
        )

    def start(self, slots: Tensor, state_slots: Tensor) -> None:
        """Also zeroes the rows, since those outside the mask are multiplied by zero: a NaN that a
        previous request left there would reach the next one."""
        super().start(slots, state_slots)
        for part in (self.gates, *self.parts):
            part.index_fill_(1, slots, 0)

    @property
    def num_bytes(self) -> int:
        return self.rows.num_bytes + sum(part.nbytes for part in (self.gates, *self.parts))


class SnapshotScheme(RowScheme):
    """One full state per node; ``accept`` copies the last accepted node's state to the state slot.

    Most servers do this today; it is here to be tested against the same oracle and to be compared
    with rows and folds.
    """

    def __init__(
        self, config: RecurrenceConfig, size: SchemeSize, table: RequestTable, pool: StatePool
    ) -> None:
        super().__init__(config, size, table, pool)
        self.node_states = self.buffer(*pool.ssm.shape[2:])  # of all nodes

    def finish(self, slots: Tensor, state_slots: Tensor, keep: Tensor) -> None:
        """``keep`` is always 0: the states already include all accepted tokens."""
        self.rows.store_history(slots, state_slots)

    def folded(self, slots: Tensor) -> Tensor:
        return self.table.processed[slots]

    def accepted_inputs(self, slots: Tensor, accepted: Truncated) -> tuple[Tensor, Tensor]:
        """Node i is in row i."""
        own, at, nodes = self.rows, slots[:, None], accepted.nodes
        return own.conv_in[:, at, nodes + own.history], self.gates[:, at, nodes]

    @property
    def num_bytes(self) -> int:
        return self.rows.conv_in.nbytes + self.node_states.nbytes + self.gates.nbytes


def layer_rows(rows: RowBuffers, layer: int) -> RowBuffers:
    """The buffers of one layer."""
    return RowBuffers(*(part[layer] for part in rows))
