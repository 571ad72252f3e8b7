"""Which token prefixes are cached: their KV slots, and recurrent states at some positions.

A node's edge is a sequence of tokens and owns one KV slot per token. A node may also own a *state
slot* with the whole recurrent state after its last token. Attention can continue after any token, a
recurrence only from a state. So a hit is the deepest state on the matched path:

    prompt   0 ──────────── position ──────────── length ──────────── len(prompt)
               KV and state           KV is cached, but     not in the tree
               are reused             is computed again
                                      for the state's sake
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

from mamba_eagle.cache.allocator import SlotAllocator
from mamba_eagle.cache.journals import CachedJournals
from mamba_eagle.cache.node import CacheBelow, Match, Node, StateKind, Tokens
from mamba_eagle.cache.order import LazyHeap, Rank
from mamba_eagle.cache.states import CachedStates
from mamba_eagle.cache.tree import PrefixTree
from mamba_eagle.message.indices import indices

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


class RadixCache(PrefixTree):
    """What the scheduler reuses: a tree of prefixes, with states and journals on its nodes.

    The cache owns the slots of its nodes and gives them back to the allocators when it evicts.
    Plans run in order, so a slot may be evicted as soon as the plan that last uses it is sent.
    Only the KV slots that a running request reads need a lock.

        PrefixTree          nodes, their KV slots, locks; which leaf goes first
        └─ CachedStates     a state slot per node; GreedyDual says which goes first
           └─ CachedJournals   journal slots, each at the node of a state
        Pins                what goes last of all, for a while
    """

    def __init__(
        self,
        kv: SlotAllocator,
        state_slots: SlotAllocator,
        journal_slots: SlotAllocator | None = None,
        draft_states: bool = False,
    ) -> None:
        """draft_states: the drafter has states of its own, in the same state slots."""
        self.draft_states = draft_states
        self.state_slots = state_slots
        self.journal_slots = journal_slots or SlotAllocator(0, "journal slot")
        self.below = CacheBelow()
        self.evicted_kv = self.evicted_states = 0  # slots since the start; a flush does not count
        super().__init__(kv)

    def reset(self) -> None:
        super().reset()
        self.states = CachedStates(self, self.state_slots, self.draft_states)
        self.journals = CachedJournals(self, self.states, self.journal_slots)
        self.pins = Pins(self.kv.total // 2, self.state_slots.total // 2, self._pin_ended)

    @property
    def num_states(self) -> int:
        return len(self.states.order)

    @property
    def num_journals(self) -> int:
        return len(self.journals.order)

    def match(
        self, tokens: Tokens, limit: int, salt: int = 0, followed: bool = False, uses: bool = True
    ) -> Match:
        """The deepest state at a position <= ``limit``, and how far the KV goes, of what was
        inserted with this salt. Counts as a use of the KV and, if it ``uses`` it, of the state;
        locks nothing.

        followed: only of states up to which the drafter has followed the prefix."""
        path, length = self.walk(tokens, salt)
        reach = min(length, limit)
        hit = seen = draft_state = self.root  # seen: how far the drafter has followed
        anchors: list[Node] = []
        for node in path:
            if node.followed:
                seen = node
            if node.state_slot < 0 or node.end > reach:
                continue
            usable = node.state_followed if self.draft_states else node.followed
            if usable:
                draft_state = node
            if usable or not followed:
                hit = node
                if node.journals:
                    anchors.append(node)
        journal, position = self.journals.best(anchors, tokens[:reach], hit.end)
        ends_at = hit
        if journal is not None:
            hit, ends_at = journal.node, self.node_at(path[-1], position)
            journal.used_at, journal.hit_at = self.clock, position
        kv_slots = indices()
        for part in reversed(list(ends_at.ancestors())):
            kv_slots += part.kv_slots
        if uses and hit is not self.root:
            self.states.use(hit)
        return Match(
            length,
            position,
            hit.state_slot,
            kv_slots,
            ends_at,
            kind=hit.kind if journal is None else "journal",
            journal=-1 if journal is None else journal.slot,
            anchor=hit.end,
            draft_from=draft_state.end if self.draft_states else min(seen.end, position),
            draft_state=draft_state.state_slot if self.draft_states else -1,
        )

    def attach_state(
        self, node: Node, position: int, slot: int, kind: StateKind = "tail", followed: bool = True
    ) -> bool:
        """Gives the cache the state after the first ``position`` tokens of the prefix that ends at
        ``node``; splits an edge where needed. Returns False if there is a state already: then the
        slot stays the caller's.

        followed: the drafter's own state is there, too. If the cache's lacks it, it is replaced.

        A spare state is one that no request is known to ask for, so it is evicted before all others
        until it is hit for the first time."""
        node = self.node_at(node, position)
        self.below.state_came(node)
        return self.states.attach(node, slot, kind, followed)

    def attach_journal(self, node: Node, position: int, slot: int, end: int) -> bool:
        """Gives the cache the rows of tokens [position, end) of the prefix that ends at ``node``,
        or at a node below ``end``. Returns False, and the slot stays the caller's, if there is no
        state at ``position`` or if it has a journal of these tokens already."""
        took = self.journals.attach(node, position, slot, end)
        if took:
            self.below.state_came(self.node_at(node, position))
        return took

    # ── pinning ──────────────────────────────────────────────────────────────────────────────

    def pin(self, node: Node, positions: Sequence[int], until: float, session: str = "") -> bool:
        """Until that time (time.monotonic), the KV of the first ``max(positions)`` tokens of the
        node's prefix, and the states at ``positions``, are evicted only when all else is gone.

        session: it has one pin, the last. Returns False, and pins nothing, if more than half of all
        slots would be pinned."""
        nodes = [self.node_at(node, position) for position in sorted(set(positions))]
        return self.pins.add(nodes, until, session)

    def _pin_ended(self, pin: Pin) -> None:
        """Those of its nodes that are still cached may be evicted sooner."""
        for part in pin.nodes:
            self.states.order.update(part)
            for journal in part.journals:
                self.journals.order.put(journal)
        for part in pin.nodes[-1].ancestors():
            self.leaves.update(part)

    # ── evicting ─────────────────────────────────────────────────────────────────────────────

    def evict_kv(self, count: int, most: int = -1) -> int:
        """Frees at least ``count`` KV slots, or all that are unlocked; returns how many. A leaf is
        evicted as a whole, together with its state. most: leaves, if not negative."""
        freed = 0
        while freed < count and most != 0 and (leaf := self.leaves.first()) is not None:
            most -= 1
            freed += len(leaf.kv_slots)
            self.below.leaf_goes(leaf)
            self.remove(leaf)
        self.evicted_kv += freed
        return freed

    def remove(self, leaf: Node) -> None:
        """A leaf that is not locked, with what is on it."""
        if leaf.state_slot >= 0:
            self._drop_state(leaf)
        self.journals.shorten(leaf)
        self.remove_leaf(leaf)

    def evict_states(self, count: int, keep: Collection[int] = ()) -> int:
        """Frees up to ``count`` state slots that are not in ``keep``; returns how many. The KV of
        their prefixes stays."""
        freed = 0
        while freed < count and (node := self.states.least(keep)) is not None:
            self.below.state_goes(node)
            self._drop_state(node)
            freed += 1
        return freed

    def evict_spare(self, unless: Callable[[Node], bool]) -> bool:
        """Frees the state slot of the spare state that is worth least; False if ``unless`` holds
        for all."""
        node = self.states.least_spare(unless)
        if node is not None:
            self.below.state_goes(node)
            self._drop_state(node)
        return node is not None

    def _drop_state(self, node: Node) -> None:
        for journal in list(node.journals):
            self.journals.drop(journal)
        self.states.drop(node)
        self.evicted_states += 1

    def flush(self) -> None:
        """Evicts everything. Raises: RuntimeError if something is locked."""
        if self.evictable_kv != self.num_kv:
            locked = self.num_kv - self.evictable_kv
            raise RuntimeError(f"cannot flush: {locked} of {self.num_kv} cached tokens are in use")
        for node in self.nodes():
            self.kv.free(node.kv_slots)
            if node.state_slot >= 0:
                self.state_slots.free([node.state_slot])
            self.journal_slots.free(journal.slot for journal in node.journals)
        self.reset()
        self.watcher.cleared()
        self.below.flushed()

    def check_integrity(self) -> None:
        """Raises: RuntimeError with numbers if the counters disagree with the tree."""
        super().check_integrity()
        self.states.check_integrity()
        self.journals.check_integrity()
        if problem := self.pins.problem(self.nodes()):
            raise RuntimeError(f"radix cache, pins: {problem}")
