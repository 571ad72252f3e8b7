"""Prompt chunks of delta rules on a GPU.

A scan starts at states and ends at states, and states are also saved inside a chunk. So a chunk is
cut where one is saved, and each *wave* scans one stretch of every request that has one left:

    request 0  ───────────●─────────────●──────     ● saved; the end is saved as well
    request 1  ────────────────●────────
    request 2  ───────
               wave 0: the first of 0, 1, 2; wave 1: the second of 0, 1; wave 2: the third of 0

Requests with the most stretches come first, so that a wave has the first ones of a batch. If
nothing is saved inside a chunk, one wave scans the flat input as it is.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, chain
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from mamba_eagle.backend.attention import NewTokenAttention
from mamba_eagle.backend.place import Place
from mamba_eagle.backend.pools import StatePool
from mamba_eagle.backend.prefill import PrefillPart, prompt_of
from mamba_eagle.backend.triton.delta import gates_of
from mamba_eagle.backend.triton.prefill import PlannedPrefill
from mamba_eagle.kernels.causal_conv.triton_prefill import conv_prompts
from mamba_eagle.kernels.prefill_plan import Prompt
from mamba_eagle.kernels.ssd.torch import even_chunk
from mamba_eagle.layers.delta_rule import DeltaRule
from mamba_eagle.layers.recurrent import Inputs, Recurrent, Scanned


class Bounds(NamedTuple):
    """Sequence i of a flat input is its tokens [bounds[i], bounds[i + 1])."""

    device: Tensor  # [b + 1] int64
    host: Tensor  # the same


class Stretch(NamedTuple):
    """A part of a chunk that ends where states are saved."""

    first: int  # in the flat input
    end: int
    tokens: int  # of the chunk, up to its end
    slots: list[int]  # state slots to save to


class Saves(NamedTuple):
    rows: Tensor  # [saves] int64: which of the states at hand
    slots: Tensor  # [saves] int64: where they go
    keys: Tensor | None  # of their rounding


class Wave(NamedTuple):
    """b sequences: the first requests of a batch, in its order."""

    first: int  # in the flat input, ordered by waves
    end: int
    bounds: Bounds
    saves: Saves

    @property
    def requests(self) -> int:
        return len(self.bounds.host) - 1


class Waves(NamedTuple):
    """All of a pass, in order."""

    each: list[Wave]
    bounds: Bounds  # of all stretches


# states [b, *state_shape] float32 at a wave's end, and which of them go where
Keep: TypeAlias = Callable[[Tensor, Saves], None]


class DeltaScan(ABC):
    @abstractmethod
    def scan(
        self, layer: DeltaRule, inputs: Inputs, waves: Waves, state: Tensor, keep: Keep
    ) -> Tensor:
        """inputs: [n, ·], ordered by waves; state: [b, *state_shape] float32, where the first
        wave's requests begin, which is not changed -> y [n, inner_size]."""


class TorchScan(DeltaScan):
    """One sequence after the other, as on any device."""

    def scan(
        self, layer: DeltaRule, inputs: Inputs, waves: Waves, state: Tensor, keep: Keep
    ) -> Tensor:
        outputs: list[Tensor] = []
        for wave in waves.each:
            found: list[Scanned] = []
            ends = [wave.first + bound for bound in wave.bounds.host.tolist()]
            for i, (first, end) in enumerate(zip(ends, ends[1:])):
                own = Inputs(*(part[None, first:end] for part in inputs))
                found.append(layer.scan(own, state[i : i + 1], even_chunk(end - first)))
            outputs += [each.y[0] for each in found]
            state = torch.cat([each.state for each in found])
            keep(state, wave.saves)
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0]


def stretches(prompt: Prompt) -> list[Stretch]:
    """In order; none of them is empty. The prompt's end is saved, too."""
    found: list[Stretch] = []
    begin = prompt.first
    for end in sorted({offset for offset, _ in prompt.saves} - {0}):
        slots = _slots_at(prompt, end)
        found.append(Stretch(begin, prompt.first + end, end, slots))
        begin = prompt.first + end
    return found


