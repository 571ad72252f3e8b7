"""Saved journals on a CPU in float32: one fused call per layer, which steps the state as decode
steps do. So the state after a token of an output has the bits that it had in the request.

torch's operations would take new memory for every intermediate of every replay, and take more than
twice as long.
"""

import torch
from torch import Tensor

from mamba_eagle.backend.journals import Places, SavedJournals
from mamba_eagle.cpu.ops import tree_verify as cpu
from mamba_eagle.cpu.weights import Mixer, layer_weights, step_sizes_of
from mamba_eagle.message import JournalPart


class CpuJournals(SavedJournals):
    """For states in float32, which need no rounding."""

    def write(self, layer: Mixer, places: Places, xbc: Tensor, dt: Tensor) -> None:
        for token, slot, row, count in places.runs:
            self.conv_in[layer.index, slot, row : row + count] = xbc[token : token + count]
        steps, _ = step_sizes_of(layer, dt[places.tokens])
        self.gates[layer.index, places.slots, places.rows] = torch.from_numpy(steps)

    def _replay_rows(self, part: JournalPart, state_slot: int) -> None:
        count = part.end - part.start
        for layer, mixer in enumerate(self.mixers):
            state = self.pool.ssm[layer, state_slot]
            journal = (self.conv_in[layer, part.slot], self.gates[layer, part.slot])
            cpu.replay(
                count * state.numel(),
                part.start % self.size,
                count,
                layer_weights(mixer),
                *(each.numpy() for each in (*journal, self.pool.conv[layer, state_slot], state)),
            )
