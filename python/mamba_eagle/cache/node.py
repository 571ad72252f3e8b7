"""What the prefix cache is made of, and what it answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from mamba_eagle.message.indices import Indices

Tokens = NDArray[np.int32]
# Why a state was saved: at the end of a prompt, where prompts part, at a multiple of the interval
# in case that prompts will part there, at the last one before what may be a question behind a
# document, behind an output, where a client asked for it. A hit is of kind "journal" if it is
# behind the state, by rows.
StateKind = Literal["tail", "branch", "spare", "document", "output", "asked", "journal"]
STATE_KINDS: tuple[StateKind, ...] = get_args(StateKind)
SPARE_KINDS: tuple[StateKind, ...] = ("spare", "document")  # which no request has asked for


def as_tokens(token_ids: Sequence[int]) -> Tokens:
    """A copy."""
    return np.array(token_ids, dtype=np.int32)


def common_prefix(a: Tokens, b: Tokens, least: int = 1) -> int:
    """Length of the longest common prefix. least: if it is shorter, 0 will do, for which a look at
    the tokens before there is enough in most cases."""
    size, few = min(len(a), len(b)), slice(max(least - 32, 0), least)
    if size < least or a[0] != b[0] or (least > 1 and (a[few] != b[few]).any()):
        return 0
    differ = a[:size] != b[:size]
    first = int(differ.argmax())
    return first if differ[first] else size


def child_key(salt: int, token: int) -> int:
    """token: the first one of a child's edge."""
    return salt << 32 | token


ADAPTED = 1 << 128  # in the salts of prefixes that an adapter has computed


def salt_number(salt: str, adapter: int = 0) -> int:
    """Distinct for each salt and each adapter, by its number from 1 on, for all that can be
    computed; 0 for none."""
    if not salt and not adapter:
        return 0
    kind = adapter.to_bytes(8, "big") if adapter else b""
    digest = blake2b(salt.encode(), digest_size=16, person=kind).digest()
    return int.from_bytes(digest, "big") | (ADAPTED if adapter else 0)


@dataclass(slots=True, eq=False, repr=False)
class Node:
    """Tokens [start, end) of a prefix.

    The object stands for position ``end``: when its edge is split it keeps the lower part, so that
    references to it remain valid.
    """

    parent: Node | None
    tokens: Tokens
    kv_slots: Indices
    end: int
    children: dict[int, Node] = field(default_factory=dict)  # key -> child
    salt: int = 0  # of all nodes of one prefix
    pins: int = 0  # pins that end here or below: its KV is evicted after all others
    state_pins: int = 0  # pins that end here: the same for its state
    followed: bool = True  # the drafter has processed these tokens and all before them
    locks: int = 0  # requests whose prefix runs through here
    used_at: int = 0  # the cache's clock when the node was last on a matched path
    used_time: float = 0.0  # time.monotonic() at that time; for people
    state_slot: int = -1  # of the state after the node's last token; -1: none
    # of that state:
    kind: StateKind = "tail"
    state_followed: bool = True  # the drafter's own state is in the slot as well
    spare: bool = False  # stored although no request is known to ask for it, and not hit so far
    state_used_at: int = 0  # the cache's clock when it was stored or last hit
    journals: list[Journal] = field(default_factory=list)  # which begin there
    reaching: list[Journal] = field(default_factory=list)  # whose last token is of this edge
    inflation: int = 0  # the shelf's inflation at that time (CachedStates says what it is for)

    @property
    def start(self) -> int:
        return self.end - len(self.kv_slots)

    @property
    def moved_kind(self) -> StateKind:
        """Of its state in another tier: with its first hit a spare one is where prompts part."""
        return self.kind if self.spare or self.kind not in SPARE_KINDS else "branch"

    @property
    def key(self) -> int:
        """Under which its parent has it. Below one parent only the root's children differ in salt;
        so prefixes of different salts share no node."""
        return child_key(self.salt, int(self.tokens[0]))

    def cut(self, at: int) -> Node:
        """Cuts its first ``at`` tokens off. Returns the node above it that has them."""
        assert self.parent is not None and 0 < at < len(self.tokens)
        upper = Node(self.parent, self.tokens[:at], self.kv_slots[:at], self.start + at)
        upper.salt = self.salt
        upper.locks, upper.pins, upper.followed = self.locks, self.pins, self.followed
        upper.used_at, upper.used_time = self.used_at, self.used_time
        self.parent.children[upper.key] = upper
        self.parent = upper
        self.tokens = self.tokens[at:]
        self.kv_slots = self.kv_slots[at:]
        upper.children[self.key] = self
        for journal in list(self.reaching):
            if journal.end <= upper.end:
                self.reaching.remove(journal)
                upper.reaching.append(journal)
                journal.bottom = upper
        return upper

    def ancestors(self) -> Iterator[Node]:
        """This node and those above it, except the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent

    def path(self) -> tuple[list[Node], Tokens]:
        """The nodes from below the root to this one, and their tokens: the prefix."""
        nodes = list(self.ancestors())[::-1]
        return nodes, np.concatenate([node.tokens for node in nodes])

    @property
    def deepest(self) -> int:
        """The deepest position that its state and its journals serve."""
        return max((journal.end for journal in self.journals), default=self.end)


@dataclass(slots=True, eq=False, repr=False)
class Journal:
    """Rows of the tokens that follow a node's state on some path, in a journal slot."""

    node: Node
    bottom: Node  # on whose edge its last token is
    slot: int
    tokens: Tokens
    used_at: int
    hit_at: int = 0  # the position that it served last; 0: none so far

    @property
    def end(self) -> int:
        """The deepest position that it serves."""
        return self.node.end + len(self.tokens)