def _slots_at(prompt: Prompt, tokens: int) -> list[int]:
    return [slot for offset, slot in prompt.saves if offset == tokens]


class DeltaPrefillContext(PlannedPrefill):
    """States are carried in float32 from wave to wave, and rounded where they are saved."""

    def __init__(
        self,
        parts: list[PrefillPart],
        pool: StatePool,
        paged: NewTokenAttention | None,
        place: Place,
        scan: DeltaScan,
    ) -> None:
        super().__init__(parts, pool, paged, place)
        self.scan = scan
        prompts = [prompt_of(part) for part in parts]
        cut = [stretches(prompt) for prompt in prompts]
        order = sorted(range(len(parts)), key=lambda index: -len(cut[index]))
        sources = [prompts[index].source for index in order]
        self.sources = place.to_device([max(source, 0) for source in sources])
        empty = [i for i, source in enumerate(sources) if source < 0]
        self.empty = place.to_device(empty) if empty else None
        at_start = [
            (i, 0, slot) for i, index in enumerate(order) for slot in _slots_at(prompts[index], 0)
        ]
        self.at_start = self._saves(order, at_start) if at_start else None
        self.order: Tensor | None = None  # of the flat input's tokens, by waves
        self.back: Tensor | None = None
        waves: list[Wave] = []
        tokens: list[int] = []
        lengths: list[int] = []
        for number in range(len(cut[order[0]])):
            among = [index for index in order if number < len(cut[index])]
            own = [cut[index][number] for index in among]
            waves.append(self._wave(len(tokens), among, own))
            tokens += chain.from_iterable(range(each.first, each.end) for each in own)
            lengths += [each.end - each.first for each in own]
        self.waves = Waves(waves, self._bounds(lengths))
        if tokens != list(range(len(tokens))):
            self.order = place.to_device(tokens)
            self.back = torch.argsort(self.order)

    def _wave(self, first: int, among: Sequence[int], own: Sequence[Stretch]) -> Wave:
        """``own[i]`` is a stretch of part ``among[i]``."""
        bounds = self._bounds([each.end - each.first for each in own])
        saves = [(i, each.tokens, slot) for i, each in enumerate(own) for slot in each.slots]
        return Wave(first, first + int(bounds.host[-1]), bounds, self._saves(among, saves))

    def _bounds(self, lengths: list[int]) -> Bounds:
        bounds = list(accumulate(lengths, initial=0))
        return Bounds(self.place.to_device(bounds), torch.tensor(bounds))

    def _saves(self, among: Sequence[int], saves: list[tuple[int, int, int]]) -> Saves:
        """saves: which of the parts ``among``, after how many of its tokens, and the state slot."""
        keys = self.round_keys([(among[i], tokens) for i, tokens, _ in saves])
        rows, _, slots = self.place.to_device(list(zip(*saves)))
        return Saves(rows, slots, keys)

    def fixed(self, tokens: int, requests: int) -> None:
        return None  # the host divides each prompt among waves

    def recur(self, layer: Recurrent, channels: Tensor, raw: Tensor) -> Tensor:
        assert isinstance(layer, DeltaRule)
        pool, i = self.pool, layer.index
        inputs = Inputs(
            conv_prompts(channels, *layer.taps(), pool.conv[i], self.plan), gates_of(layer, raw)
        )
        if self.order is not None:
            inputs = Inputs(*(part[self.order] for part in inputs))
        states = pool.ssm[i][self.sources].float()
        if self.empty is not None:
            states.index_fill_(0, self.empty, 0.0)
        if self.at_start is not None:
            self._write(i, states, self.at_start)
        y = self.scan.scan(layer, inputs, self.waves, states, partial(self._write, i))
        return y if self.back is None else y[self.back]

    def _write(self, layer: int, states: Tensor, saves: Saves) -> None:
        rounded = self.pool.rounding.round(states[saves.rows], saves.keys, layer)
        self.pool.ssm[layer][saves.slots] = rounded
