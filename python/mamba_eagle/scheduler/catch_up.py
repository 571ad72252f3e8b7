"""Where a prompt starts if the drafter has not followed all that the cache has of it.

A request that is untracked leaves KV, states and rows that its drafter has not seen. Drafts
from there on would be blind, so the drafter processes first what it lacks:

- It reads tokens alone: it runs from where it has followed, and the target does nothing for it.
- It reads the target's features: those of a journal's tokens are in its rows. For all others the
  prompt starts further up, from a state that the drafter knows, and the target runs them again.
  Their KV is in the cache; the drafter's is copied there, so this happens once.
"""

from typing import NamedTuple

from mamba_eagle.cache.node import Match
from mamba_eagle.cache.slots import HeldSlots, Slots
from mamba_eagle.message import RunnerReady
from mamba_eagle.scheduler.request import Request
from mamba_eagle.scheduler.speculation import ShapePolicy


class Start(NamedTuple):
    """Where a prompt starts."""

    match: Match
    catches_up: bool  # a drafter that tracks the request lacks nothing, or processes it first
    followed: bool  # the same, and the request is tracked
    otherwise: Match | None = None  # the deepest one, if there is no room to start further up


class CatchUp:
    """Decides it for each request that is to be admitted."""

    def __init__(self, policy: ShapePolicy, slots: Slots, runner: RunnerReady) -> None:
        self.policy, self.slots, self.reads = policy, slots, runner.drafter_reads

    def start(self, request: Request) -> Start:
        match = self._match(request)
        if self.reads == "nothing":
            return Start(match, True, True)
        if self.reads == "tokens" or match.draft_from >= match.anchor:
            return Start(match, True, self.policy.tracks_next(catches_up=True))
        if not self.policy.tracks_next(catches_up=True):
            return Start(match, False, False)
        known = self._match(request, followed=True)
        left = request.sampling.max_new_tokens - request.num_output
        if match.position - known.position <= left:
            return Start(known, True, True, match)
        # Running so much again would take longer than drafts can save.
        return Start(match, False, False)

    def lacks(self, held: HeldSlots) -> bool:
        """Whether a drafter that follows the request processes tokens before its first chunk."""
        return self.reads != "nothing" and held.followed and held.hit.draft_from < held.hit.position

    def from_nothing(self, request: Request) -> Start:
        """Without what is cached."""
        match = self.slots.match(request.to_prefill, limit=0, salt=request.salt)
        return Start(match, True, self.reads == "nothing" or self.policy.tracks_next(True))

    def _match(self, request: Request, followed: bool = False) -> Match:
        limit, salt = request.hit_limit, request.salt
        return self.slots.match(request.to_prefill, limit, salt, followed)
