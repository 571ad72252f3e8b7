"""Which token prefixes are cached: their KV slots, and recurrent states at some positions.

A node's edge is a sequence of tokens and owns one KV slot per token. A node may also own a *state
slot* with the whole recurrent state after its last token. Attention can continue after any token, a
recurrence only from a state. So a hit is the deepest state on the matched path:

    prompt   0 ──────────── position ──────────── length ──────────── len(prompt)
               KV and state           KV is cached, but     not in the tree
               are reused             is computed again
                                      for the state's sake
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence

import numpy as np

from mamba_eagle.cache.allocator import SlotAllocator
from mamba_eagle.cache.base import (
    CacheWatcher,
    Fold,
    Inserted,
    Journal,
    Match,
    Node,
    PrefixCache,
    StateKind,
    Tokens,
    as_tokens,
    child_key,
    common_prefix,
)
from mamba_eagle.cache.order import LazyHeap, Rank
from mamba_eagle.cache.pins import Pin, Pins
from mamba_eagle.message.indices import Indices, indices

TOKEN_BYTES = 4  # of Tokens


class RadixCache(PrefixCache):
    """One tree over token ids, page size 1.

    KV is evicted leaf by leaf. Leaves without a state go first, since no hit can end there; then
    the least recently used.

    States differ in what a hit on them saves: the tokens between this state and the next shallower
    one, from which prefill would start otherwise. GreedyDual evicts by recency and by value at the
    same time (N. Young, "The k-server dual and loose competitiveness for paging", Algorithmica 11,
    1994):

    - A state's score is ``inflation + saved``, where ``saved`` is that number of tokens, and
      ``inflation`` is the cache's at the time when the state was stored or last hit.
    - The state with the lowest score is evicted, and the cache's inflation becomes that score.

    Because the inflation only grows, a state that is used now starts higher than one of the same
    value used earlier. So states of equal value are evicted in LRU order, cheap ones first, and a
    valuable one that nobody uses is evicted as well once the inflation has passed its score.

    *Spare* states, which were stored in case a later prompt branches off there, have shown no value
    so far: they are evicted before all others, least recent first, and do not count as the next
    shallower state. With its first hit a spare state becomes an ordinary one.

    A *journal* hangs on the node of the state that it begins at, its anchor, with tokens of its
    own. It is shortened when KV under it is evicted, and leaves with its state, or before, least
    recently used first.
    """

    stores = True

    def __init__(
        self,
        kv: SlotAllocator,
        state_slots: SlotAllocator,
        journal_slots: SlotAllocator | None = None,
        draft_states: bool = False,
    ) -> None:
        """draft_states: the drafter has states of its own, in the same state slots."""
        self.draft_states = draft_states
        self.kv = kv
        self.state_slots = state_slots
        self.journal_slots = journal_slots or SlotAllocator(0, "journal slot")
        self.watcher = CacheWatcher()
        self._reset()

    def _reset(self) -> None:
        self.root = Node(None, as_tokens([]), indices(), 0)
        self.num_kv = 0
        self.evictable_kv = 0
        self.clock = 0  # counts matches, inserts and stored states
        self.inflation = 0  # score of the last state evicted: tokens
        self._leaves = LazyHeap(self._leaf_rank)  # those that are not locked
        self._states = LazyHeap(self._state_rank)  # nodes with a state
        self._journals = LazyHeap(self._journal_rank)
        self._longest_journal = 0  # tokens, of all so far
        self.pins = Pins(self.kv.total // 2, self.state_slots.total // 2, self._pin_ended)

    @property
    def num_states(self) -> int:  # type: ignore[override]
        return len(self._states)

    @property
    def num_journals(self) -> int:  # type: ignore[override]
        return len(self._journals)

    @property
    def pinned_kv(self) -> int:  # type: ignore[override]
        return self.pins.kv

    @property
    def pinned_states(self) -> int:  # type: ignore[override]
        return self.pins.states

    # ── reading ──────────────────────────────────────────────────────────────────────────────

    def match(self, tokens: Tokens, limit: int, salt: int = 0, followed: bool = False) -> Match:
        self.clock += 1
        now = time.monotonic()
        node, length, hit = self.root, 0, self.root
        seen, draft_state = 0, self.root  # how far the drafter has followed; its deepest state
        anchors: list[Node] = []
        data = tokens.tobytes()  # comparing bytes takes a quarter of the time
        while length < len(tokens):
            child = node.children.get(child_key(salt, int(tokens[length])))
            if child is None:
                break
            child.used_at, child.used_time = self.clock, now
            end = child.end
            if data[length * TOKEN_BYTES : end * TOKEN_BYTES] != child.tokens.tobytes():
                length += common_prefix(child.tokens, tokens[length:end])
                node = child
                seen = length if child.followed else seen
                break
            node, length = child, end
            seen = length if child.followed else seen
            if node.state_slot >= 0 and node.end <= limit:
                usable = node.state_followed if self.draft_states else node.followed
                if usable:
                    draft_state = node
                if followed and not usable:
                    continue
                hit = node
                if node.journals:
                    anchors.append(node)
        journal, position = self._best_journal(anchors, tokens[: min(length, limit)], hit.end)
        if journal is not None:
            hit, ends_at = journal.node, self._node_at(node, position)
            journal.used_at, journal.hit_at = self.clock, position
        else:
            ends_at = hit
        kv_slots = indices()
        for part in reversed(list(ends_at.ancestors())):
            kv_slots += part.kv_slots
        if hit is not self.root:
            self._renew(hit)
            self._set_ordinary(hit)
        draft = (min(seen, position), -1)
        if self.draft_states:
            draft = (draft_state.end, draft_state.state_slot)
        if journal is None:
            place = (-1, hit.end, *draft)
            return Match(length, hit.end, hit.state_slot, kv_slots, hit, hit.kind, *place)
        place = (journal.slot, hit.end, *draft)
        return Match(length, position, hit.state_slot, kv_slots, ends_at, "journal", *place)

    @staticmethod
    def _best_journal(
        anchors: Sequence[Node], tokens: Tokens, position: int
    ) -> tuple[Journal | None, int]:
        """The journal that serves the deepest position beyond ``position``, and that position.

        anchors: nodes with journals on the path of ``tokens``.
        """
        best = None
        for node in reversed(anchors):
            rest = tokens[node.end :]
            for journal in node.journals:
                if journal.end <= position:
                    continue
                end = node.end + common_prefix(journal.tokens, rest)
                if end > position:
                    best, position = journal, end
        return best, position

    def _renew(self, node: Node) -> None:
        node.state_used_at = self.clock
        node.inflation = self.inflation

    def _set_ordinary(self, node: Node) -> None:
        """Somebody asks for the node's state: from here on it counts for those below."""
        if node.spare:
            node.spare = False
            self._rerank_below(node)

    def _rerank_below(self, node: Node) -> None:
        """The node's state, or a journal there, has begun to count, so a hit on the next ones
        below, or on those that the journal passes, saves less."""
        stack = list(node.children.values())
        while stack:
            below = stack.pop()
            counts = below.state_slot >= 0 and not below.spare
            if counts:
                self._states.put(below)
            if not counts or below.end < node.end + self._longest_journal:
                stack.extend(below.children.values())

    # ── writing ──────────────────────────────────────────────────────────────────────────────

    def insert(
        self,
        after: Node,
        tokens: Tokens,
        kv_slots: Indices,
        salt: int = 0,
        followed: bool = True,
        heals: bool = False,
    ) -> Inserted:
        assert len(tokens) == len(kv_slots)
        healed: list[tuple[int, Indices]] = []
        salt = salt if after is self.root else after.salt
        self.clock += 1
        now = time.monotonic()
        node, done = after, 0
        while done < len(tokens):
            child = node.children.get(child_key(salt, int(tokens[done])))
            if child is None:
                leaf = self._add_leaf(node, tokens[done:], kv_slots[done:], salt)
                leaf.used_time, leaf.followed = now, followed and node.followed
                return Inserted(len(tokens) - done, leaf, healed)
            child.used_at, child.used_time = self.clock, now
            shared = common_prefix(child.tokens, tokens[done : done + len(child.tokens)])
            above, node = node, child
            if shared < len(child.tokens):
                node = self._split(child, shared)
            if followed and heals and above.followed and not node.followed:
                node.followed = True
                healed.append((done, node.kv_slots))
            done += shared
        return Inserted(0, node, healed)

    def follow(self, node: Node, position: int) -> None:
        for part in node.ancestors():
            part.followed = True
            if part.end == position:
                part.state_followed = True

    def attach_state(
        self,
        node: Node,
        position: int,
        slot: int,
        kind: StateKind = "tail",
        followed: bool = True,
    ) -> bool:
        spare = kind == "spare"
        node = self._node_at(node, position)
        if node.state_slot >= 0:
            if not spare:
                self._set_ordinary(node)
            if not (self.draft_states and followed and not node.state_followed):
                return False
            self.state_slots.free([node.state_slot])
            node.state_slot, node.state_followed = slot, True
            return True
        self.clock += 1
        node.state_slot, node.state_followed = slot, followed
        node.kind, node.spare = kind, spare
        self._renew(node)
        self._states.put(node)
        if not spare:
            self._rerank_below(node)
        self.watcher.state_added(node)
        return True

    def attach_journal(self, node: Node, position: int, slot: int, end: int) -> bool:
        if end <= position:
            return False
        parts = [part for part in node.ancestors() if part.end > position and part.start < end]
        tokens = np.concatenate([part.tokens for part in reversed(parts)])
        first = parts[-1].start
        tokens = tokens[position - first : end - first]
        anchor = self._node_at(node, position)
        if anchor.state_slot < 0:
            return False
        for other in list(anchor.journals):
            shared = common_prefix(other.tokens, tokens)
            if shared == len(tokens):
                return False
            if shared == len(other.tokens):
                self._drop_journal(other)
        self.clock += 1
        self._longest_journal = max(self._longest_journal, len(tokens))
        bottom = next(part for part in node.ancestors() if part.start < end)
        journal = Journal(anchor, bottom, slot, tokens, self.clock)
        anchor.journals.append(journal)
        bottom.reaching.append(journal)
        self._journals.put(journal)
        if not anchor.spare:
            self._rerank_below(anchor)
        self.watcher.journal_added(journal)
        return True

    def _node_at(self, node: Node, position: int) -> Node:
        """The node of the prefix that ends at ``position``."""
        assert 0 < position <= node.end
        while node.start >= position:
            assert node.parent is not None
            node = node.parent
        return self._split(node, position - node.start) if node.end > position else node

    def lock(self, node: Node) -> None:
        for part in node.ancestors():
            if part.locks == 0:
                self.evictable_kv -= len(part.kv_slots)
            part.locks += 1
        self._leaves.remove(node)

    def unlock(self, node: Node) -> None:
        for part in node.ancestors():
            if part.locks == 0:
                raise RuntimeError(f"a prefix of {node.end} tokens is unlocked but was not locked")
            part.locks -= 1
            if part.locks == 0:
                self.evictable_kv += len(part.kv_slots)
        self._offer_leaf(node)

    def _offer_leaf(self, node: Node) -> None:
        """A node that has lost a lock or a child: it may be evicted if it was the last one."""
        if node.locks == 0 and not node.children and node is not self.root:
            self._leaves.put(node)

    def _add_leaf(self, parent: Node, tokens: Tokens, kv_slots: Indices, salt: int) -> Node:
        leaf = Node(parent, tokens.copy(), kv_slots, parent.end + len(tokens))
        leaf.salt = salt
        leaf.used_at = self.clock
        parent.children[leaf.key] = leaf
        self._leaves.remove(parent)
        self._leaves.put(leaf)
        self.num_kv += len(kv_slots)
        self.evictable_kv += len(kv_slots)
        self.watcher.leaf_added(leaf)
        return leaf

    def _split(self, node: Node, at: int) -> Node:
        """Cuts the edge after ``at`` tokens. ``node`` keeps the lower part; returns the upper."""
        assert node.parent is not None and 0 < at < len(node.tokens)
        upper = Node(node.parent, node.tokens[:at], node.kv_slots[:at], node.start + at)
        upper.salt = node.salt
        upper.locks, upper.pins, upper.followed = node.locks, node.pins, node.followed
        upper.used_at, upper.used_time = node.used_at, node.used_time
        node.parent.children[upper.key] = upper
        node.parent = upper
        node.tokens = node.tokens[at:]
        node.kv_slots = node.kv_slots[at:]
        upper.children[node.key] = node
        for journal in list(node.reaching):
            if journal.end <= upper.end:
                node.reaching.remove(journal)
                upper.reaching.append(journal)
                journal.bottom = upper
        self.watcher.split(upper, node)
        if node in self._leaves:  # its first slot is another now
            self._leaves.put(node)
        return upper

    # ── pinning ──────────────────────────────────────────────────────────────────────────────

    def pin(self, node: Node, positions: Sequence[int], until: float) -> bool:
        nodes = [self._node_at(node, position) for position in sorted(set(positions))]
        return self.pins.add(nodes, until)

    def unpin(self, now: float) -> None:
        self.pins.end(now)

    def _pin_ended(self, pin: Pin) -> None:
        """Those of its nodes that are still cached may be evicted sooner."""
        for part in pin.nodes:
            if part in self._states:
                self._states.put(part)
            for journal in part.journals:
                self._journals.put(journal)
        for part in pin.nodes[-1].ancestors():
            if part in self._leaves:
                self._leaves.put(part)

    # ── evicting ─────────────────────────────────────────────────────────────────────────────

    def evict_kv(self, count: int) -> int:
        freed = 0
        while freed < count and (leaf := self._leaves.first()) is not None:
            freed += len(leaf.kv_slots)
            self._remove_leaf(leaf)
        self.evicted_kv += freed
        return freed

    @staticmethod
    def _leaf_rank(leaf: Node) -> Rank:
        """The lowest is evicted first."""
        return leaf.pins > 0, leaf.state_slot >= 0, leaf.used_at, leaf.kv_slots[0]

    def evict_states(self, count: int, keep: Collection[int] = ()) -> int:
        freed, kept = 0, []
        while freed < count and (node := self._states.first()) is not None:
            if node.state_slot in keep:
                kept.append(node)
                self._states.remove(node)
                continue
            if not node.spare:
                self.inflation = max(self.inflation, self._score(node))
            self._drop_state(node)
            freed += 1
        for node in kept:
            self._states.put(node)
        return freed

    def _state_rank(self, node: Node) -> Rank:
        """The lowest is evicted first."""
        score = 0 if node.spare else self._score(node)
        return node.state_pins > 0, not node.spare, score, node.state_used_at, node.end

    def _score(self, node: Node) -> int:
        """Inflation plus the tokens that a hit here saves over what shallower states give, journals
        included: of theirs, those count that begin as this prefix goes on."""
        reach = max((journal.end for journal in node.journals), default=node.end)
        above, below = 0, node
        for part in node.ancestors():
            if part is not node and part.state_slot >= 0 and not part.spare:
                above = max(above, part.end)
                for journal in part.journals:
                    if journal.tokens[0] == below.tokens[0]:
                        above = max(above, min(journal.end, node.end))
            if above > 0 and part.start + self._longest_journal <= above:
                break
            below = part
        return node.inflation + reach - above

    def evict_journal(self, keep: Collection[int] = ()) -> Fold | None:
        kept: list[Journal] = []
        fold = None
        while fold is None and (journal := self._journals.first()) is not None:
            if journal.node.state_slot not in keep:
                fold = self._fold(journal)
            if fold is None:
                kept.append(journal)
                self._journals.remove(journal)
        for journal in kept:
            self._journals.put(journal)
        return fold

    def _fold(self, journal: Journal) -> Fold | None:
        """The state that the journal begins at moves to where it was last hit, since prompts may
        part there, or to its end; and the journal goes. None if it cannot: others begin there, it
        is pinned, or there is a state already."""
        anchor = journal.node
        if len(anchor.journals) > 1 or anchor.state_pins:
            return None
        end = self._node_at(journal.bottom, journal.hit_at or journal.end)
        if end.state_slot >= 0 and journal.hit_at:
            end = self._node_at(journal.bottom, journal.end)
        if end.state_slot >= 0:
            return None
        fold = Fold(journal.slot, anchor.end, end.end, anchor.state_slot)
        self._drop_journal(journal)
        self._states.remove(anchor)
        end.state_slot, anchor.state_slot = anchor.state_slot, -1
        end.kind, end.spare, anchor.spare = anchor.kind, anchor.spare, False
        end.state_followed = anchor.state_followed
        end.state_used_at, end.inflation = anchor.state_used_at, anchor.inflation
        self._states.put(end)
        if not end.spare:
            self._rerank_below(end)
        self.watcher.state_dropped(anchor)
        self.watcher.state_added(end)
        self.evicted_journals += 1
        return fold

    @staticmethod
    def _journal_rank(journal: Journal) -> Rank:
        """The lowest is evicted first."""
        return journal.node.state_pins > 0, not journal.node.spare, journal.used_at

    def _drop_journal(self, journal: Journal) -> None:
        self._journals.remove(journal)
        journal.node.journals.remove(journal)
        journal.bottom.reaching.remove(journal)
        self.journal_slots.free([journal.slot])
        if journal.node in self._states:  # a hit there saves less now
            self._states.put(journal.node)
        self.watcher.journal_dropped(journal)

    def _shorten_journals(self, leaf: Node) -> None:
        """The leaf's KV is about to go: what reaches there reaches to its parent's end."""
        assert leaf.parent is not None
        for journal in list(leaf.reaching):
            if journal.node.end >= leaf.start:
                self._drop_journal(journal)
                continue
            self.watcher.journal_dropped(journal)
            leaf.reaching.remove(journal)
            journal.tokens = journal.tokens[: leaf.start - journal.node.end]
            if journal.hit_at > journal.end:
                journal.hit_at = 0
            journal.bottom = leaf.parent
            leaf.parent.reaching.append(journal)
            self._states.put(journal.node)
            self.watcher.journal_added(journal)

    def _drop_state(self, node: Node) -> None:
        for journal in list(node.journals):
            self._drop_journal(journal)
        self.state_slots.free([self.take_state(node)])
        self.evicted_states += 1

    def take_state(self, node: Node) -> int:
        assert node.state_slot >= 0 and not node.journals
        taken, node.state_slot = node.state_slot, -1
        node.spare = False
        self._states.remove(node)
        self.watcher.state_dropped(node)
        if node in self._leaves:  # without a state it is evicted sooner
            self._leaves.put(node)
        return taken

    def _remove_leaf(self, leaf: Node) -> None:
        assert leaf.parent is not None and not leaf.children and leaf.locks == 0
        self._leaves.remove(leaf)
        if leaf.state_slot >= 0:
            self._drop_state(leaf)
        self._shorten_journals(leaf)
        self.kv.free(leaf.kv_slots)
        self.num_kv -= len(leaf.kv_slots)
        self.evictable_kv -= len(leaf.kv_slots)
        del leaf.parent.children[leaf.key]
        self.watcher.leaf_removed(leaf)
        self._offer_leaf(leaf.parent)

    def flush(self) -> None:
        if self.evictable_kv != self.num_kv:
            locked = self.num_kv - self.evictable_kv
            raise RuntimeError(f"cannot flush: {locked} of {self.num_kv} cached tokens are in use")
        for node in list(self._nodes()):
            self.kv.free(node.kv_slots)
            if node.state_slot >= 0:
                self.state_slots.free([node.state_slot])
            self.journal_slots.free(journal.slot for journal in node.journals)
        self._reset()
        self.watcher.cleared()

    # ── checking ─────────────────────────────────────────────────────────────────────────────

    def _nodes(self) -> Iterator[Node]:
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            yield node

    def check_integrity(self) -> None:
        num_kv = evictable = 0
        leaves, with_state, journals, reaching = set(), set(), set(), set()
        for node in self._nodes():
            assert node.parent is not None
            right = (
                len(node.tokens) == len(node.kv_slots) > 0
                and node.start == node.parent.end
                and node.parent.children.get(node.key) is node
                and node.locks >= sum(child.locks for child in node.children.values())
                and node.pins >= sum(child.pins for child in node.children.values())
                and node.salt == (node.salt if node.parent is self.root else node.parent.salt)
                and node.followed <= node.parent.followed
            )
            if not right:
                raise RuntimeError(
                    f"radix node [{node.start}, {node.end}): {len(node.tokens)} tokens, "
                    f"{len(node.kv_slots)} KV slots, {node.locks} locks, parent ends at "
                    f"{node.parent.end}"
                )
            num_kv += len(node.kv_slots)
            evictable += len(node.kv_slots) if node.locks == 0 else 0
            if not node.children and node.locks == 0:
                leaves.add(node)
            if node.state_slot >= 0:
                with_state.add(node)
            journals.update(node.journals)
            if any(each.node is not node or node.state_slot < 0 for each in node.journals):
                raise RuntimeError(f"radix node [{node.start}, {node.end}): a journal of no state")
            reaching.update(node.reaching)
            if any(
                each.bottom is not node or not node.start < each.end <= node.end
                for each in node.reaching
            ):
                raise RuntimeError(
                    f"radix node [{node.start}, {node.end}): a journal ends elsewhere"
                )
        if not journals == reaching == set(self._journals):
            raise RuntimeError(
                f"radix cache: {len(journals)} journals in the tree, {len(self._journals)} counted"
            )
        found = (num_kv, evictable, len(leaves), len(with_state))
        counted = (self.num_kv, self.evictable_kv, len(self._leaves), len(self._states))
        if found != counted or leaves != set(self._leaves) or with_state != set(self._states):
            raise RuntimeError(
                "radix cache: (KV slots, evictable KV slots, leaves without locks, state slots) "
                f"are {found} in the tree but {counted} by its counters"
            )
        if problem := self.pins.problem(self._nodes()):
            raise RuntimeError(f"radix cache, pins: {problem}")
        orders: dict[str, LazyHeap] = {
            "leaves": self._leaves,
            "states": self._states,
            "journals": self._journals,
        }
        for name, order in orders.items():
            if problem := order.problem():
                raise RuntimeError(f"radix cache, order of {name}: {problem}")
