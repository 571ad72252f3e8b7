"""Sessions: what the last request of each has run is pinned in the cache while it is open."""

import time
from collections.abc import Sequence

from mamba_eagle.cache.node import Node
from mamba_eagle.cache.slots import Slots
from mamba_eagle.core import shown
from mamba_eagle.limits import MAX_SESSIONS


class OpenSessions:
    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._seconds: dict[str, float] = {}  # that each may be without a request
        self._until: dict[str, float] = {}  # time.monotonic()

    def open(self, name: str, seconds: float) -> str:
        """Why it is not opened; "" if it is."""
        now = time.monotonic()
        for over in [each for each, until in self._until.items() if until <= now]:
            self._forget(over)
        if name in self._until:
            return f"session_id = {shown(name)}: it is open already"
        if len(self._until) >= MAX_SESSIONS:
            return f"{MAX_SESSIONS} sessions are open: close some"
        self._seconds[name], self._until[name] = seconds, now + seconds
        return ""

    def close(self, name: str) -> str:
        """Why it is not closed; "" if it is."""
        if name not in self._until:
            return f"session_id = {shown(name)}: it is not open, or no longer"
        self._forget(name)
        self._slots.cache.pins.remove(name)
        return ""

    def _forget(self, name: str) -> None:
        del self._until[name], self._seconds[name]

    def keep(self, name: str, node: Node, positions: Sequence[int]) -> bool:
        """Its prefix is now that of ``node``, with the states at ``positions``. Returns False if
        too much is pinned; a session that is not open pins nothing."""
        now = time.monotonic()
        if self._until.get(name, 0.0) <= now or not self._slots.stores:
            return True
        self._until[name] = now + self._seconds[name]
        return self._slots.cache.pin(node, positions, self._until[name], name)
