"""The saved journals that are cached: rows of the tokens that follow a state."""

from collections.abc import Collection, Sequence

import numpy as np

from mamba_eagle.cache.allocator import SlotAllocator
from mamba_eagle.cache.node import Journal, Node, Tokens, common_prefix
from mamba_eagle.cache.order import LazyHeap, Rank
from mamba_eagle.cache.states import CachedStates
from mamba_eagle.cache.tree import PrefixTree
from mamba_eagle.message import AnchorMove, JournalPart


class CachedJournals:
    """Owns the journal slots of the journals in the tree.

    A journal hangs on the node of the state that it begins at, its anchor, with tokens of its own.
    It is shortened when KV under it is evicted, and leaves with its state, or before, least
    recently used first.
    """

    def __init__(self, tree: PrefixTree, states: CachedStates, slots: SlotAllocator) -> None:
        self.tree, self.states, self.slots = tree, states, slots
        self.order = LazyHeap(self._rank)

    def attach(self, node: Node, position: int, slot: int, end: int) -> bool:
        """As ``RadixCache.attach_journal``."""
        if end <= position:
            return False
        parts = [part for part in node.ancestors() if part.end > position and part.start < end]
        tokens = np.concatenate([part.tokens for part in reversed(parts)])
        first = parts[-1].start
        tokens = tokens[position - first : end - first]
        anchor = self.tree.node_at(node, position)
        if anchor.state_slot < 0:
            return False
        for other in list(anchor.journals):
            shared = common_prefix(other.tokens, tokens)
            if shared == len(tokens):
                return False
            if shared == len(other.tokens):
                self.drop(other)
        self.tree.clock += 1
        bottom = next(part for part in node.ancestors() if part.start < end)
        journal = Journal(anchor, bottom, slot, tokens, self.tree.clock)
        anchor.journals.append(journal)
        bottom.reaching.append(journal)
        self.order.put(journal)
        self.states.journal_added(anchor, len(tokens))
        self.tree.watcher.added(journal)
        return True

    def best(
        self, anchors: Sequence[Node], tokens: Tokens, position: int
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

    def drop(self, journal: Journal) -> None:
        self.order.remove(journal)
        journal.node.journals.remove(journal)
        journal.bottom.reaching.remove(journal)
        self.slots.free([journal.slot])
        self.states.order.update(journal.node)  # a hit there saves less now
        self.tree.watcher.dropped(journal)

    def shorten(self, leaf: Node) -> None:
        """The leaf's KV is about to go: what reaches there reaches to its parent's end."""
        assert leaf.parent is not None
        for journal in list(leaf.reaching):
            if journal.node.end >= leaf.start:
                self.drop(journal)
                continue
            self.tree.watcher.dropped(journal)
            leaf.reaching.remove(journal)
            journal.tokens = journal.tokens[: leaf.start - journal.node.end]
            if journal.hit_at > journal.end:
                journal.hit_at = 0
            journal.bottom = leaf.parent
            leaf.parent.reaching.append(journal)
            self.states.order.put(journal.node)
            self.tree.watcher.added(journal)

    def evict(self, keep: Collection[int]) -> AnchorMove | None:
        """Frees the journal slot of the journal that is least recently used, but for those that
        begin at a state in ``keep``, and at ones that cannot be moved. The state moves to where the
        journal was last hit, or to its end: by the move that is returned, which is to be done
        before the journal slot is written again.

        Returns None, and nothing is freed, if there is no such journal."""
        journal = self.order.first(
            lambda each: each.node.state_slot in keep or self._goal(each) is None
        )
        if journal is None:
            return None
        anchor, goal = journal.node, self._goal(journal)
        assert goal is not None
        rows = JournalPart(journal.slot, anchor.end, goal.end)
        move = AnchorMove(rows, anchor.state_slot)
        self.drop(journal)
        self.states.move(anchor, goal)
        return move

    def _goal(self, journal: Journal) -> Node | None:
        """Where the state that the journal begins at moves when the journal goes: to where it was
        last hit, since prompts may part there, or to its end. None if it cannot: others begin
        there, it is pinned, or there is a state already."""
        if len(journal.node.journals) > 1 or journal.node.state_pins:
            return None
        goal = self.tree.node_at(journal.bottom, journal.hit_at or journal.end)
        if goal.state_slot >= 0 and journal.hit_at:
            goal = self.tree.node_at(journal.bottom, journal.end)
        return goal if goal.state_slot < 0 else None

    @staticmethod
    def _rank(journal: Journal) -> Rank:
        """The lowest is evicted first."""
        return journal.node.state_pins > 0, not journal.node.spare, journal.used_at

    def check_integrity(self) -> None:
        """Raises: RuntimeError with numbers if the order is not that of the tree's journals."""
        journals, reaching = set(), set()
        for node in self.tree.nodes():
            where = f"radix node [{node.start}, {node.end})"
            journals.update(node.journals)
            if any(each.node is not node or node.state_slot < 0 for each in node.journals):
                raise RuntimeError(f"{where}: a journal of no state")
            reaching.update(node.reaching)
            if any(
                each.bottom is not node or not node.start < each.end <= node.end
                for each in node.reaching
            ):
                raise RuntimeError(f"{where}: a journal ends elsewhere")
        if not journals == reaching == set(self.order):
            raise RuntimeError(
                f"radix cache: {len(journals)} journals in the tree, {len(self.order)} counted"
            )
        if problem := self.order.problem():
            raise RuntimeError(f"radix cache, order of journals: {problem}")
