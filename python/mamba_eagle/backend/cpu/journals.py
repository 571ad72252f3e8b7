"""Saved journals on a CPU in float32: one fused call per layer, then one matrix product.

torch's operations would take new memory for every intermediate of every replay, and take more than
twice as long.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mamba_eagle.backend.cpu.state import layer_weights
from mamba_eagle.backend.journals import Places, SavedJournals
from mamba_eagle.backend.place import Place
from mamba_eagle.backend.pools import RequestTable, StatePool
from mamba_eagle.kernels.tree_verify import cpu
from mamba_eagle.layers.mamba2 import Mamba2Mixer
from mamba_eagle.message import JournalPart


class CpuJournals(SavedJournals):
    """For states in float32, which need no rounding."""

    def __init__(
        self,
        num_slots: int,
        size: int,
        mixers: Sequence[Mamba2Mixer],
        pool: StatePool,
        table: RequestTable,
        place: Place,
    ) -> None:
        super().__init__(num_slots, size, mixers, pool, table, place)
        self._layer_weights: list[cpu.LayerWeights] = []
        _, _, heads, channels, state_size = pool.ssm.shape
        inner = heads * channels
        width = (pool.conv.shape[3] - inner) // 2  # of B
        self.groups = width // max(state_size, 1)
        # of one replay in one layer
        self._x, self._B = torch.empty(size, inner), torch.empty(size, width)

    def write(self, layer: Mamba2Mixer, places: Places, xbc: Tensor, dt: Tensor) -> None:
        for token, slot, row, count in places.runs:
            self.conv_in[layer.index, slot, row : row + count] = xbc[token : token + count]
        self.dt[layer.index, places.slots, places.rows] = layer.step_size(dt[places.tokens])

    def _replay_rows(self, part: JournalPart, state_slot: int) -> None:
        if not self._layer_weights:
            self._layer_weights = [layer_weights(mixer) for mixer in self.mixers]
        count = part.end - part.start
        x, B = self._x[:count], self._B[:count]
        by_group = x.view(count, self.groups, -1).permute(1, 2, 0)  # [G, H/G*P, count]
        B_by_group = B.view(count, self.groups, -1).transpose(0, 1)  # [G, count, N]
        arrays = (x.numpy(), B.numpy())
        for layer, weights in enumerate(self._layer_weights):
            state = self.pool.ssm[layer, state_slot]
            journal = (self.conv_in[layer, part.slot], self.dt[layer, part.slot])
            cpu.begin_replay(
                part.start % self.size,
                count,
                weights.conv,
                weights.heads[0],
                *(each.numpy() for each in (*journal, self.pool.conv[layer, state_slot], state)),
                *arrays,
            )
            state.view(self.groups, -1, state.shape[2]).baddbmm_(by_group, B_by_group)