class Match(NamedTuple):
    """What the cache has of a prompt."""

    length: int  # tokens whose KV is cached
    position: int  # tokens that need not be processed: the deepest that a cached state, or one and
    # rows behind it, give; 0 if there is none
    state_slot: int  # of that state; -1 if position is 0
    kv_slots: Indices  # of tokens [0, position), copied; the cache keeps the slots
    node: Node  # ends at ``position``; to be locked for as long as these slots are used
    kind: StateKind = "tail"  # of the hit
    journal: int = -1  # journal slot with the rows of [anchor, position); -1: the state is there
    anchor: int = 0  # position of the state
    draft_from: int = 0  # where a drafter can start: it has followed the tokens before
    draft_state: int = -1  # state slot with its own state there, if it has states of its own


class Inserted(NamedTuple):
    """What became of the slots that ``insert`` was given."""

    taken: int  # the cache now owns the last ``taken`` of them; the others stay the caller's
    node: Node  # ends after the last token inserted
    healed: Sequence[tuple[int, Indices]] = ()  # where, in the tokens, the drafter has now followed
    # what it had not, and the cache's KV slots there, which are to get its keys and values


class CacheWatcher:
    """Told of what changes in a RadixCache's tree, each time right after the change."""

    def leaf_added(self, leaf: Node) -> None: ...

    def split(self, upper: Node, lower: Node) -> None: ...

    def leaf_removed(self, leaf: Node) -> None:
        """Nothing that ends or begins at the leaf is left; ``leaf.parent`` is still set."""

    def added(self, what: Node | Journal) -> None:
        """what: a node that has a state now, or a journal."""

    def dropped(self, what: Node | Journal) -> None: ...

    def cleared(self) -> None: ...


class CacheBelow:
    """Keeps what a RadixCache has no room for. This one keeps nothing."""

    def state_came(self, node: Node) -> None:
        """The node gets a state, or its state a journal."""

    def state_goes(self, node: Node) -> None:
        """The node's state, with the journals that begin there, is about to be evicted."""

    def leaf_goes(self, leaf: Node) -> None:
        """The leaf is about to be evicted, with its state and what journals have of its tokens."""

    def flushed(self) -> None:
        """All nodes are gone."""
