"""What a plan will have processed belongs to the cache, for the plans after it, as soon as the plan
is about to be sent."""

import logging
import time
from collections.abc import Mapping, Sequence

from mamba_eagle.cache.node import Node, StateKind
from mamba_eagle.cache.slots import HeldSlots, Slots
from mamba_eagle.core import shown
from mamba_eagle.limits import MAX_SESSIONS
from mamba_eagle.message import DraftCopy, PrefillItem, Ready
from mamba_eagle.scheduler.plan_draft import PlanDraft
from mamba_eagle.scheduler.prefill import PrefillManager
from mamba_eagle.scheduler.request import Request
from mamba_eagle.scheduler.speculation import ShapePolicy
from mamba_eagle.scheduler.stats import Stats


class OpenSessions:
    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._seconds: dict[str, float] = {}  # that each may be without a request
        self._until: dict[str, float] = {}  # time.monotonic()

    def open(self, name: str, seconds: float) -> str:
        """Why it is not opened; "" if it is."""
        now = time.monotonic()
        for over in [each for each, until in self._until.items() if until <= now]:
            self._forget(over)
        if name in self._until:
            return f"session_id = {shown(name)}: it is open already"
        if len(self._until) >= MAX_SESSIONS:
            return f"{MAX_SESSIONS} sessions are open: close some"
        self._seconds[name], self._until[name] = seconds, now + seconds
        return ""

    def close(self, name: str) -> str:
        """Why it is not closed; "" if it is."""
        if name not in self._until:
            return f"session_id = {shown(name)}: it is not open, or no longer"
        self._forget(name)
        self._slots.cache.pins.remove(name)
        return ""

    def _forget(self, name: str) -> None:
        del self._until[name], self._seconds[name]

    def keep(self, name: str, node: Node, positions: Sequence[int]) -> bool:
        """Its prefix is now that of ``node``, with the states at ``positions``. Returns False if
        too much is pinned; a session that is not open pins nothing."""
        now = time.monotonic()
        if self._until.get(name, 0.0) <= now or not self._slots.stores:
            return True
        self._until[name] = now + self._seconds[name]
        return self._slots.cache.pin(node, positions, self._until[name], name)


log = logging.getLogger("mamba_eagle.scheduler")


class PlanBooking:
    def __init__(
        self,
        runner: Ready,
        policy: ShapePolicy,
        slots: Slots,
        prefill: PrefillManager,
        sessions: OpenSessions,
        stats: Stats,
    ) -> None:
        self.policy, self.slots, self.prefill = policy, slots, prefill
        self.sessions, self.stats = sessions, stats
        self.drafter_reads = runner.drafter_reads

    def book(self, plan: PlanDraft) -> None:
        plan.message.moves += self.slots.take_moves()
        for request in plan.untracked:
            self.policy.untrack(request.drafts)
            if request.held is not None:
                plan.message.untrack.append(request.held.slot)
                request.held.followed &= self.drafter_reads == "nothing"
        for request in plan.decodes:
            request.plans_in_flight += 1
            request.min_tokens_in_flight += 1
        for request, item in zip(plan.prompts, plan.message.prefill):
            self._book_chunk(request, item, plan.kinds)

    def _book_chunk(
        self, request: Request, item: PrefillItem, kinds: Mapping[int, StateKind]
    ) -> None:
        held = request.held
        assert held is not None
        request.plans_in_flight += 1
        request.min_tokens_in_flight += item.is_last
        if item.first is not None:
            if request.retractions == 0:
                self.stats.prompt_tokens += request.prompt_len
                self.stats.hit(held.hit.kind, request.news.cached_tokens)
            if item.first.draft_start is not None:
                self.slots.follow(held)
        end = item.start + len(item.token_ids)
        tokens = request.to_prefill[item.start : end]
        copies = self.slots.insert(held, tokens, heals=held.followed)
        if copies[0]:
            item.draft_copy = DraftCopy(*copies)
        for save in item.saves:
            if (kind := kinds.get(save.state_slot)) is not None:  # others are the request's own
                self.slots.attach_state(held, save.position, save.state_slot, kind)
        if item.is_last:
            if held.prompt_journal is not None:
                self.slots.keep_prompt_journal(held)
            self.prefill.remove(request)
            self._pin(request, held)

    def _pin(self, request: Request, held: HeldSlots) -> None:
        """Its prompt is in the cache now; a client may have asked to keep it there."""
        asked, tail = request.asked, request.prompt_len - 1
        if tail <= 0 or not self.slots.stores:
            return
        positions, pinned = [*asked.checkpoints, tail], True
        if asked.pin_seconds > 0:
            until = time.monotonic() + asked.pin_seconds
            pinned = self.slots.cache.pin(held.node, positions, until)
        if not (self.sessions.keep(asked.session, held.node, positions) and pinned):
            log.warning("request %r: half of the cache is pinned already", request.rid)
