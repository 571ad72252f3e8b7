"""A prefix cache whose KV, states and journals are made of the units of one memory."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable

import numpy as np

from mamba_eagle.cache.allocator import SlotAllocator
from mamba_eagle.cache.node import Node
from mamba_eagle.cache.radix import RadixCache
from mamba_eagle.message import Blocks, TierSizes
from mamba_eagle.message.indices import Indices, indices

MAX_FREE_TOKENS = 1 << 21  # of a tier, for models whose tokens take no units


def in_order(units: Indices) -> Indices:
    """Sorted: those that follow each other are copied at once."""
    return indices(np.sort(np.asarray(units, dtype=np.int32)).tobytes())


class Pieces(SlotAllocator):
    """Slots that take ``size`` units of a common pool each, once they are handed out."""

    def __init__(self, pool: SlotAllocator, size: int, name: str) -> None:
        super().__init__(pool.total // max(size, 1), name)
        self.pool, self.size = pool, size
        self._units: dict[int, Indices] = {}  # by slot

    def allocate(self, count: int) -> Indices | None:
        if count * self.size > self.pool.num_free:
            return None
        slots = super().allocate(count)
        for slot in slots or ():
            units = self.pool.allocate(self.size)
            assert units is not None
            self._units[slot] = in_order(units)
        return slots

    def free(self, slots: Iterable[int]) -> None:
        slots = list(slots)
        super().free(slots)
        for slot in slots:
            self.pool.free(self._units.pop(slot))

    def units(self, slot: int) -> Indices:
        return self._units[slot]

    def adopt(self, units: Indices) -> int:
        """A slot made of units that were claimed in the pool."""
        slots = super().allocate(1)
        assert slots is not None and len(units) == self.size
        self._units[slots[0]] = units
        return slots[0]


class Shelf(ABC):
    """A tier as its neighbours see it."""

    cache: RadixCache
    number: int  # 0: the device, 1: host memory, 2: disk
    has_kv: bool  # whether tokens have keys and values
    reserve_kv: Callable[[int], Indices | None]
    reserve_state: Callable[[Collection[int]], int | None]  # which others must not be evicted
    reserve_journal: Callable[[Collection[int]], int | None]

    @abstractmethod
    def units_of(self, state: int, journal: int) -> tuple[Indices, Indices]:
        """What a copy reads or writes of a state and a journal; -1: of none."""

    def blocks(self, kv: Indices, state: int = -1, journal: int = -1) -> Blocks:
        return Blocks(self.number, kv if self.has_kv else indices(), *self.units_of(state, journal))


class Tier(Shelf):
    """Host memory, or disk."""

    def __init__(self, number: int, units: int, sizes: TierSizes, draft_states: bool) -> None:
        self.number, self.units = number, SlotAllocator(units, "unit")
        self.kv = self.units if sizes.kv_units else SlotAllocator(MAX_FREE_TOKENS, "token")
        self.states = Pieces(self.units, sizes.state_units, "state in units")
        self.journals = Pieces(self.units, sizes.journal_units, "journal in units")
        self.cache = RadixCache(self.kv, self.states, self.journals, draft_states)
        self.has_kv = bool(sizes.kv_units)

    def reserve_kv(self, count: int, spare: bool = False) -> Indices | None:
        """Units for ``count`` tokens; None if there is no room. spare: of a spare state, for which
        no other but spare ones are evicted."""
        self._make_room(self.kv, count, spare)
        taken = self.kv.allocate(count)
        return None if taken is None else in_order(taken)

    def reserve_state(self, keep: Collection[int] = (), spare: bool = False) -> int | None:
        return self._reserve(self.states, spare)

    def reserve_journal(self, keep: Collection[int] = ()) -> int | None:
        return self._reserve(self.journals)

    def _reserve(self, pieces: Pieces, spare: bool = False) -> int | None:
        self._make_room(self.units, pieces.size, spare)
        slots = pieces.allocate(1)
        return slots[0] if slots else None

    def _make_room(self, pool: SlotAllocator, count: int, spare: bool) -> None:
        """Evicts spare states, and then leaves, with all that is on them: KV that no state is left
        for is of no use, nor are states without it."""
        while pool.num_free < count <= pool.total and (
            (pool is self.units and self.cache.evict_spare(lambda node: node.locks > 0))
            or (not spare and self.cache.evict_kv(1))
        ):
            pass

    def units_of(self, state: int, journal: int) -> tuple[Indices, Indices]:
        rows = self.journals.units(journal) if journal >= 0 else indices()
        return self.states.units(state) if state >= 0 else indices(), rows

    def num_units(self, kv: Indices, journal: int) -> int:
        """Of what a copy brings: a state with this KV, and a journal or -1."""
        kv_units = len(kv) if self.has_kv else 0
        return kv_units + self.states.size + (self.journals.size if journal >= 0 else 0)

    def forget(self, node: Node) -> None:
        """The node and all below it are of no use; what copies hold is left to the next call."""
        found = [node]
        for each in found:  # a path may have more nodes than Python has frames
            found.extend(each.children.values())
        for each in reversed(found):
            if not each.children and not each.locks and each.parent is not None:
                self.cache.remove(each)

    def check_integrity(self, held: int) -> None:
        """held: units that copies hold for what is to come.

        Raises: RuntimeError unless free + cached + held is all there is."""
        cache = self.cache
        cache.check_integrity()
        cached = cache.num_states * self.states.size + cache.num_journals * self.journals.size
        cached += cache.num_kv if self.has_kv else 0
        if self.units.num_free + cached + held != self.units.total:
            raise RuntimeError(
                f"units of tier {self.number} do not add up: {self.units.num_free} free + "
                f"{cached} cached + {held} held != {self.units.total}"
            )
