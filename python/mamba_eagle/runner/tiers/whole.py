"""Units as files have them: with slots of the whole model, however many ranks share it.

A rank's host memory has its own heads, channels and layers of each slot. Rank 0 puts those of all
ranks together for a file, and takes them apart again, so what is in a file is what a single rank
would have written, and any numbers of ranks can read it.

    rank 0    own units ──┐
    rank 1    own units ──┴─ collect ─▶ whole units ─▶ file       and back by hand_out
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from math import prod
from typing import NamedTuple, TypeVar

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor

from mamba_eagle.message import Blocks
from mamba_eagle.model_config import Span
from mamba_eagle.parallel.groups import Group
from mamba_eagle.runner.tiers.disk import DamagedUnits, ForeignFile
from mamba_eagle.runner.tiers.slot_bytes import DeviceSlots, Part

T = TypeVar("T")
STATE_UNIT = 1 << 16  # bytes of a unit, if tokens have no keys and values
MIN_UNIT = 64  # bytes
ALIGNED = 8  # bytes: slots begin at multiples of it
REASON = 512  # bytes of what other ranks learn of a failure
FAILURES = {kind.__name__: kind for kind in (DamagedUnits, ForeignFile)}


class Share(msgspec.Struct, array_like=True, frozen=True):
    """What a rank has of a part of a slot."""

    name: str
    dtype: str
    itemsize: int
    shape: list[int]  # of the whole model's
    spans: list[list[Span]]  # by axis: this rank's, one after the other

    @classmethod
    def of(cls, part: Part) -> Share:
        cuts = [
            part.cuts.get(axis, (size, [Span(0, size)]))
            for axis, size in enumerate(part.slot_shape)
        ]
        shape, spans = [whole for whole, _ in cuts], [list(own) for _, own in cuts]
        itemsize = part.tensor.element_size()
        return cls(part.name, str(part.tensor.dtype), itemsize, shape, spans)

    @property
    def own_shape(self) -> list[int]:
        return [sum(span.size for span in axis) for axis in self.spans]

    @property
    def own_size(self) -> int:
        """Bytes."""
        return prod(self.own_shape) * self.itemsize

    @property
    def size(self) -> int:
        """Bytes of the whole model's."""
        return prod(self.shape) * self.itemsize

    def pairs(self, own: Tensor, whole: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """The same bytes in [n, own_size] and in [n, size], piece by piece."""
        own = own.unflatten(1, (*self.own_shape, self.itemsize))
        whole = whole.unflatten(1, (*self.shape, self.itemsize))
        for spans in product(*map(_placed, self.spans)):
            here, there = own, whole
            for axis, (begin, span) in enumerate(spans, start=1):
                here = here.narrow(axis, begin, span.size)
                there = there.narrow(axis, span.begin, span.size)
            yield here, there


def _placed(spans: Sequence[Span]) -> Iterator[tuple[int, Span]]:
    """Where each begins among them."""
    begin = 0
    for span in spans:
        yield begin, span
        begin += span.size


class Kind:
    """Slots of one kind: KV, states or journals."""

    def __init__(self, shares: Sequence[Sequence[Share]]) -> None:
        """shares: by rank, in the order of its bytes."""
        self.shares = shares
        every = {share.name: share for each in shares for share in each}
        parts = sorted(every.values(), key=lambda share: (-share.itemsize, share.name))
        self.layout = [(part.dtype, part.shape) for part in parts]
        self._begins: dict[str, int] = {}
        self.size = 0  # bytes of a slot of the whole model
        for part in parts:
            self._begins[part.name] = self.size
            self.size += part.size
        self.own_sizes = [sum(share.own_size for share in each) for each in shares]  # by rank

    def pairs(self, rank: int, own: Tensor, whole: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """The same bytes in slots of a rank and of the whole model: [n, their size or more]."""
        first = 0
        for share in self.shares[rank]:
            here = own.narrow(1, first, share.own_size)
            yield from share.pairs(here, whole.narrow(1, self._begins[share.name], share.size))
            first += share.own_size


class Sizes(NamedTuple):
    """How many units a token, a state and a journal take, in memory as in files."""

    kv: int
    state: int
    journal: int

    def unit_bytes(self, kv: int, state: int, journal: int) -> int:
        """Of a unit, where slots have these sizes."""
        needed = max(kv, MIN_UNIT, -(-state // self.state), -(-journal // self.journal))
        return -(-needed // ALIGNED) * ALIGNED


class WholeUnits:
    """The methods are called by all ranks in the same order, beside the steps."""

    def __init__(self, ranks: Sequence[Sequence[Sequence[Share]]], group: Group) -> None:
        """ranks: ``shares_of`` each. group: all of them."""
        self.group = group
        self.kinds = [Kind(shares) for shares in zip(*ranks)]
        kv, state, journal = (kind.size for kind in self.kinds)
        unit = kv or STATE_UNIT
        self.sizes = Sizes(int(kv > 0), max(1, -(-state // unit)), max(1, -(-journal // unit)))
        self.unit_bytes = self.sizes.unit_bytes(kv, state, journal)
        sizes = zip(*(kind.own_sizes for kind in self.kinds))
        self.own_bytes = [self.sizes.unit_bytes(*each) for each in sizes]  # of a rank's unit

    @property
    def layout(self) -> list[list[tuple[str, list[int]]]]:
        """Dtypes and shapes of a slot's parts, by kind of slot."""
        return [kind.layout for kind in self.kinds]

    def collect(self, rows: Tensor, blocks: Blocks) -> Tensor | None:
        """rows: [n, bytes of this rank's unit] uint8 on the host, of these blocks of a lower tier
        -> [n, unit_bytes] on rank 0, None elsewhere."""
        if self.group.size == 1:
            return rows
        every = self.group.collect(F.pad(rows, (0, max(self.own_bytes) - rows.shape[1])))
        if every is None:
            return None
        whole = torch.zeros(len(rows), self.unit_bytes, dtype=torch.uint8)
        for rank, (own, size) in enumerate(zip(every, self.own_bytes)):
            for here, there in self._pairs(rank, own[:, :size].contiguous(), whole, blocks):
                there.copy_(here)
        return whole

    def hand_out(self, whole: Tensor | None, blocks: Blocks) -> Tensor:
        """Undoes ``collect``."""
        if self.group.size == 1:
            assert whole is not None
            return whole
        count, widest, parts = sum(_lengths(blocks)), max(self.own_bytes), None
        if whole is not None:
            parts = [F.pad(p, (0, widest - p.shape[1])) for p in self._parts(whole, blocks)]
        room = torch.empty(count, widest, dtype=torch.uint8)
        own = self.group.hand_out(parts, room)
        return own[:, : self.own_bytes[self.group.rank]]

    def _parts(self, whole: Tensor, blocks: Blocks) -> Iterator[Tensor]:
        """Each rank's units."""
        for rank, size in enumerate(self.own_bytes):
            own = torch.zeros(len(whole), size, dtype=torch.uint8)
            for here, there in self._pairs(rank, own, whole, blocks):
                here.copy_(there)
            yield own

    def _pairs(
        self, rank: int, own: Tensor, whole: Tensor, blocks: Blocks
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Of contiguous units: a token in each, then a state in several, then a journal."""
        lengths = _lengths(blocks)
        for kind, here, there in zip(self.kinds, own.split(lengths), whole.split(lengths)):
            if kind is not self.kinds[0]:
                here, there = here.view(1, -1), there.view(1, -1)
            if here.numel():
                yield from kind.pairs(rank, here, there)

    def first_does(self, work: Callable[[], T]) -> T | None:
        """What rank 0 finds, None elsewhere. What fails there fails on all ranks.

        Raises: OSError, DamagedUnits, ForeignFile."""
        found, reason = None, ""
        if self.group.rank == 0:
            try:
                found = work()
            except Exception as error:
                reason = f"{type(error).__name__} {error}"
        told = torch.tensor(list(reason.encode()[:REASON].ljust(REASON)), dtype=torch.uint8)
        reason = bytes(self.group.from_first(told).tolist()).decode(errors="replace").rstrip()
        if reason:
            kind, _, text = reason.partition(" ")
            raise FAILURES[kind](text) if kind in FAILURES else OSError(reason)
        return found


def _lengths(blocks: Blocks) -> list[int]:
    return [len(blocks.kv), len(blocks.state), len(blocks.journal)]


def shares_of(slots: DeviceSlots) -> list[list[Share]]:
    return [[Share.of(part) for part in kind.parts] for kind in slots]
