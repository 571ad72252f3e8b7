"""Prefixes that clients have asked to keep for a while."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from mamba_eagle.cache.node import Node
from mamba_eagle.cache.order import LazyHeap, Rank

Owner = Node | str  # a session, or the deepest node of what is pinned without one


class Pin(NamedTuple):
    until: float  # time.monotonic()
    nodes: Sequence[Node]  # whose states are pinned, by depth; the KV is, up to the last one


class Pins:
    """Counts pins at the nodes that they are for, until their time is over.

    A pin forbids nothing: what is pinned is evicted after everything else. The nodes of a pin may
    have been evicted when it ends.
    """

    def __init__(self, max_kv: int, max_states: int, ended: Callable[[Pin], None]) -> None:
        """max_kv, max_states: KV slots and states that may be pinned at once.
        ended: called with a pin whose nodes may be evicted sooner from now on."""
        self._max_kv, self._max_states, self._ended = max_kv, max_states, ended
        self._pins: dict[Owner, Pin] = {}
        self._in_order: LazyHeap[Owner] = LazyHeap(self._rank)  # the keys of _pins
        self.kv = 0  # KV slots; what pins have in common counts for each
        self.states = 0

    def add(self, nodes: Sequence[Node], until: float, session: str = "") -> bool:
        """nodes: of one path, by depth. A pin of the same session, or without one of the same
        deepest node, is replaced, and keeps its time if that is later. Returns False, and changes
        nothing, if it would be too many."""
        deepest = nodes[-1]
        owner: Owner = session or deepest
        old = self._pins.get(owner)
        kv = self.kv + deepest.end - (old.nodes[-1].end if old else 0)
        states = self.states + len(nodes) - (len(old.nodes) if old else 0)
        if kv > self._max_kv or states > self._max_states:
            return False
        if old is not None:
            until = max(until, old.until)
            self.remove(owner)
        self._pins[owner] = Pin(until, nodes)
        self._in_order.put(owner)
        self.kv, self.states = kv, states
        for part in deepest.ancestors():
            part.pins += 1
        for part in nodes:
            part.state_pins += 1
        return True

    def end(self, now: float) -> None:
        """Those whose time is over."""
        while (owner := self._in_order.first()) is not None and self._pins[owner].until <= now:
            self.remove(owner)

    def remove(self, owner: Owner) -> None:
        """Ends a pin, if there is one."""
        pin = self._pins.pop(owner, None)
        if pin is None:
            return
        self._in_order.remove(owner)
        deepest = pin.nodes[-1]
        self.kv -= deepest.end
        self.states -= len(pin.nodes)
        for part in pin.nodes:
            part.state_pins -= 1
        for part in deepest.ancestors():
            part.pins -= 1
        self._ended(pin)

    def _rank(self, owner: Owner) -> Rank:
        return (int(1000 * self._pins[owner].until),)

    def problem(self, nodes: Iterable[Node]) -> str:
        """What is wrong with the counts, "" if nothing. nodes: all that are cached. A pin counts at
        its nodes whether they are still cached or not."""
        ends: Counter[Node] = Counter()
        above: Counter[Node] = Counter()
        for pin in self._pins.values():
            ends.update(pin.nodes)
            above.update(pin.nodes[-1].ancestors())
        for node in {*nodes, *above}:
            if (node.pins, node.state_pins) != (above[node], ends[node]):
                return (
                    f"node [{node.start}, {node.end}): {above[node]} pins of its KV and "
                    f"{ends[node]} of its state, but counted {node.pins} and {node.state_pins}"
                )
        pinned = sum(pin.nodes[-1].end for pin in self._pins.values()), sum(ends.values())
        if pinned != (self.kv, self.states):
            return (
                f"(KV slots, states) are {pinned} by the pins, but {(self.kv, self.states)} counted"
            )
        return self._in_order.problem()
