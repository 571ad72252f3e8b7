"""At which positions of a prompt states are saved (docs/design/prefix-cache.md)."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from mamba_eagle.cache.node import Match, StateKind, common_prefix
from mamba_eagle.cache.slots import HeldSlots, Slots
from mamba_eagle.config import MambaSettings
from mamba_eagle.message import JournalPart, Ready, StateSave
from mamba_eagle.scheduler.plan_draft import PlanDraft
from mamba_eagle.scheduler.request import Request

MIN_SHARED_TOKENS = 32  # shorter shared prefixes are processed twice
MAX_SHARED_SAVES = 4  # states saved per prompt for waiting requests that share its prefix
MAX_SPARE_SAVES = 32  # states saved per prompt at multiples of --mamba-checkpoint-interval


class StateSaves:
    """Chooses them chunk by chunk, and reserves their slots, which are the plan's."""

    def __init__(self, config: MambaSettings, slots: Slots, runner: Ready) -> None:
        self.slots, self.journal_rows = slots, runner.journal_rows
        self.interval = config.mamba_checkpoint_interval

    def choose(
        self,
        request: Request,
        held: HeldSlots,
        end: int,
        plan: PlanDraft,
        waiting: Sequence[Request],
    ) -> list[StateSave]:
        """Where in (inserted, end] the state is saved, if there are slots for it; the plan gets the
        kinds. waiting: requests that may share the prefix."""
        if not self.slots.stores:
            return []
        start = held.inserted
        tail = self._tail(request, held, end, plan)
        below, hit = request.length_below, held.hit
        parts_below = below if below - hit.position >= MIN_SHARED_TOKENS else 0
        state_slots: dict[int, int] = {}  # by position
        asked = request.asked.checkpoints
        shared = self._shared_positions(request, held, waiting)
        for position in [tail, *asked, *shared, hit.length, parts_below]:
            last = end if position in asked else min(end, tail)
            inside = max(start, hit.position) < position <= last
            if inside and position not in state_slots:
                state_slot = self.slots.reserve_state(keep=plan.reads)
                if state_slot is None:
                    break
                state_slots[position] = state_slot
        if held.prompt_journal is not None and start < tail and tail not in state_slots:
            self.slots.drop_prompt_journal(held)  # without the state that it begins at
        for position, state_slot in state_slots.items():
            plan.kinds[state_slot] = (
                "tail" if position == tail else "asked" if position in asked else "branch"
            )
        spare = self._spare_positions(request, held, min(end, tail))
        document = (len(request.to_prefill) - 1) // spare.step * spare.step - spare.step
        for position in sorted(spare, key=lambda position: position != document):
            kind: StateKind = "document" if position == document else "spare"
            if position in state_slots:
                continue
            state_slot = self.slots.reserve_spare(kind, plan.reads)
            if state_slot is not None:
                state_slots[position], plan.kinds[state_slot] = state_slot, kind
        return [StateSave(*save) for save in sorted(state_slots.items())]

    def _tail(self, request: Request, held: HeldSlots, end: int, plan: PlanDraft) -> int:
        """Where the state is saved that serves the prompt's end: there, or before the last tokens
        whose rows are kept, from which any of them can be continued."""
        tail = len(request.to_prefill) - 1
        if held.prompt_journal is not None:
            return held.prompt_journal.start
        first = max(tail - self.journal_rows, held.hit.position + 1)
        if held.inserted < first <= end and first < tail:
            journal = self.slots.reserve_journal(plan.reads)
            if journal is not None:
                held.prompt_journal = JournalPart(journal, first, tail)
                return first
        return tail

    def keeps_output(self, request: Request) -> bool:
        """Whether it gets a trail."""
        left = request.sampling.max_new_tokens - request.num_output
        return self.slots.stores and left > 1

    def hit_is_coming(self, request: Request, match: Match, others: Sequence[Request]) -> bool:
        """Whether a few steps from now it will get a far better one than ``match``, from a prompt
        that is being processed or from the output of a request that has just finished."""
        for other in others if self.slots.stores else ():
            if other.salt != request.salt:
                continue
            source = other.to_prefill
            if other.leaving:  # not a copy: many waiting ones may look at many long ones
                source = np.frombuffer(other.tokens, dtype=np.int32)[: other.reusable or 0]
            least = match.position + (1 if other.leaving else MIN_SHARED_TOKENS)
            reach = min(common_prefix(source, request.to_prefill, least), request.hit_limit)
            if other.leaving:
                better = other.will_serve(reach) > match.position
            else:
                assert other.held is not None
                is_far = reach - match.position >= MIN_SHARED_TOKENS
                better = is_far and other.held.inserted < reach
            if better:
                return True
        return False

    def _shared_positions(
        self, request: Request, held: HeldSlots, waiting: Sequence[Request]
    ) -> list[int]:
        """Ends of prefixes shared with waiting requests; those that save most tokens first."""
        ends: Counter[int] = Counter()
        least = held.hit.position + MIN_SHARED_TOKENS
        for other in waiting:
            if other is not request and other.salt == request.salt:
                shared = common_prefix(request.to_prefill, other.to_prefill, least)
                ends[min(shared, other.hit_limit, len(request.to_prefill) - 1)] += 1
        saved = {
            end: count * (end - held.hit.position)
            for end, count in ends.items()
            if end - held.hit.position >= MIN_SHARED_TOKENS
        }
        return sorted(saved, key=lambda end: -saved[end])[:MAX_SHARED_SAVES]

    def _spare_positions(self, request: Request, held: HeldSlots, end: int) -> range:
        """Multiples of the interval up to ``end``; of a larger stride if the prompt is long."""
        if self.interval == 0:
            return range(0)
        strides = (len(request.to_prefill) - held.hit.position) // self.interval
        stride = self.interval * max(1, -(-strides // MAX_SPARE_SAVES))
        return range((held.inserted // stride + 1) * stride, end + 1, stride)
