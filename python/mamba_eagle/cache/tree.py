"""Which token prefixes are cached, and the KV slots of their tokens."""

import time
from collections.abc import Iterator

from mamba_eagle.cache.allocator import SlotAllocator
from mamba_eagle.cache.node import (
    CacheWatcher,
    Inserted,
    Node,
    Tokens,
    as_tokens,
    child_key,
    common_prefix,
)
from mamba_eagle.cache.order import LazyHeap, Rank
from mamba_eagle.message.indices import Indices, indices

TOKEN_BYTES = 4  # of Tokens


class PrefixTree:
    """One tree over token ids, page size 1. Owns its nodes, with one KV slot per token.

    A request locks the prefix that it reads; the rest may be evicted, leaf by leaf. States and
    journals hang on nodes but belong to CachedStates and CachedJournals. The tree keeps them in
    place when it cuts an edge; a leaf must have lost its own before it is removed.
    """

    def __init__(self, kv: SlotAllocator) -> None:
        """kv: the pool that slots are given back to."""
        self.kv = kv
        self.watcher = CacheWatcher()
        self.reset()

    def reset(self) -> None:
        """Forgets all nodes. Does not free their slots."""
        self.root = Node(None, as_tokens([]), indices(), 0)
        self.num_kv = 0  # KV slots owned
        self.num_nodes = 0  # but the root
        self.evictable_kv = 0  # KV slots owned and not locked
        self.clock = 0  # counts matches, inserts, and what is attached
        self.num_walked = 0  # nodes, by all ``walk``s: what these take
        self.leaves = LazyHeap(_leaf_rank)  # those that are not locked

    def nodes(self) -> Iterator[Node]:
        """All but the root."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            yield node

    # ── reading ──────────────────────────────────────────────────────────────────────────────

    def walk(self, tokens: Tokens, salt: int) -> tuple[list[Node], int]:
        """The nodes along ``tokens``, the last perhaps in part, and how many tokens they have in
        common with it. Counts as a use."""
        self.clock += 1
        now = time.monotonic()
        path: list[Node] = []
        node, length = self.root, 0
        data = tokens.tobytes()  # comparing bytes takes a quarter of the time
        # nodes of one token are equal by their keys
        while length < len(tokens):
            child = node.children.get(child_key(salt, int(tokens[length])))
            if child is None:
                break
            child.used_at, child.used_time = self.clock, now
            path.append(child)
            end = child.end
            own = data[length * TOKEN_BYTES : end * TOKEN_BYTES]
            if end - length > 1 and own != child.tokens.tobytes():
                length += common_prefix(child.tokens, tokens[length:end])
                break
            node, length = child, end
        self.num_walked += len(path)
        return path, length

    def node_at(self, node: Node, position: int) -> Node:
        """The node of the prefix that ends at ``position``; an edge is cut where needed."""
        assert 0 < position <= node.end
        while node.start >= position:
            assert node.parent is not None
            node = node.parent
        return self._split(node, position - node.start) if node.end > position else node

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
        """Adds ``tokens`` with one KV slot each, after the prefix that ends at ``after``, which is
        locked by the caller or the root. The cache takes the slots of tokens that it lacks.

        salt: of the prefix; it is looked at after the root only. followed: the drafter has
        processed the prefix up to the last of these tokens. heals: and the caller copies its keys
        and values to the slots ``Inserted.healed``."""
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
            size = len(child.tokens)
            shared = common_prefix(child.tokens, tokens[done : done + size]) if size > 1 else 1
            above, node = node, child
            if shared < size:
                node = self._split(child, shared)
            if followed and heals and above.followed and not node.followed:
                node.followed = True
                healed.append((done, node.kv_slots))
            done += shared
        return Inserted(0, node, healed)

    def follow(self, node: Node, position: int) -> None:
        """The drafter has processed the prefix that ends at ``node``. If it has states of its own,
        it leaves the one at ``position`` in the state slot that the cache has there; -1: none."""
        for part in node.ancestors():
            part.followed = True
            if part.end == position:
                part.state_followed = True

    def lock(self, node: Node) -> None:
        """Protects the KV of the node's prefix from eviction. Its states may still be evicted."""
        for part in node.ancestors():
            if part.locks == 0:
                self.evictable_kv -= len(part.kv_slots)
            part.locks += 1
        self.leaves.remove(node)

    def lock_common(self, tokens: Tokens, salt: int) -> tuple[Node, int]:
        """Locks what is cached of these tokens: its node, and how many there are."""
        path, length = self.walk(tokens, salt)
        node = self.node_at(path[-1], length) if length else self.root
        self.lock(node)
        return node, length

    def unlock(self, node: Node) -> None:
        """Undoes one ``lock``."""
        for part in node.ancestors():
            if part.locks == 0:
                raise RuntimeError(f"a prefix of {node.end} tokens is unlocked but was not locked")
            part.locks -= 1
            if part.locks == 0:
                self.evictable_kv += len(part.kv_slots)
        self._offer_leaf(node)

    def remove_leaf(self, leaf: Node) -> None:
        """Frees its KV slots. It is not locked, and nothing hangs on it."""
        assert leaf.parent is not None and not leaf.children and leaf.locks == 0
        self.leaves.remove(leaf)
        self.num_nodes -= 1
        self.kv.free(leaf.kv_slots)
        self.num_kv -= len(leaf.kv_slots)
        self.evictable_kv -= len(leaf.kv_slots)
        del leaf.parent.children[leaf.key]
        self.watcher.leaf_removed(leaf)
        self._offer_leaf(leaf.parent)

    def _offer_leaf(self, node: Node) -> None:
        """A node that has lost a lock or a child: it may be evicted if it was the last one."""
        if node.locks == 0 and not node.children and node is not self.root:
            self.leaves.put(node)

    def _add_leaf(self, parent: Node, tokens: Tokens, kv_slots: Indices, salt: int) -> Node:
        end = parent.end + len(tokens)
        leaf = Node(parent, tokens.copy(), kv_slots, end, salt=salt, used_at=self.clock)
        parent.children[leaf.key] = leaf
        self.num_nodes += 1
        self.leaves.remove(parent)
        self.leaves.put(leaf)
        self.num_kv += len(kv_slots)
        self.evictable_kv += len(kv_slots)
        self.watcher.leaf_added(leaf)
        return leaf

    def _split(self, node: Node, at: int) -> Node:
        """Cuts the edge after ``at`` tokens. ``node`` keeps the lower part; returns the upper."""
        upper = node.cut(at)
        self.num_nodes += 1
        self.watcher.split(upper, node)
        self.leaves.update(node)  # its first slot is another now
        return upper

    # ── checking ─────────────────────────────────────────────────────────────────────────────

    def check_integrity(self) -> None:
        """Raises: RuntimeError with numbers if the counters disagree with the tree."""
        num_kv = num_nodes = evictable = 0
        leaves = set()
        for node in self.nodes():
            _check(node)
            num_kv += len(node.kv_slots)
            num_nodes += 1
            evictable += len(node.kv_slots) if node.locks == 0 else 0
            if not node.children and node.locks == 0:
                leaves.add(node)
        found = (num_kv, num_nodes, evictable, len(leaves))
        counted = (self.num_kv, self.num_nodes, self.evictable_kv, len(self.leaves))
        if found != counted or leaves != set(self.leaves):
            raise RuntimeError(
                "radix cache: (KV slots, nodes, evictable KV slots, leaves without locks) are "
                f"{found} in the tree but {counted} by its counters"
            )
        if problem := self.leaves.problem():
            raise RuntimeError(f"radix cache, order of leaves: {problem}")


def _leaf_rank(leaf: Node) -> Rank:
    """The lowest is evicted first: without a state, since no hit can end there; then the least
    recently used."""
    return leaf.pins > 0, leaf.state_slot >= 0, leaf.used_at, leaf.kv_slots[0]


def _check(node: Node) -> None:
    """Raises: RuntimeError if the node and its parent do not fit."""
    assert node.parent is not None
    right = (
        len(node.tokens) == len(node.kv_slots) > 0
        and node.start == node.parent.end
        and node.parent.children.get(node.key) is node
        and node.locks >= sum(child.locks for child in node.children.values())
        and node.pins >= sum(child.pins for child in node.children.values())
        and node.salt == (node.salt if node.parent.parent is None else node.parent.salt)
        and node.followed <= node.parent.followed
    )
    if not right:
        raise RuntimeError(
            f"radix node [{node.start}, {node.end}): {len(node.tokens)} tokens, "
            f"{len(node.kv_slots)} KV slots, {node.locks} locks, parent ends at "
            f"{node.parent.end}"
        )
