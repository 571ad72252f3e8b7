"""The recurrent states that are cached, and which of them is worth least."""

from collections.abc import Callable, Collection

from mamba_eagle.cache.allocator import SlotAllocator
from mamba_eagle.cache.node import SPARE_KINDS, Node, StateKind
from mamba_eagle.cache.order import LazyHeap, Rank
from mamba_eagle.cache.tree import PrefixTree

MIN_BELOW = 64  # nodes below a state, at least, that are looked at one by one


class CachedStates:
    """Owns the state slots on the tree's nodes: each has the state after its node's last token.

    States differ in what a hit on them saves: the tokens between this state and the next shallower
    one, from which prefill would start otherwise. GreedyDual evicts by recency and by value at the
    same time (N. Young, "The k-server dual and loose competitiveness for paging", Algorithmica 11,
    1994):

    - A state's score is ``inflation + saved``, where ``saved`` is that number of tokens, and
      ``inflation`` is the shelf's at the time when the state was stored or last hit.
    - The state with the lowest score is evicted, and the shelf's inflation becomes that score.

    Because the inflation only grows, a state that is used now starts higher than one of the same
    value used earlier. So states of equal value are evicted in LRU order, cheap ones first, and a
    valuable one that no one uses is evicted as well once the inflation has passed its score.

    *Spare* states, which were stored in case a later prompt branches off there, have shown no value
    so far: they are evicted before all others, least recent first and a document's last, and do not
    count as the next shallower state. With its first hit a spare state becomes an ordinary one.
    """

    def __init__(self, tree: PrefixTree, slots: SlotAllocator, draft_states: bool = False) -> None:
        """draft_states: the drafter has states of its own, in the same state slots."""
        self.tree, self.slots, self.draft_states = tree, slots, draft_states
        self.order = LazyHeap(self._rank)  # nodes with a state
        self.inflation = 0  # score of the last state evicted: tokens
        self.longest_journal = 0  # tokens, of all so far: what a journal may reach below its state

    def use(self, node: Node) -> None:
        """A request continues from there."""
        self._renew(node)
        self._set_ordinary(node)

    def attach(self, node: Node, slot: int, kind: StateKind, followed: bool) -> bool:
        """As ``RadixCache.attach_state``, at the end of ``node``."""
        spare = kind in SPARE_KINDS
        if node.state_slot >= 0:
            if not spare:
                self._set_ordinary(node)
            if not (self.draft_states and followed and not node.state_followed):
                return False
            self.slots.free([node.state_slot])
            node.state_slot, node.state_followed = slot, True
            return True
        self.tree.clock += 1
        node.state_slot, node.state_followed = slot, followed
        node.kind, node.spare = kind, spare
        self._renew(node)
        self._added(node)
        return True

    def take(self, node: Node) -> int:
        """The node's state slot, the caller's from now on. No journal begins there."""
        assert node.state_slot >= 0 and not node.journals
        taken, node.state_slot = node.state_slot, -1
        node.spare = False
        self.order.remove(node)
        self.tree.watcher.dropped(node)
        self.tree.leaves.update(node)  # without a state it is evicted sooner
        return taken

    def drop(self, node: Node) -> None:
        self.slots.free([self.take(node)])

    def move(self, node: Node, end: Node) -> None:
        """The state at ``node`` becomes the one at ``end``, which has none."""
        end.kind, end.spare, end.state_followed = node.kind, node.spare, node.state_followed
        end.state_used_at, end.inflation = node.state_used_at, node.inflation
        end.state_slot = self.take(node)
        self._added(end)

    def least(self, keep: Collection[int]) -> Node | None:
        """The node whose state is to be evicted, none of the state slots ``keep``; its score
        becomes the inflation."""
        node = self.order.first(lambda node: node.state_slot in keep)
        if node is not None and not node.spare:
            self.inflation = max(self.inflation, self.score(node))
        return node

    def least_spare(self, unless: Callable[[Node], bool]) -> Node | None:
        """The node whose state is the spare one to be evicted; None if ``unless`` holds for all."""
        node = self.order.first(lambda node: node.spare and unless(node))
        return node if node is not None and node.spare else None

    def journal_added(self, anchor: Node, size: int) -> None:
        """One of ``size`` tokens begins at the state there."""
        self.longest_journal = max(self.longest_journal, size)
        if not anchor.spare:
            self._rerank_below(anchor)

    def _added(self, node: Node) -> None:
        self.order.put(node)
        if not node.spare:
            self._rerank_below(node)
        self.tree.watcher.added(node)

    def _renew(self, node: Node) -> None:
        node.state_used_at = self.tree.clock
        node.inflation = self.inflation

    def _set_ordinary(self, node: Node) -> None:
        """A request asks for the node's state: from here on it counts for those below."""
        if node.spare:
            node.spare = False
            self._rerank_below(node)

    def _rerank_below(self, node: Node) -> None:
        """The node's state, or a journal there, has begun to count, so a hit on the next ones
        below, or on those that the journal passes, saves less. Where there are far more nodes
        below than states in all, these are all looked at."""
        stack, left = [node], MIN_BELOW + 2 * len(self.order)
        while stack:
            above = stack.pop()
            left -= len(above.children)
            if left < 0:
                for each in list(self.order):
                    self.order.put(each)
                return
            for below in above.children.values():
                counts = below.state_slot >= 0 and not below.spare
                if counts:
                    self.order.put(below)
                if not counts or below.end < node.end + self.longest_journal:
                    stack.append(below)

    def _rank(self, node: Node) -> Rank:
        """The lowest is evicted first."""
        worth, score = 2, 0
        if node.spare:
            worth = int(node.kind == "document")
        else:
            score = self.score(node)
        return node.state_pins > 0, worth, score, node.state_used_at, node.end

    def score(self, node: Node) -> int:
        """Inflation plus the tokens that a hit here saves over what shallower states give, journals
        included: of theirs, those count that begin as this prefix goes on."""
        above, below = 0, node
        for part in node.ancestors():
            if part is not node and part.state_slot >= 0 and not part.spare:
                above = max(above, part.end)
                for journal in part.journals:
                    if journal.tokens[0] == below.tokens[0]:
                        above = max(above, min(journal.end, node.end))
            if above > 0 and part.start + self.longest_journal <= above:
                break
            below = part
        return node.inflation + node.deepest - above

    def check_integrity(self) -> None:
        """Raises: RuntimeError with numbers if the order is not that of the tree's states."""
        with_state = {node for node in self.tree.nodes() if node.state_slot >= 0}
        if with_state != set(self.order):
            raise RuntimeError(
                f"radix cache: {len(with_state)} states in the tree, {len(self.order)} counted"
            )
        if problem := self.order.problem():
            raise RuntimeError(f"radix cache, order of states: {problem}")
