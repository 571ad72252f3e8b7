"""Prompt chunks on a CPU in float32, of all requests at a time: layers as programs, or one by one
with a few calls of kernels each; and what is replayed of them."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from mamba_eagle.backend.attention import NewTokenAttention
from mamba_eagle.backend.journals import Places, SavedJournals
from mamba_eagle.backend.place import Place
from mamba_eagle.backend.pools import StatePool
from mamba_eagle.backend.prefill import PrefillContext, PrefillPart, prompt_of
from mamba_eagle.cpu.ops.tree_verify import replay
from mamba_eagle.cpu.programs.prompts import PromptPrograms, PromptTables, recur_alone
from mamba_eagle.cpu.weights import Mixer, layer_weights, step_sizes_of
from mamba_eagle.kernels.prefill_plan import prefill_plan
from mamba_eagle.message import JournalPart


class CpuPrefillContext(PrefillContext):
    def __init__(
        self,
        parts: list[PrefillPart],
        pool: StatePool,
        paged: NewTokenAttention | None,
        place: Place,
        programs: PromptPrograms,
    ) -> None:
        """pool: in float32; it has no layers if the model has none with states."""
        super().__init__(parts, pool, paged, place)
        self.programs = programs
        self.tables: PromptTables | None = None
        if len(pool.ssm):
            plan = prefill_plan([prompt_of(part) for part in parts])
            requests, segments = plan.requests.numpy(), plan.segments.numpy()
            self.tables = PromptTables(tokens_of(requests, segments), requests, segments)

    def run(self, layers: Sequence[nn.Module], hidden: Tensor) -> Tensor | None:
        rows = self.kept(len(hidden)) if self.kept is not None else None
        return self.programs.run(layers, hidden, self, self.pool, self.tables, rows)

    def _recur(self, layer: Mixer, xbc: Tensor, dt: Tensor) -> Tensor:
        assert self.tables is not None
        return recur_alone(layer, xbc, dt, self.pool, self.tables)


class CpuJournals(SavedJournals):
    """Saved journals of states in float32, which need no rounding: one fused call per layer, which
    steps the state as decode steps do. So the state after a token of an output has the bits that it
    had in the request.

    torch's operations would take new memory for every intermediate of every replay, and take more
    than twice as long.
    """

    def write(self, places: Places, layer: Mixer, xbc: Tensor, dt: Tensor) -> None:
        for token, slot, row, count in places.runs:
            self.conv_in[layer.index, slot, row : row + count] = xbc[token : token + count]
        steps, _ = step_sizes_of(layer, dt[places.tokens])
        self.gates[layer.index, places.slots, places.rows] = torch.from_numpy(steps)

    def _replay_rows(self, part: JournalPart, state_slot: int) -> None:
        count = part.end - part.start
        for layer, mixer in enumerate(self.mixers):
            state = self.pool.ssm[layer, state_slot]
            journal = (self.conv_in[layer, part.slot], self.gates[layer, part.slot])
            replay(
                count * state.numel(),
                part.start % self.size,
                count,
                layer_weights(mixer),
                *(each.numpy() for each in (*journal, self.pool.conv[layer, state_slot], state)),
            )


def tokens_of(requests: np.ndarray, segments: np.ndarray) -> np.ndarray:
    """[n, 2] int32, of each token: the first one of its request, the state slot that its request
    starts from. requests, segments: of a PrefillPlan."""
    tokens = np.empty((segments[:, 1].max(), 2), np.int32)
    for first, last, source in requests.tolist():
        tokens[segments[first, 0] : segments[last - 1, 1]] = segments[first, 0], source
    return tokens
