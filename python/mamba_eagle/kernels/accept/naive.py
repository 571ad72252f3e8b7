"""Accepting a path of a draft tree: one request, in plain Python.

The target names one token at each node (a sample of its own distribution there, keyed by position,
or the most probable one). The walk starts at the root and goes on to the child that carries the
target's token, as long as there is one. The target's tokens along the walk are the step's output:
since all of them are the target's own samples, drafting changes nothing about the text. (Trees:
SpecInfer, arXiv 2305.09781; here without its rejection sampling.)

An output ends with a stop token, which is kept, or when no token is left to make. Where the target
has no token (a negative one: none could be sampled) a step keeps nothing from there on.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


class Accepted(NamedTuple):
    """A walk from the root, cut where the request ends."""

    nodes: list[int]  # the root first
    tokens: list[int]  # the target's at each of these nodes; the last one is in no node yet
    finished: bool  # the request has ended


def walk(tokens: Sequence[int], parents: Sequence[int], target: Sequence[int]) -> list[int]:
    """The nodes from the root on that the target agrees with.

    tokens, parents, target: [T], of the nodes; the root's parent is itself. If siblings carry the
    same token, the first one counts.
    """
    nodes = [0]
    while True:
        here = nodes[-1]
        following = [
            node
            for node in range(1, len(tokens))
            if parents[node] == here and tokens[node] == target[here]
        ]
        if not following:
            return nodes
        nodes.append(following[0])


def accept(
    tokens: Sequence[int],
    parents: Sequence[int],
    target: Sequence[int],
    stop_tokens: Sequence[int],
    remaining: int,
) -> Accepted:
    """``walk``, up to the request's end. remaining: tokens left to make; 0 or less: it had
    ended before, and keeps nothing."""
    kept: list[int] = []
    stopped = False
    for node in walk(tokens, parents, target):
        if stopped or len(kept) >= remaining or target[node] < 0:
            break
        kept.append(node)
        stopped = target[node] in stop_tokens
    return Accepted(kept, [target[node] for node in kept], stopped or len(kept) >= remaining)


@dataclass
class Request:
    """What the request table knows of a request."""

    kv_slots: list[int]  # of the tokens that were processed, in order
    last_token: int  # the root of the next tree
    remaining: int  # tokens left to make


def commit(request: Request, own: Sequence[int], accepted: Accepted) -> None:
    """The accepted nodes become part of the sequence. own: [T], KV slots of the tree's nodes."""
    request.kv_slots += [own[node] for node in accepted.nodes]
    if accepted.tokens:
        request.last_token = accepted.tokens[-1]
    request.remaining = 0 if accepted.finished else request.remaining - len(accepted.nodes)


# ── a drafter's pending entries ──


@dataclass
class DraftEntries:
    """A request as its drafter sees it. An entry is an accepted token with its feature; entries
    wait until the drafter's network runs all of them at once."""

    processed: int  # entries that the network has run
    waiting: list[Any] | None  # None: the request is untracked

    def append(self, entries: list[Any]) -> None:
        """Newly accepted entries wait."""
        if self.waiting is not None:
            self.waiting += entries

    def take(self, has_ended: bool) -> list[Any]:
        """All entries that wait are about to be run, unless the request has ended."""
        if has_ended or self.waiting is None:
            return []
        return self.leave(len(self.waiting))

    def leave(self, count: int) -> list[Any]:
        """The first ``count`` entries are about to be run; no entry waits any longer."""
        assert self.waiting is not None
        taken, self.waiting = self.waiting[:count], []
        self.processed += count
        return taken
