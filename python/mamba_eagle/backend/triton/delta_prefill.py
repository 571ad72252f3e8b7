"""Prompt chunks of delta rules on a GPU.

A scan starts at states and ends at states, and states are also saved inside a prompt's chunk. So
that is cut into *stretches*, each of which ends where a state is saved:

    request 0  ───────────●─────────────●──────     ● saved; the end is saved as well
    request 1  ────────────────●────────
    request 2  ───────

A request's stretches follow each other, in the flat input as in time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mamba_eagle.backend.attention import NewTokenAttention
from mamba_eagle.backend.place import Place
from mamba_eagle.backend.pools import StatePool
from mamba_eagle.backend.prefill import PlannedPrefill, PrefillPart, prompt_of
from mamba_eagle.backend.triton.delta import gates_of
from mamba_eagle.kernels.causal_conv.triton_prefill import conv_prompts
from mamba_eagle.kernels.delta_rule.triton_states import CHUNK
from mamba_eagle.kernels.prefill_plan import CONV_TOKENS, PrefillPlan, Prompt, in_one_copy
from mamba_eagle.kernels.ssd.torch import even_chunk
from mamba_eagle.layers.delta_rule import DeltaRule
from mamba_eagle.layers.recurrent import Inputs, Recurrent, Scanned


class Saves(NamedTuple):
    rows: Tensor | None  # [saves] int64: which of the states at hand; None: all, in order
    slots: Tensor  # [saves] int64: where they go
    keys: Tensor | None  # of their rounding


class Stretches(NamedTuple):
    """All of a pass, request after request. Stretch i is tokens [bounds[i], bounds[i + 1])."""

    bounds: list[int]
    requests: list[int]  # the first stretch of each request, and the number of all
    on_device: Tensor  # int64, as the following: ``bounds``
    places: Tensor  # [chunks, 2]: of each its stretch, and which of that's it is
    # A stretch is taken CHUNK tokens at a time. Chunk c is the tokens [starts[c], starts[c + 1])
    # and ends stretch ends[c], none if that is -1; request i has chunks [chunks[i], chunks[i + 1]).
    starts: Tensor  # int32, as the following
    ends: Tensor
    chunks: Tensor

    @classmethod
    def of(cls, lengths: list[list[int]], place: Place) -> Stretches:
        """lengths: of the stretches of each request."""
        requests = list(accumulate(map(len, lengths), initial=0))
        bounds = list(accumulate(chain.from_iterable(lengths), initial=0))
        starts, ends, places, first = list[int](), list[int](), list[int](), [0]
        for stretch, (begin, end) in enumerate(pairwise(bounds)):
            own = range(begin, end, CHUNK)
            starts += own
            ends += [-1] * (len(own) - 1) + [stretch]
            places += chain.from_iterable((stretch, i) for i in range(len(own)))
            first.append(len(starts))
        chunks = [first[stretch] for stretch in requests]
        narrow = in_one_copy([[*starts, bounds[-1]], ends, chunks], place.to_device)
        wide, flat = in_one_copy([bounds, places], place.to_device, torch.int64)
        return cls(bounds, requests, wide, flat.view(-1, 2), *narrow)


class Moves(NamedTuple):
    """What becomes of the states in a pass: the same in all layers."""

    stretches: Stretches
    sources: Tensor  # [b] int64, the slots of the states that requests begin from
    empty: Tensor  # [·] int64, the requests that begin with zeros
    zeros: Tensor | None  # these states, if they are all
    at_start: Saves | None
    at_end: Saves


class DeltaScan(ABC):
    block = CONV_TOKENS  # of the plan that ``convolved`` reads

    def convolved(
        self, layer: DeltaRule, channels: Tensor, history: Tensor, plan: PrefillPlan
    ) -> Any:
        """What ``scan`` reads of channels [n, conv_dim]. history: the layer's part of the pool."""
        return conv_prompts(channels, *layer.taps(), history, plan)

    @abstractmethod
    def scan(
        self, layer: DeltaRule, convolved: Any, raw: Tensor, stretches: Stretches, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        """raw: [n, ·], of gates; state: [b, *state_shape] float32, where the requests begin, which
        is not changed -> y [n, inner_size], and the states at the ends of all stretches,
        float32."""


class TorchScan(DeltaScan):
    """One sequence after the other, as on any device."""

    def scan(
        self, layer: DeltaRule, convolved: Any, raw: Tensor, stretches: Stretches, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        found, inputs = list[Scanned](), Inputs(convolved, gates_of(layer, raw))
        for i, (first, last) in enumerate(pairwise(stretches.requests)):
            begun = state[i : i + 1]
            for begin, end in pairwise(stretches.bounds[first : last + 1]):
                own = Inputs(*(part[None, begin:end] for part in inputs))
                found.append(layer.scan(own, begun, even_chunk(end - begin)))
                begun = found[-1].state
        return torch.cat([each.y[0] for each in found]), torch.cat([each.state for each in found])


def _targets(
    states: list[tuple[int, int]], prompts: list[Prompt]
) -> list[tuple[int, int, int, int]]:
    """states: of which prompt, after how many of its tokens. Returns for each slot that one of them
    is saved to: which one, its prompt, its tokens, the slot."""
    return [
        (i, part, tokens, slot)
        for i, (part, tokens) in enumerate(states)
        for offset, slot in prompts[part].saves
        if offset == tokens
    ]


class DeltaPrefillContext(PlannedPrefill):
    """States are carried in float32 from stretch to stretch, and rounded where they are saved."""

    def __init__(
        self,
        parts: list[PrefillPart],
        pool: StatePool,
        paged: NewTokenAttention | None,
        place: Place,
        scan: DeltaScan,
    ) -> None:
        super().__init__(parts, pool, paged, place)
        self.scan, self.block = scan, scan.block

    @cached_property
    def moves(self) -> Moves:
        """Made when the first layer needs it: until then the device has that layer's products."""
        prompts = [prompt_of(part) for part in self.parts]
        sources = [max(prompt.source, 0) for prompt in prompts]
        empty = [i for i, prompt in enumerate(prompts) if prompt.source < 0]
        # of each prompt's stretches, none of which is empty: its own end is saved, too
        ends = [sorted({tokens for tokens, _ in prompt.saves} - {0}) for prompt in prompts]
        reached = [(part, tokens) for part, own in enumerate(ends) for tokens in own]
        at_start = _targets([(part, 0) for part in range(len(prompts))], prompts)
        at_end = _targets(reached, prompts)
        lists = [sources, empty]
        for saves in (at_start, at_end):
            lists += [[row for row, *_ in saves], [slot for *_, slot in saves]]
        sent = in_one_copy(lists, self.place.to_device, torch.int64)
        lengths = [[end - begin for begin, end in pairwise([0, *own])] for own in ends]
        zeros = None
        if len(empty) == len(prompts):
            zeros = torch.zeros(len(prompts), *self.pool.ssm.shape[2:], device=self.place.device)
        return Moves(
            Stretches.of(lengths, self.place),
            sent[0],
            sent[1],
            zeros,
            self._saves(at_start, len(prompts), *sent[2:4]) if at_start else None,
            self._saves(at_end, len(reached), *sent[4:]),
        )

    def _saves(
        self, saves: list[tuple[int, int, int, int]], states: int, rows: Tensor, slots: Tensor
    ) -> Saves:
        """saves: as of ``_targets``."""
        keys = self.round_keys([(part, tokens) for _, part, tokens, _ in saves])
        whole = [row for row, *_ in saves] == list(range(states))
        return Saves(None if whole else rows, slots, keys)

    def fixed(self, tokens: int, requests: int) -> None:
        return None  # the host divides each prompt into stretches

    def _recur(self, layer: Recurrent, channels: Tensor, raw: Tensor) -> Tensor:
        assert isinstance(layer, DeltaRule)
        pool, i = self.pool, layer.index
        convolved = self.scan.convolved(layer, channels, pool.conv[i], self.plan)
        moves = self.moves
        states = moves.zeros
        if states is None:
            states = pool.ssm[i][moves.sources].float().index_fill_(0, moves.empty, 0.0)
        if moves.at_start is not None:
            self._write(i, states, moves.at_start)
        y, ends = self.scan.scan(layer, convolved, raw, moves.stretches, states)
        self._write(i, ends, moves.at_end)
        return y

    def _write(self, layer: int, states: Tensor, saves: Saves) -> None:
        given = states if saves.rows is None else states[saves.rows]
        rounded = self.pool.rounding.round(given, saves.keys, layer)
        self.pool.ssm[layer][saves.slots] = rounded
