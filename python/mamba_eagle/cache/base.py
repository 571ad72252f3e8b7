"""What a prefix cache is to the scheduler; and the one that caches nothing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int64]


def as_tokens(token_ids: list[int]) -> Tokens:
    return np.asarray(token_ids, dtype=np.int64)


def common_prefix(a: Tokens, b: Tokens) -> int:
    """How many first tokens are the same."""
    size = min(len(a), len(b))
    if size == 0 or a[0] != b[0]:
        return 0
    differ = a[:size] != b[:size]
    first = int(differ.argmax())
    return first if differ[first] else size


class Node:
    """Tokens [start, end) of a prefix. The object stands for position ``end``: when its edge is
    split it keeps the lower part, so a handle to it stays right."""

    __slots__ = (
        "state_slot",
        "children",
        "end",
        "hit_at",
        "kv_slots",
        "locks",
        "parent",
        "spare",
        "tokens",
        "used_at",
        "worth",
    )

    def __init__(self, parent: Node | None, tokens: Tokens, kv_slots: list[int], end: int) -> None:
        self.parent = parent
        self.children: dict[int, Node] = {}  # first token of the child's edge -> child
        self.tokens = tokens
        self.kv_slots = kv_slots
        self.end = end
        self.locks = 0  # requests whose prefix runs through here
        self.used_at = 0  # the cache's clock when last on a matched path
        self.state_slot = -1
        self.spare = False  # placed on the way, and not hit so far
        self.hit_at = 0  # the clock when the state slot was placed or last hit …
        self.worth = 0  # … and the cache's ``inflation`` then

    @property
    def start(self) -> int:
        return self.end - len(self.kv_slots)

    def ancestors(self) -> Iterator[Node]:
        """This node and those above it, without the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent


class Match(NamedTuple):
    """What the cache has of a prompt."""

    length: int  # tokens whose KV is cached
    position: int  # tokens a request need not run: a state slot is there; 0 if there is none
    state_slot: int  # its slot; -1 if position is 0
    kv_slots: list[int]  # of [0, position); they stay the cache's
    node: Node  # ends at ``position``; lock it for as long as these slots are used


class Inserted(NamedTuple):
    """What became of the slots given."""

    taken: int  # the cache now owns the last ``taken`` of them; the others stay the caller's
    node: Node  # ends after the last token given


class PrefixCache(ABC):
    """The contract between the scheduler and what it reuses.

    The cache owns the slots of its nodes and gives them back to the allocators when it evicts.
    Plans run in order, so a slot may be evicted as soon as the plan that last uses it is sent;
    only KV slots which a *running* request reads need a lock.
    """

    stores: bool  # whether anything inserted is ever found again
    root: Node

    @abstractmethod
    def match(self, tokens: Tokens, limit: int) -> Match:
        """The deepest state slot at a position <= ``limit``. Renews recency; owns nothing."""

    @abstractmethod
    def insert(self, after: Node, tokens: Tokens, kv_slots: list[int]) -> Inserted:
        """Adds ``tokens``, which follow the prefix of ``after`` (locked by the caller, or the
        root), with one KV slot each. The cache takes the slots of tokens that it lacks."""

    @abstractmethod
    def attach_state(self, node: Node, position: int, slot: int, spare: bool = False) -> bool:
        """Gives the cache the state after ``position`` tokens of the prefix of ``node``; edges
        are split where needed. False: there is one already, the slot stays the caller's.
        ``spare``: nobody is known to ask for it, so evict it before others until it is hit."""

    @abstractmethod
    def lock(self, node: Node) -> None:
        """Keeps the KV of the node's prefix from eviction. State slots may still be evicted."""

    @abstractmethod
    def unlock(self, node: Node) -> None:
        """Takes one ``lock`` back."""

    @abstractmethod
    def evict_kv(self, count: int) -> int:
        """Frees at least ``count`` KV slots, or all unlocked; returns how many. A leaf goes as a
        whole, with its state slot."""

    @abstractmethod
    def evict_states(self, count: int, keep: Collection[int] = ()) -> int:
        """Frees up to ``count`` state slots not in ``keep``; returns how many. KV stays."""

    @abstractmethod
    def flush(self) -> None:
        """Forgets everything; nothing may be locked."""

    @abstractmethod
    def check_integrity(self) -> None:
        """Raises: RuntimeError with numbers if the books do not balance."""

    num_kv: int  # KV slots owned
    evictable_kv: int  # of which unlocked
    num_states: int  # state slots owned


class NoCache(PrefixCache):
    """Reuses nothing (--disable-radix-cache): every slot stays the caller's."""

    stores = False

    def __init__(self) -> None:
        self.root = Node(None, as_tokens([]), [], 0)
        self.num_kv = self.evictable_kv = self.num_states = 0

    def match(self, tokens: Tokens, limit: int) -> Match:
        return Match(0, 0, -1, [], self.root)

    def insert(self, after: Node, tokens: Tokens, kv_slots: list[int]) -> Inserted:
        return Inserted(0, self.root)

    def attach_state(self, node: Node, position: int, slot: int, spare: bool = False) -> bool:
        return False

    def lock(self, node: Node) -> None:
        pass

    def unlock(self, node: Node) -> None:
        pass

    def evict_kv(self, count: int) -> int:
        return 0

    def evict_states(self, count: int, keep: Collection[int] = ()) -> int:
        return 0

    def flush(self) -> None:
        pass

    def check_integrity(self) -> None:
        pass
