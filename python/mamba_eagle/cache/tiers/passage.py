"""What goes from one tier of the prefix cache to the one below it, and what comes up again."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import islice

from mamba_eagle.cache.node import ADAPTED, CacheBelow, Journal, Match, Node, Tokens, common_prefix
from mamba_eagle.cache.radix import RadixCache
from mamba_eagle.cache.slot_pools import SlotPools
from mamba_eagle.cache.tiers.disk_log import Labels
from mamba_eagle.cache.tiers.tier import Shelf, Tier
from mamba_eagle.message import TierCopy
from mamba_eagle.message.indices import Indices, indices

# Units of a state that must save a token to go down. A 9B runs 100 tokens while one of its states,
# 8,763 units, is copied.
UNITS_PER_TOKEN = 64
MIN_FRESH = 64  # nodes that got a state and may have lost it again, however few have one


class Device(Shelf):
    """The slots' pools as the tier above all."""

    number = 0

    def __init__(self, slots: SlotPools, has_kv: bool) -> None:
        self.cache, self.has_kv = slots.cache, has_kv
        self.reserve_kv = slots.reserve_kv
        self.reserve_state, self.reserve_journal = slots.reserve_state, slots.reserve_journal

    def units_of(self, state: int, journal: int) -> tuple[Indices, Indices]:
        rows = indices([journal] if journal >= 0 else ())
        return indices([state] if state >= 0 else ()), rows


@dataclass(eq=False)
class Transfer:
    """A copy under way, and what it holds until it is answered. ``lower`` is locked there."""

    passage: Passage
    lower: Node
    start: int  # the first position of the prefix whose keys and values are copied
    upper: Node  # locked there

    @property
    def suspect(self) -> int:
        """Of a copy that failed: from there on the prefix is not below as it should be."""
        return self.start

    def end(self, worked: bool) -> None:
        """It is answered."""
        self.passage.lower.cache.unlock(self.lower)
        self.passage.upper.cache.unlock(self.upper)
        if not worked:
            node = self.lower
            while node.parent is not None and node.start > self.suspect:
                node = node.parent
            self.passage.lower.forget(node)


@dataclass(eq=False)
class Load(Transfer):
    """What comes up, with the slots above that are reserved for it."""

    tokens: Tokens  # [0, position)
    salt: int
    anchor: Node  # below: with the state
    kv: Indices  # of [start, position)
    state: int
    journal: int  # -1: none

    @property
    def position(self) -> int:
        return len(self.tokens)

    @property
    def suspect(self) -> int:
        return min(self.start, self.anchor.end - 1)

    def serves(self, tokens: Tokens, limit: int, salt: int) -> int:
        """The deepest position at which such a prompt can be continued once all is there."""
        if salt != self.salt:
            return 0
        reach = min(common_prefix(self.tokens, tokens), limit)
        if reach < self.anchor.end:
            return 0
        return reach if self.journal >= 0 else self.anchor.end

    def end(self, worked: bool) -> None:
        cache = self.passage.upper.cache
        if worked:
            self._arrive(cache)
        else:
            cache.kv.free(self.kv)
            cache.state_slots.free([self.state])
            self._free_journal(cache)
        super().end(worked)

    def _arrive(self, cache: RadixCache) -> None:
        """The cache above gets what it still lacks."""
        new = self.tokens[self.start :]
        done = cache.insert(self.upper, new, self.kv, self.salt, self.lower.followed)
        cache.kv.free(self.kv[: len(self.kv) - done.taken])
        anchor, node = self.anchor, done.node
        above = cache.node_at(node, anchor.end)
        # In a tier of units, another copy may read what would be replaced.
        is_read = self.passage.upper.number > 0 and above.locks > 0
        if (is_read and above.state_slot >= 0) or not cache.attach_state(
            node, above.end, self.state, anchor.moved_kind, anchor.state_followed
        ):
            cache.state_slots.free([self.state])
        if self.journal >= 0 and (
            (is_read and above.journals)
            or not cache.attach_journal(node, above.end, self.journal, self.position)
        ):
            self._free_journal(cache)

    def _free_journal(self, cache: RadixCache) -> None:
        if self.journal >= 0:
            cache.journal_slots.free([self.journal])


