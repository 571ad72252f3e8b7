"""What a slot holds, in all the tensors that have it, as bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from mamba_eagle.backend.journals import SavedJournals
from mamba_eagle.backend.pools import KVPool, StatePool
from mamba_eagle.model_config import ModelConfig, Span
from mamba_eagle.parallel.shard import Shard, attention_heads, recurrent_heads

WHOLE: Mapping[int, Cut] = {}


class Cut(NamedTuple):
    """What a rank has along an axis of the whole model's tensor: spans, one after the other."""

    whole: int
    spans: Sequence[Span]


class Part(NamedTuple):
    """A tensor with slots along one of its dimensions."""

    tensor: Tensor
    dim: int
    name: str = ""  # the same on all ranks
    cuts: Mapping[int, Cut] = WHOLE  # by axis of a slot

    def order(self) -> tuple[int, str]:
        return -self.tensor.element_size(), self.name

    @property
    def slot_shape(self) -> list[int]:
        shape = list(self.tensor.shape)
        del shape[self.dim]
        return shape


class SlotBytes:
    """Slots of one kind. The bytes of a slot are those of each part, one after the other, the
    widest numbers first, which keeps them aligned, and then by name: all layers of the first, and
    so on. So layers, heads and kinds of state need not be known here."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = sorted((part for part in parts if part.tensor.numel()), key=Part.order)
        self.sizes = [prod(part.slot_shape) * part.tensor.element_size() for part in self.parts]
        self.size = sum(self.sizes)  # bytes of a slot

    def read(self, slots: int | Tensor, rows: Tensor) -> None:
        """slots: [n] int64, or the only one. rows [n, size or more] uint8 get their bytes, and
        zeros behind."""
        for part, own in self._pieces(rows):
            if isinstance(slots, int):
                own.copy_(part.tensor.narrow(part.dim, slots, 1))
            else:
                torch.index_select(part.tensor, part.dim, slots, out=own)
        rows[:, self.size :].zero_()

    def write(self, slots: int | Tensor, rows: Tensor) -> None:
        """Undoes ``read``."""
        for part, own in self._pieces(rows):
            if isinstance(slots, int):
                part.tensor.narrow(part.dim, slots, 1).copy_(own)
            else:
                part.tensor.index_copy_(part.dim, slots, own)

    def _pieces(self, rows: Tensor) -> Iterator[tuple[Part, Tensor]]:
        """Each part, and the place of its bytes in rows, shaped as the part with their slots."""
        for part, own in zip(self.parts, rows[:, : self.size].split(self.sizes, dim=1)):
            own = own.view(part.tensor.dtype).unflatten(1, part.slot_shape)
            yield part, own.movedim(0, part.dim)


class Held(NamedTuple):
    """The pools of a model on one rank, and what that has of it."""

    name: str
    kv: KVPool | None
    states: StatePool | None
    model: ModelConfig  # the whole one
    shard: Shard
    layers: Span

    def kv_parts(self) -> list[Part]:
        attention = self.model.attention
        if self.kv is None or attention is None:
            return []
        groups = [Span(g, g + 1) for g in attention_heads(self.shard, attention).groups]
        cuts = {0: self._layers("attention"), 1: Cut(attention.num_kv_heads, groups)}
        return [Part(b, 1, f"{self.name} {n}", cuts) for n, b in enumerate(self.kv.bits)]

    def state_parts(self) -> list[Part]:
        if (pool := self.states) is None:
            return []
        parts = [Part(pool.feature, 0, f"{self.name} feature")]
        if (recurrence := self.model.recurrence) is not None:
            heads = recurrent_heads(self.shard, recurrence).heads
            cuts = {0: self._layers("recurrent"), 1: Cut(recurrence.num_heads, [heads])}
            parts.append(Part(pool.ssm, 1, f"{self.name} ssm", cuts))
            parts.append(Part(pool.conv, 1, f"{self.name} conv", self._rows_of(channels=True)))
        return parts

    def journal_parts(self, journals: SavedJournals) -> list[Part]:
        parts = [Part(journals.feature, 0, "feature")]
        if self.model.recurrence is not None:
            parts.append(Part(journals.conv_in, 1, "conv", self._rows_of(channels=True)))
            parts.append(Part(journals.gates, 1, "gates", self._rows_of(channels=False)))
        return parts

    def _layers(self, kind: str) -> Cut:
        before = [self.model.places_before(layer, kind) for layer in self.layers]
        return Cut(self.model.places_before(len(self.model.blocks), kind), [Span(*before)])

    def _rows_of(self, channels: bool) -> dict[int, Cut]:
        """Of [layers, tokens, channels or gates]."""
        config = self.model.recurrence
        assert config is not None
        widths = config.channel_widths if channels else config.gate_widths
        spans = recurrent_heads(self.shard, config).spans(widths, config)
        size = config.conv_dim if channels else config.gate_size
        return {0: self._layers("recurrent"), 2: Cut(size, spans)}


class DeviceSlots(NamedTuple):
    """All that a rank has of a prefix in the cache, the drafter's part included."""

    kv: SlotBytes
    states: SlotBytes
    journals: SlotBytes

    @classmethod
    def of(cls, held: Sequence[Held], journals: SavedJournals) -> DeviceSlots:
        """held: the target, and the drafter if it has a network."""
        return cls(
            SlotBytes([part for each in held for part in each.kv_parts()]),
            SlotBytes([part for each in held for part in each.state_parts()]),
            SlotBytes(held[0].journal_parts(journals)),
        )
