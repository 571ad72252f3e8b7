"""What a slot holds, in all the tensors that have it, as bytes."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from mamba_eagle.backend.journals import SavedJournals
from mamba_eagle.backend.pools import KVPool, StatePool


class Part(NamedTuple):
    """A tensor with slots along one of its dimensions."""

    tensor: Tensor
    dim: int

    @property
    def slot_shape(self) -> list[int]:
        shape = list(self.tensor.shape)
        del shape[self.dim]
        return shape


class SlotBytes:
    """Slots of one kind. The bytes of a slot are those of each part, one after the other: all
    layers of the first, and so on. So layers, heads and kinds of state need not be known here."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = [part for part in parts if part.tensor.numel()]
        self.sizes = [prod(part.slot_shape) * part.tensor.element_size() for part in self.parts]
        self.size = sum(self.sizes)  # bytes of a slot

    def read(self, slots: Tensor) -> Tensor:
        """slots [n] int64 -> [n, size] uint8, a copy."""
        found = [torch.empty(len(slots), 0, dtype=torch.uint8, device=slots.device)]
        for tensor, dim in self.parts:
            rows = tensor.index_select(dim, slots).movedim(dim, 0)
            found.append(rows.reshape(len(slots), -1).view(torch.uint8))
        return torch.cat(found, dim=1)

    def write(self, slots: Tensor, data: Tensor) -> None:
        """slots [n] int64, data [n, size] uint8."""
        for part, values in zip(self.parts, data.split(self.sizes, dim=1)):
            tensor, dim = part
            rows = values.contiguous().view(tensor.dtype).view(len(slots), *part.slot_shape)
            tensor.index_copy_(dim, slots, rows.movedim(0, dim))


class DeviceSlots(NamedTuple):
    """All that a rank has of a prefix in the cache, the drafter's part included."""

    kv: SlotBytes
    states: SlotBytes
    journals: SlotBytes

    @classmethod
    def of(
        cls,
        kv_pools: Sequence[KVPool | None],
        state_pools: Sequence[StatePool | None],
        journals: SavedJournals,
    ) -> DeviceSlots:
        """The target's pools and the drafter's, if it has any."""
        kv = [Part(bits, 1) for pool in kv_pools if pool is not None for bits in pool.bits]
        states = []
        for pool in state_pools:
            if pool is not None:
                states += [Part(pool.ssm, 1), Part(pool.conv, 1), Part(pool.feature, 0)]
        rows = [Part(journals.conv_in, 1), Part(journals.gates, 1), Part(journals.feature, 0)]
        return cls(SlotBytes(kv), SlotBytes(states), SlotBytes(rows))