class Passage(CacheBelow):
    """Between a tier and the one below it.

    What comes up stays below, so what goes down again is there already and is not copied.
    """

    def __init__(
        self,
        upper: Shelf,
        lower: Tier,
        numbers: Iterator[int],
        min_gain: int,
        eager: bool,
        labels: Labels | None = None,
    ) -> None:
        """numbers: of copies. min_gain: tokens that a load must save. eager: what gets a state
        above goes down soon, and not only when it is evicted. labels: for the log of a disk."""
        self.upper, self.lower, self.min_gain, self.labels = upper, lower, min_gain, labels
        self.numbers, self.eager = numbers, eager
        self.min_worth = lower.states.size // UNITS_PER_TOKEN  # tokens that a state must save
        self.copies: list[TierCopy] = []  # not taken yet
        self.transfers: dict[int, Transfer] = {}  # by number, until they are answered
        self.fresh: dict[Node, None] = {}  # nodes that got a state above
        self.loaded_tokens = self.lost = 0

    def state_came(self, node: Node) -> None:
        if self.eager:
            if len(self.fresh) > 2 * self.upper.cache.num_states + MIN_FRESH:  # most have none now
                self.fresh = {each: None for each in self.fresh if each.state_slot >= 0}
            self.fresh[node] = None

    def flushed(self) -> None:
        self.fresh.clear()

    def write_down(self, most: int) -> None:
        """Copies up to ``most`` states that have come since they were last looked at."""
        for node in list(islice(self.fresh, most)):
            del self.fresh[node]
            self.descend(node)

    # ── down ─────────────────────────────────────────────────────────────────────────────────

    def descend(self, node: Node) -> None:
        """The tier below gets what it lacks of the node's state, its journals, and their KV; or
        nothing, if there is no room. Of the spare states only a document's is worth it."""
        if node.state_slot < 0 or node.end < self.min_gain:
            return
        if node.spare and node.kind != "document":
            return
        if self.labels is not None and node.salt & ADAPTED:
            return  # the adapter's number means nothing after a restart
        if self._gain(node) >= self.min_worth and self._send(node, node.end, node):
            for journal in node.journals:
                self._send(journal.bottom, journal.end, node, journal)

    def _gain(self, node: Node) -> int:
        """Tokens that the node's state and its journals save over shallower ones, of the tier below
        or yet to go there."""
        path, tokens = node.path()
        reach = self.reach(tokens[:-1], node.end - 1, node.salt).position
        for part in path[:-1]:
            goes = part.state_slot >= 0 and not part.spare
            if goes and part.end - reach >= self.min_worth:
                reach = part.end
        return node.deepest - reach

    def send(self, hit: Match) -> None:
        """What was found above goes down, whatever it is worth."""
        anchor = self.upper.cache.node_at(hit.node, hit.anchor)
        self._send(anchor, anchor.end, anchor)
        for journal in anchor.journals:
            if journal.slot == hit.journal:
                self._send(hit.node, hit.position, anchor, journal)

    def _send(self, bottom: Node, end: int, anchor: Node, journal: Journal | None = None) -> bool:
        """One path: its first ``end`` tokens, and the state or the journal. Returns whether the
        tier below has the state."""
        lower, (path, tokens) = self.lower.cache, bottom.path()
        tokens = tokens[:end]
        node, length = lower.lock_common(tokens, bottom.salt)
        slot = self._reserve(node, length, end, anchor, journal)
        kv = self.lower.reserve_kv(end - length, anchor.spare) if slot is not None else None
        if slot is None or kv is None or (slot < 0 and not kv):
            if slot is not None and slot >= 0:
                (lower.state_slots if journal is None else lower.journal_slots).free([slot])
            lower.unlock(node)
            return kv is not None
        sources = indices()
        for part in path:
            begin, stop = max(part.start, length), min(part.end, end)
            if begin < stop:
                sources += part.kv_slots[begin - part.start : stop - part.start]
                new = kv[begin - length : stop - length]
                done = lower.insert(node, tokens[begin:stop], new, bottom.salt, part.followed)
                lower.lock(done.node)
                lower.unlock(node)
                node = done.node
        source, target = self.upper.blocks(sources), self.lower.blocks(kv)
        if slot >= 0 and journal is None:
            lower.attach_state(node, end, slot, anchor.moved_kind, anchor.state_followed)
            source = self.upper.blocks(sources, anchor.state_slot)
            target = self.lower.blocks(kv, slot)
        elif slot >= 0 and journal is not None:
            if lower.attach_journal(node, anchor.end, slot, end):
                source = self.upper.blocks(sources, journal=journal.slot)
                target = self.lower.blocks(kv, journal=slot)
            else:
                lower.journal_slots.free([slot])
        copy = TierCopy(next(self.numbers), source, target)
        self.copies.append(copy)
        self._sent(copy, Transfer(self, node, length, bottom), kv, anchor.end)
        return True

    def _reserve(
        self, node: Node, length: int, end: int, anchor: Node, journal: Journal | None
    ) -> int | None:
        """What takes the state or the journal below; -1: it is there; None: there is no room.
        node: the deepest one of the path that is there."""
        lower = self.lower
        if journal is None:
            if length == end and node.state_slot >= 0:
                if not anchor.spare:
                    lower.cache.states.use(node)
                return -1
            return lower.reserve_state(spare=anchor.spare)
        place = lower.cache.node_at(node, anchor.end)
        if any(
            common_prefix(other.tokens, journal.tokens) == len(journal.tokens)
            for other in place.journals
        ):
            return -1
        if place.journals and place.locks > 1:
            return None  # it might take the place of one that another copy reads
        return lower.reserve_journal()

    def _sent(self, copy: TierCopy, transfer: Transfer, kv: Indices, anchor: int) -> None:
        """The copy is done beside the steps: until it is answered both ends stay."""
        self.upper.cache.lock(transfer.upper)
        self.transfers[copy.number] = transfer
        if self.labels is not None:
            copy.label = self.labels.label(copy, transfer.lower, transfer.start, kv, anchor)

    # ── up ───────────────────────────────────────────────────────────────────────────────────

    def loads(self) -> Iterator[Load]:
        return (each for each in self.transfers.values() if isinstance(each, Load))

    def reach(self, tokens: Tokens, limit: int, salt: int) -> Match:
        """What the tier below has of a prompt."""
        return self.lower.cache.match(tokens, limit, salt, uses=False)

    def load(self, tokens: Tokens, hit: Match, above: int, keep: Collection[int]) -> bool:
        """Starts to bring up what was found below. Returns whether that is worth it: it continues
        at least ``min_gain`` tokens behind ``above``, and there is room.

        keep: state slots above that must not be evicted."""
        upper, lower = self.upper, self.lower
        if hit.position - above < self.min_gain:
            return False
        lower.cache.lock(hit.node)  # what makes room above goes down
        journal = upper.reserve_journal(keep) if hit.journal >= 0 else None
        position = hit.position if journal is not None else hit.anchor
        node, length = upper.cache.lock_common(tokens[:position], hit.node.salt)
        kv = upper.reserve_kv(position - length) if position - above >= self.min_gain else None
        state = upper.reserve_state(keep) if kv is not None else None
        slot = -1 if journal is None else journal
        if kv is None or state is None:
            lower.cache.unlock(hit.node)
            upper.cache.unlock(node)
            upper.cache.kv.free(kv or ())
            upper.cache.journal_slots.free([slot] if slot >= 0 else ())
            return False
        below = hit.journal if slot >= 0 else -1
        source = lower.blocks(hit.kv_slots[length:position], hit.state_slot, below)
        copy = TierCopy(next(self.numbers), source, upper.blocks(kv, state, slot))
        self.copies.append(copy)
        anchor, prefix = lower.cache.node_at(hit.node, hit.anchor), tokens[:position].copy()
        lower.cache.states.use(anchor)
        self.transfers[copy.number] = Load(
            self, hit.node, length, node, prefix, hit.node.salt, anchor, kv, state, slot
        )
        self.loaded_tokens += position - above
        return True

    def end(self, number: int, worked: bool) -> bool:
        """A copy is answered. Returns whether it was of this passage."""
        transfer = self.transfers.pop(number, None)
        if transfer is None:
            return False
        self.lost += not worked
        transfer.end(worked)
        return True


class FromDevice(Passage):
    """What is evicted from the device goes down at once, in the plan that gives its slots away.

    The runner reads the slots in order with the steps, so what goes down holds nothing.
    """

    def __init__(
        self, slots: SlotPools, lower: Tier, numbers: Iterator[int], min_gain: int, eager: bool
    ) -> None:
        super().__init__(Device(slots, lower.has_kv), lower, numbers, min_gain, eager)
        self.slots = slots

    def state_goes(self, node: Node) -> None:
        if not self.slots.is_folding(node.state_slot):
            self.descend(node)

    def leaf_goes(self, leaf: Node) -> None:
        for node in {leaf, *(journal.node for journal in leaf.reaching)}:
            self.state_goes(node)

    def _sent(self, copy: TierCopy, transfer: Transfer, kv: Indices, anchor: int) -> None:
        self.lower.cache.unlock(transfer.lower)
