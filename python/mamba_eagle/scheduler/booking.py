"""What a plan will have processed belongs to the cache as soon as the plan is as good as sent, for
the plans after it."""

import logging
import time

from mamba_eagle.cache.slots import HeldSlots, Slots
from mamba_eagle.message import AnchorMove, DraftCopy, JournalPart, RunnerReady
from mamba_eagle.scheduler.plan_draft import Chunk, PlanDraft
from mamba_eagle.scheduler.prefill import PrefillManager
from mamba_eagle.scheduler.request import Request
from mamba_eagle.scheduler.sessions import OpenSessions
from mamba_eagle.scheduler.speculation import ShapePolicy
from mamba_eagle.scheduler.stats import Stats

log = logging.getLogger("mamba_eagle.scheduler")


class PlanBooking:
    def __init__(
        self,
        runner: RunnerReady,
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
        for fold in self.slots.take_folds():
            rows = JournalPart(fold.journal, fold.start, fold.end)
            plan.message.moves.append(AnchorMove(rows, fold.state_slot))
        for request in plan.untracked:
            self.policy.untrack(request.drafts)
            if request.held is not None and self.drafter_reads != "nothing":
                request.held.followed = False
        for request, _, _ in plan.decodes:
            request.plans_in_flight += 1
            request.min_tokens_in_flight += 1
        for chunk in plan.chunks:
            self._book_chunk(chunk)

    def _book_chunk(self, chunk: Chunk) -> None:
        request, held, item, kinds = chunk
        request.plans_in_flight += 1
        request.min_tokens_in_flight += item.is_last
        if item.first is not None:
            if request.retractions == 0:
                self.stats.prompt_tokens += request.prompt_len
                self.stats.hit(held.hit.kind, request.cached_tokens)
            if item.first.draft_start is not None:
                self.slots.follow(held)
        end = item.start + len(item.token_ids)
        tokens = request.to_prefill[item.start : end]
        copies = self.slots.insert(held, tokens, heals=held.followed)
        if copies[0]:
            item.draft_copy = DraftCopy(*copies)
        for save in item.saves:
            if save.position in kinds:  # others are the request's own
                kind = kinds[save.position]
                self.slots.attach_state(held, save.position, save.state_slot, kind)
        if item.is_last:
            if held.prompt_journal is not None:
                self.slots.keep_prompt_journal(held)
            self.prefill.remove(request)
            self._pin(request, held)

    def _pin(self, request: Request, held: HeldSlots) -> None:
        """Its prompt is in the cache now; a client may have asked to keep it there."""
        hints, tail = request.asked.cache, request.prompt_len - 1
        if tail <= 0 or not self.slots.stores:
            return
        positions, pinned = [*hints.positions, tail], True
        if hints.pin_seconds > 0:
            until = time.monotonic() + hints.pin_seconds
            pinned = self.slots.cache.pin(held.node, positions, until)
        if not (self.sessions.keep(hints.session, held.node, positions) and pinned):
            log.warning("request %r: half of the cache is pinned already", request.rid)
