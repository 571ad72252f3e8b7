"""The three kinds of slots, and the cache that fills those which nobody runs on."""

from __future__ import annotations

from collections.abc import Collection

from mamba_eagle.cache.allocator import SlotAllocator
from mamba_eagle.cache.base import NoCache, PrefixCache
from mamba_eagle.cache.radix import RadixCache


class Pools:
    """Hands out slots, evicting from the cache where none is free.

    free + cached + held by requests = total, of every kind.
    """

    def __init__(
        self, max_kv_slots: int, max_state_slots: int, max_requests: int, use_cache: bool = True
    ) -> None:
        self.kv = SlotAllocator(max_kv_slots, "KV slot")
        self.state_slots = SlotAllocator(max_state_slots, "state slot")
        self.requests = SlotAllocator(max_requests, "request slot")
        self.cache: PrefixCache = RadixCache(self.kv, self.state_slots) if use_cache else NoCache()

    @property
    def available_kv(self) -> int:
        """KV slots that ``take_kv`` could hand out at once."""
        return self.kv.num_free + self.cache.evictable_kv

    def take_kv(self, count: int) -> list[int] | None:
        """``count`` KV slots, now the caller's; None, and nothing is evicted, if out of reach."""
        if count > self.available_kv:
            return None
        if count > self.kv.num_free:
            # A few more at a time: each eviction looks at all leaves.
            self.cache.evict_kv(max(count - self.kv.num_free, self.kv.total // 128))
        return self.kv.allocate(count)

    def take_state(self, keep: Collection[int] = ()) -> int | None:
        """A state slot, now the caller's; no cached one of ``keep`` is evicted for it."""
        if self.state_slots.num_free == 0:
            self.cache.evict_states(1, keep)
        slots = self.state_slots.allocate(1)
        return slots[0] if slots else None

    def check_integrity(self, held_kv: int, held_states: int, held_requests: int) -> None:
        """Raises: RuntimeError with numbers, unless free + cached + held = total everywhere."""
        self.cache.check_integrity()
        cache = self.cache
        for pool, cached, held in (
            (self.kv, cache.num_kv, held_kv),
            (self.state_slots, cache.num_states, held_states),
            (self.requests, 0, held_requests),
        ):
            if pool.num_free + cached + held != pool.total:
                raise RuntimeError(
                    f"{pool.name}s do not add up: {pool.num_free} free + {cached} cached + "
                    f"{held} held by requests != {pool.total}"
                )
