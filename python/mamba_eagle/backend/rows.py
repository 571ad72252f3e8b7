"""The buffers of running requests in which rows, journals and convolution inputs lie.

See kernels/tree_verify/layout.py for places and paths. What the nodes of a tree feed into the
recurrence is written to free rows while they are verified; ``accept`` puts the rows of accepted
nodes into the journal, which moves no tensor. Schemes own one of these and share its code.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mamba_eagle.backend.pools import RequestTable, StatePool
from mamba_eagle.backend.state import SchemeSize
from mamba_eagle.kernels.tree_verify.layout import RowBuffers
from mamba_eagle.model_config import Mamba2Config


class RequestRows:
    """Of R request slots: W rows each in all layers, and the path that leads to the last token."""

    def __init__(
        self, config: Mamba2Config, size: SchemeSize, table: RequestTable, pool: StatePool
    ) -> None:
        self.size, self.table, self.pool = size, table, pool
        self.history = config.conv_kernel - 1
        device, dtype = pool.conv.device, pool.conv.dtype
        requests, places = table.processed.shape[0], self.history + size.rows
        # raw convolution inputs: K-1 places of history, then a row's
        self.conv_in = torch.zeros(
            size.layers, requests, places, config.conv_dim, dtype=dtype, device=device
        )
        # accepted nodes are appended all at once, valid or not; hence the spare columns
        self.path = torch.zeros(requests, places + size.accepts, dtype=torch.int64, device=device)
        self.path[:, : self.history] = torch.arange(self.history, device=device)
        self.journal_len = torch.zeros(requests, dtype=torch.int64, device=device)
        self.feature = torch.zeros(requests, size.rows, size.features, dtype=dtype, device=device)
        self.offsets = torch.arange(self.history, device=device)

    def start(self, slots: Tensor, state_slots: Tensor) -> None:
        """The journals are empty, and the history is the state's."""
        self.journal_len[slots] = 0
        self.conv_in[:, slots, : self.history] = self.pool.conv[:, state_slots]

    def store_history(self, slots: Tensor, state_slots: Tensor) -> None:
        """The history goes to the state slots."""
        self.pool.conv[:, state_slots] = self.conv_in[:, slots, : self.history]

    def folded(self, slots: Tensor) -> Tensor:
        """Positions of the states, which the journals start from."""
        return self.table.processed[slots] - self.journal_len[slots]

    def move_history(self, slots: Tensor, keep: Tensor) -> None:
        """The history becomes that of the token ``keep`` tokens along the path; slots, keep [f]."""
        places = self.path[slots].gather(1, keep[:, None] + self.offsets)  # [f, K-1]
        # indexing copies before anything is overwritten: old and new history may overlap
        moved = self.conv_in[:, slots[:, None], places]
        self.conv_in[:, slots[:, None], self.offsets] = moved

    @property
    def num_bytes(self) -> int:
        return self.conv_in.nbytes + self.feature.nbytes


def recurrence_rows(config: Mamba2Config, size: SchemeSize, like: Tensor) -> RowBuffers:
    """What rows feed into the recurrence, of all layers: xB [layers, R, W, …] in the dtype of
    ``like`` [layers, R, …], dt and log_decay float32."""

    def buffer(width: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(*like.shape[:2], size.rows, width, dtype=dtype, device=like.device)

    xB = buffer(config.inner_size + config.num_groups * config.state_size, like.dtype)
    return RowBuffers(xB, buffer(config.num_heads), buffer(config.num_heads))


def layer_rows(rows: RowBuffers, layer: int) -> RowBuffers:
    """Those of one layer."""
    return RowBuffers(*(part[layer] for part in rows))
