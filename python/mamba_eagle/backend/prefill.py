"""Prompt chunks of several requests in one forward pass: the code that all backends share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mamba_eagle.backend.attention import NewTokenAttention, PromptSpan
from mamba_eagle.backend.place import Place
from mamba_eagle.backend.pools import RequestTable, StatePool
from mamba_eagle.backend.state import StateScheme
from mamba_eagle.kernels.prefill_plan import CONV_TOKENS, PrefillPlan, Prompt, Room, prefill_plan
from mamba_eagle.layers.context import AttentionView, ForwardContext
from mamba_eagle.layers.recurrent import Recurrent
from mamba_eagle.message import PrefillItem, Release


@dataclass
class PrefillPart:
    """One request's chunk in a prefill batch: tokens [first, first + length) of the flat input."""

    item: PrefillItem
    first: int
    length: int

    @property
    def flat(self) -> slice:
        """The chunk's tokens in the flat input."""
        return slice(self.first, self.first + self.length)

    @property
    def span(self) -> PromptSpan:
        """The chunk's positions in its request."""
        return PromptSpan(self.item.slot, self.item.start, self.length)


def prefill_parts(items: Sequence[PrefillItem]) -> list[PrefillPart]:
    """The parts of a flat input in which the chunks of ``items`` are concatenated."""
    lengths = [len(item.token_ids) for item in items]
    firsts = [0, *accumulate(lengths)]
    return [PrefillPart(*part) for part in zip(items, firsts, lengths)]


def positions_of(parts: Sequence[PrefillPart]) -> np.ndarray:
    """[n] int64: each token's position in its sequence."""
    spans = [part.span for part in parts]
    return np.concatenate([np.arange(span.start, span.start + span.length) for span in spans])


def prompt_of(part: PrefillPart) -> Prompt:
    """The chunk as the kernels take it. The request's own state slot is its last save, even if the
    plan requests another one at the same position."""
    item = part.item
    saves = [(save.position - item.start, save.state_slot) for save in item.saves]
    saves.append((part.length, item.state_slot))
    return Prompt(part.first, part.length, item.source, saves)


def start_finished(scheme: StateScheme, items: Sequence[PrefillItem], place: Place) -> None:
    """Start the scheme for the requests whose prompts are finished."""
    last = [(item.slot, item.state_slot) for item in items if item.is_last]
    if last:
        scheme.start(*place.to_device(list(zip(*last))))


def fold_released(
    table: RequestTable, scheme: StateScheme, releases: Sequence[Release], place: Place
) -> None:
    """Bring the states that the prefix cache keeps to the positions at which it has them."""
    kept = [(release.slot, release.fold_to) for release in releases if release.fold_to >= 0]
    if kept:
        slots, ends = place.to_device(list(zip(*kept)))
        scheme.finish(slots, table.state_slot[slots], ends - scheme.folded(slots))


class KeptInputs(NamedTuple):
    """Where a pass also writes what its tokens feed into the recurrence."""

    rows: Tensor  # [n] int64: slot · size + row, or -1 for tokens that are not kept
    inputs: Tensor  # [layers, slots, size, conv_dim], before the convolution
    gates: Tensor  # [layers, slots, size, gate_size]


class PrefillContext(ForwardContext):
    """The context of a forward pass over prompt chunks, which are concatenated in the flat input.

    Recurrent layers read each request's state from the state slot that holds it, write the state
    after the chunk to its own one, and save states at the positions that the plan requests. Of what
    a prompt starts from only the feature is copied.
    """

    # of a pass that writes rows to journal slots as well (``SavedJournals.keep``)
    keep: Callable[[Recurrent, Tensor, Tensor], None] | None = None  # those of a layer
    kept: Callable[[int], KeptInputs] | None = None  # of n tokens, where those of all layers go

    def __init__(
        self,
        parts: list[PrefillPart],
        pool: StatePool,
        paged: NewTokenAttention | None,
        place: Place,
    ) -> None:
        """paged: None if the model has no attention layer."""
        self.parts, self.pool, self.paged, self.place = parts, pool, paged, place
        for part in parts:
            if part.item.is_first:
                pool.begin(part.item)

    @cached_property
    def positions(self) -> Tensor:  # type: ignore[override]
        return self.place.to_device(positions_of(self.parts))

    def round_keys(self, ends: list[tuple[int, int]]) -> Tensor | None:
        """Of the states that are written: which part, tokens of it."""
        if not self.pool.rounding.keyed:
            return None
        items = [(self.parts[index].item, tokens) for index, tokens in ends]
        saved = [(item.slot, item.start + tokens) for item, tokens in items]
        return self.pool.rounding.keys(*self.place.to_device(list(zip(*saved))))

    def recur(self, layer: Recurrent, channels: Tensor, raw: Tensor) -> Tensor:
        if self.keep is not None:
            self.keep(layer, channels, raw)
        return self._recur(layer, channels, raw)

    @abstractmethod
    def _recur(self, layer: Recurrent, channels: Tensor, raw: Tensor) -> Tensor:
        """``recur`` itself."""

    def attention(self, layer: AttentionView, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        assert self.paged is not None, "the model has no attention layer"
        return self.paged.attend(layer, q, k, v)

    def fixed(self, tokens: int, requests: int) -> FixedPlan | None:
        """For passes of at most these sizes; None: the host must divide each."""
        return None


class PlannedPrefill(PrefillContext):
    """What kernels read of all layers is made once."""

    block = CONV_TOKENS

    @cached_property
    def plan(self) -> PrefillPlan:
        prompts = [prompt_of(part) for part in self.parts]
        return prefill_plan(prompts, self.place.to_device, self.block)

    def fixed(self, tokens: int, requests: int) -> FixedPlan | None:
        return None if self.pool.rounding.keyed else FixedPlan(self, tokens, requests)


SEGMENTS = 4  # of a request, for which a fixed plan has room


class FixedPlan:
    """A context's recurrence by a plan that stays where it is, for passes that a graph repeats."""

    def __init__(self, ctx: PlannedPrefill, tokens: int, requests: int) -> None:
        """tokens: of each pass; behind those of its prompts are others, whose outputs mean
        nothing."""
        self.ctx, self.tokens = copy(ctx), tokens
        blocks = -(-tokens // CONV_TOKENS) + requests - 1
        self.room = Room(requests, SEGMENTS * requests, blocks)
        self.memory: Tensor | None = None
        self.show(ctx.parts)
        self.recur = self.ctx.recur

    def fits(self, parts: Sequence[PrefillPart]) -> bool:
        """Whether there is room for what describes these prompts."""
        segments = sum(len(part.item.saves) + 1 for part in parts)
        return len(parts) <= self.room.requests and segments <= self.room.segments

    def show(self, parts: Sequence[PrefillPart]) -> None:
        """The next pass is over these prompts."""
        plan = prefill_plan([prompt_of(part) for part in parts], self._sent, room=self.room)
        self.ctx.plan = plan._replace(tokens=self.tokens)

    def _sent(self, numbers: list[int], dtype: torch.dtype) -> Tensor:
        place = self.ctx.place
        if self.memory is None:
            self.memory = place.to_device(numbers, dtype)
        return self.memory.copy_(place.host_tensor(numbers, dtype), non_blocking=True)
