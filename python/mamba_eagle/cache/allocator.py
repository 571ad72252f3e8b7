"""Who may use which slot of a pool."""

from collections.abc import Iterable

import numpy as np

from mamba_eagle.message.indices import Indices, indices

MIN_VECTOR = 32  # below this many slots a loop is faster than numpy


class SlotError(RuntimeError):
    """A slot was given back that was not handed out: a double free, or not a slot of this pool."""


class SlotAllocator:
    """Hands out the ids 0 … total - 1 of one pool, each to one owner at a time.

    The allocator knows which slots are free, not who owns the others.
    """

    def __init__(self, total: int, name: str = "slot") -> None:
        self.total = total
        self.name = name
        order = np.arange(total - 1, -1, -1, dtype=np.int32)
        self._free = indices(order.tobytes())  # a stack: the last freed is the next used
        self._is_free = bytearray(b"\x01") * total
        self._marks = np.frombuffer(self._is_free, dtype=np.uint8)  # the same memory

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def can_spare(self) -> bool:
        """Whether a slot may keep what no known request asks for: an eighth stays free."""
        return self.num_free > max(1, self.total // 8)

    def allocate(self, count: int) -> Indices | None:
        """``count`` ids, now the caller's. None, and nothing is taken, if fewer are free."""
        if count > len(self._free):
            return None
        if count <= 0:
            return indices()
        slots = self._free[-count:]
        del self._free[-count:]
        if count < MIN_VECTOR:
            for slot in slots:
                self._is_free[slot] = 0
        else:
            self._marks[np.frombuffer(slots, dtype=np.int32)] = 0
        return slots

    def claim(self, slots: Indices) -> None:
        """Hands out these ids, which are free."""
        ids = np.frombuffer(slots, dtype=np.int32)
        self._marks[ids] = 0
        left = np.flatnonzero(self._marks)[::-1]
        self._free = indices(left.astype(np.int32).tobytes())

    def free(self, slots: Iterable[int]) -> None:
        """Takes the ids back. Raises: SlotError at the first that is free already or unknown."""
        slots = indices(slots)
        if len(slots) >= MIN_VECTOR and self._are_out(slots):
            self._marks[np.frombuffer(slots, dtype=np.int32)] = 1
            self._free.extend(slots)
            return
        for slot in slots:
            if not 0 <= slot < self.total:
                raise SlotError(f"{self.name} {slot} does not exist: there are {self.total}")
            if self._is_free[slot]:
                raise SlotError(f"{self.name} {slot} is given back but is free already")
            self._is_free[slot] = 1
            self._free.append(slot)

    def _are_out(self, slots: Indices) -> bool:
        """All of them exist, are not free, and are named once."""
        ids = np.sort(np.frombuffer(slots, dtype=np.int32))
        if ids[0] < 0 or ids[-1] >= self.total or (ids[1:] == ids[:-1]).any():
            return False
        return not self._marks[ids].any()
