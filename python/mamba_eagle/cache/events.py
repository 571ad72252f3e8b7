"""Which blocks of tokens a hit can reach, as events for routers outside.

A block is ``BLOCK`` tokens of a prefix, and its hash covers all tokens before it. KV alone makes no
hit in a model with recurrent layers, so a block counts as *reachable* only if a state, or a
journal, ends at its end or behind it:

    tokens    0 ── 16 ── 32 ── 48 ── 64 ── 80 ── 96          KV is cached up to 100
    state                      48
    journal                    └─────────── 85               rows up to 85
    blocks    [ 1 ][ 2 ][ 3 ][ 4 ][ 5 ]                      reachable: 5 of 6

``ReachableBlocks`` watches a RadixCache and counts, for each block, the states and journals whose
last whole block it is, and the reachable blocks that follow it. So the work of a change is that of
the blocks that it changes, plus hashing tokens that are new.
"""

from hashlib import blake2b
from typing import NamedTuple

import msgspec
import numpy as np

from mamba_eagle.cache.node import CacheWatcher, Journal, Node
from mamba_eagle.cache.radix import RadixCache
from mamba_eagle.events_config import BLOCK

MEDIUM = "GPU"  # what routers expect of the fastest tier


class Event(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """In the wire format of vLLM's KV events: a map with its type, ``type``."""


class BlockStored(Event):
    """Blocks that follow each other can now be reached."""

    block_hashes: list[int]
    parent_block_hash: int | None  # of the block before them; None: they begin the prefix
    token_ids: list[int]  # of all of them
    block_size: int
    lora_id: int | None = None
    medium: str | None = MEDIUM
    lora_name: str | None = None


class BlockRemoved(Event):
    """No hit reaches these blocks any more."""

    block_hashes: list[int]
    medium: str | None = MEDIUM


class AllBlocksCleared(Event):
    """Forget everything that was said before."""


AnyEvent = BlockStored | BlockRemoved | AllBlocksCleared


class Block(NamedTuple):
    hash: int
    parent: int | None
    tokens: list[int]


def block_hash(parent: int | None, salt: int, tokens: np.ndarray) -> int:
    """Of a block of int32 tokens: 63 bits that depend on all tokens before it and on the salt of
    the prefix, and on nothing of this process."""
    before = salt if parent is None else parent
    data = before.to_bytes(17, "little") + tokens.astype("<i4").tobytes()
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "big") >> 1


class ReachableBlocks(CacheWatcher):
    """``drain`` returns what has changed since the last call."""

    def __init__(self, cache: RadixCache, block: int = BLOCK) -> None:
        """cache: an empty one, whose only watcher this becomes. block: tokens per block."""
        assert cache.num_kv == 0
        cache.watcher, self.block = self, block
        self._reset()
        self._changes: list[AnyEvent] = []

    def _reset(self) -> None:
        self._of_node: dict[Node, list[Block]] = {}  # blocks whose last token is of its edge
        self._known: dict[int, Block] = {}  # all of them, by hash, each after the one before it
        self._uses: dict[int, int] = {}  # of reachable blocks: what ends there, what follows them
        self._ends: dict[Node | Journal, int | None] = {}  # last whole block of states and journals

    def drain(self) -> list[AnyEvent]:
        changes, self._changes = self._changes, []
        return changes

    def blocks(self) -> list[Block]:
        """All that can be reached, each after the one before it."""
        return [block for own, block in self._known.items() if own in self._uses]

    # ── what the cache tells ─────────────────────────────────────────────────────────────────

    def leaf_added(self, leaf: Node) -> None:
        first = leaf.start // self.block * self.block  # where the first block that ends here begins
        whole = leaf.end // self.block * self.block
        made = self._of_node[leaf] = []
        if whole <= leaf.start:
            return
        tokens, parent = self._tokens(leaf, first), self._last_block(leaf.parent, first)
        for begin in range(0, whole - first, self.block):
            own = tokens[begin : begin + self.block]
            block = Block(block_hash(parent, leaf.salt, own), parent, own.tolist())
            made.append(block)
            self._known[block.hash] = block
            parent = block.hash

    def split(self, upper: Node, lower: Node) -> None:
        blocks = self._of_node[lower]
        count = upper.end // self.block - upper.start // self.block
        self._of_node[upper], self._of_node[lower] = blocks[:count], blocks[count:]

    def leaf_removed(self, leaf: Node) -> None:
        for block in self._of_node.pop(leaf):
            del self._known[block.hash]

    def added(self, what: Node | Journal) -> None:
        bottom = what if isinstance(what, Node) else what.bottom
        block = self._ends[what] = self._last_block(bottom, what.end)
        new: list[Block] = []
        while block is not None:
            uses = self._uses[block] = self._uses.get(block, 0) + 1
            if uses > 1:
                break
            new.append(self._known[block])
            block = new[-1].parent
        if new:
            new.reverse()
            tokens = [token for each in new for token in each.tokens]
            hashes = [each.hash for each in new]
            self._changes.append(BlockStored(hashes, new[0].parent, tokens, self.block))

    def dropped(self, what: Node | Journal) -> None:
        block, gone = self._ends.pop(what), []
        while block is not None:
            self._uses[block] -= 1
            if self._uses[block]:
                break
            del self._uses[block]
            gone.append(block)
            block = self._known[block].parent
        if gone:
            self._changes.append(BlockRemoved(gone))

    def cleared(self) -> None:
        self._reset()
        self._changes = [AllBlocksCleared()]

    # ── blocks ───────────────────────────────────────────────────────────────────────────────

    @staticmethod
    def _tokens(node: Node, start: int) -> np.ndarray:
        """Tokens [start, node.end) of the node's prefix."""
        parts: list[np.ndarray] = []
        for part in node.ancestors():
            parts.append(part.tokens[max(0, start - part.start) :])
            if part.start <= start:
                break
        return np.concatenate(parts[::-1])

    def _last_block(self, node: Node | None, end: int) -> int | None:
        """The last whole block of the first ``end`` tokens of the node's prefix."""
        last = end // self.block * self.block
        if last == 0:
            return None
        while node is not None and node.start >= last:
            node = node.parent
        assert node is not None
        return self._of_node[node][last // self.block - node.start // self.block - 1].hash
