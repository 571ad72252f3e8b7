"""Which waiting requests start, and how their prompts are cut."""

import bisect
from collections.abc import Collection, Sequence
from itertools import islice
from typing import NamedTuple

from mamba_eagle import message
from mamba_eagle.cache.node import Match
from mamba_eagle.cache.slots import HeldSlots, Slots
from mamba_eagle.cache.tiers.tiers import CacheTiers
from mamba_eagle.config import EngineConfig
from mamba_eagle.drafters import needs_history
from mamba_eagle.scheduler.adapters import Adapters
from mamba_eagle.scheduler.grammars import GrammarQueue
from mamba_eagle.scheduler.pace import PromptPace
from mamba_eagle.scheduler.plan_draft import PlanDraft
from mamba_eagle.scheduler.request import Request, rank
from mamba_eagle.scheduler.saves import StateSaves
from mamba_eagle.scheduler.speculation import ShapePolicy


class Start(NamedTuple):
    """Where a prompt starts."""

    match: Match
    catches_up: bool  # a drafter that tracks the request lacks nothing, or processes it first
    followed: bool  # the same, and the request is tracked
    otherwise: Match | None = None  # the deepest one, if there is no room to start further up


class CatchUp:
    """Where a prompt starts if the drafter has not followed all that the cache has of it.

    A request that is untracked leaves KV, states and rows that its drafter has not seen. Drafts
    from there on would be blind, so the drafter processes first what it lacks:

    - It reads tokens alone: it runs from where it has followed, and the target does nothing for it.
    - It reads the target's features: those of a journal's tokens are in its rows. For all others
      the prompt starts further up, from a state that the drafter knows, and the target runs them
      again. Their KV is in the cache; the drafter's is copied there, so this happens once.
    """

    def __init__(self, policy: ShapePolicy, slots: Slots, runner: message.Ready) -> None:
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


MIN_CHUNK = 256  # prompt tokens of a step, at least, where several steps are at work
# The same, as a part of the longest pass beside which requests decode: shorter ones would fill the
# cohorts late, and a stream waits for a part of each pass alone.
PIPELINE_SHARE = 4
LOOK_AHEAD = 64  # waiting requests that are considered and whose prompts are compared
MAX_FETCHES = 4  # of a request: loads from lower tiers that it starts
LOGPROBS_PER_TOKEN = 16  # of a prompt, that cost as much of a step's budget as a token
MAX_WALKED = 16384  # nodes of the cache that a plan looks up prompts in, about: a microsecond each
MAX_EVICTED = 2048  # leaves of the cache that a plan evicts for prompts beside running requests
MAX_SORTED = 128  # longer queues are served in order of arrival whatever the policy


class PrefillManager:
    """The queue, and the prompts that are being processed."""

    def __init__(
        self,
        config: EngineConfig,
        policy: ShapePolicy,
        slots: Slots,
        tiers: CacheTiers,
        runner: message.Ready,
        adapters: Adapters,
    ) -> None:
        self.policy, self.slots, self.tiers, self.adapters = policy, slots, tiers, adapters
        self.catch_up = CatchUp(policy, slots, runner)
        # most prompt tokens in one step; stages that work at the same time get a part each
        share = max(MIN_CHUNK, runner.chunked_prefill_size // runner.cohorts)
        most = config.chunked_prefill_size or share
        paced = config.chunked_prefill_size is None
        least = most // PIPELINE_SHARE if runner.cohorts > 1 else 0
        self.pace = PromptPace(most, paced, least)
        self.saves = StateSaves(config, slots, runner)
        self.tempers_logprobs = config.logprobs_at_temperature
        self.longest_match_first = config.schedule_policy == "lpm"
        self.nodes = config.tree_shape.nodes
        self.drafter_needs_history = needs_history(config.speculative_algorithm)
        self.grammars: GrammarQueue | None = None  # set where the runner compiles beside its steps
        self.waiting: list[Request] = []
        self.chunked: list[Request] = []  # admitted, and parts of their prompts not yet sent
        self.turned_away: list[Request] = []  # the last plan had no slots for them

    def add(self, request: Request) -> None:
        """Behind those that wait; before those of lower priority, and if it was retracted, before
        those of its own that never ran."""
        bisect.insort(self.waiting, request, key=_place)

    def expired(self, now: float, seconds: float, since: float) -> list[Request]:
        """Those that have waited for longer than that since they arrived, or since ``since`` if
        they came before, and never ran."""
        return [
            request
            for request in self.waiting
            if not request.retractions and now - max(request.arrival_time, since) > seconds
        ]

    def remove(self, request: Request) -> None:
        """It has ended, or its whole prompt is sent: wherever it is, it is not planned here."""
        place = bisect.bisect_left(self.waiting, _place(request), key=_place)
        if self.waiting[place : place + 1] == [request]:
            del self.waiting[place]
        if request in self.chunked:
            self.chunked.remove(request)

    def schedule(self, plan: PlanDraft, holding: Sequence[Request], decodes: bool) -> list[Request]:
        """Fills ``plan`` with as many prompt tokens as the pace allows, begun prompts first.

        holding: all requests that hold slots. decodes: whether any decode beside these prompts.
        Returns those that it admitted in addition.
        """
        budget = self.pace.tokens(decodes, self._runnable_tokens())
        self.turned_away = []
        for request in list(self.chunked):
            if budget > 0:
                budget -= self._cut(request, budget, plan)
        if not self.waiting:
            return []
        leaving = [request for request in holding if request.leaving]
        admitted: list[Request] = []
        able = (request for request in self._in_order() if not request.waits_for_grammar)
        some_wait_for_slot, walked = False, self.slots.cache.num_walked
        for request in islice(able, LOOK_AHEAD):
            if plan.short_of_kv or budget <= 0 or self._has_walked_far(walked):
                break
            if (adapter := request.adapter) is not None:
                # others with adapters may not overtake it, or it might wait for ever
                if not some_wait_for_slot and not self.adapters.has_room(adapter):
                    some_wait_for_slot = True
                    self.turned_away.append(request)
                if some_wait_for_slot:
                    continue
            if self.slots.requests.num_free == 0:
                self.turned_away.append(request)
                break
            if self.grammars is not None and not self.grammars.may_begin(request):
                continue
            start = self.catch_up.start(request)
            if self.saves.hit_is_coming(request, start.match, [*leaving, *self.chunked]):
                continue  # others may overtake it: this lasts a few steps only
            if self._comes_from_below(request, start, plan):
                continue
            if not self._admit(request, start, plan, [*holding, *admitted]):
                if not plan.evicts_more:
                    self.turned_away.append(request)
                break  # none may overtake it
            plan.message.adapters += self.adapters.enter(adapter)
            admitted.append(request)
            self.waiting.remove(request)
            self.chunked.append(request)
            budget -= self._cut(request, budget, plan)
        return admitted

    def _runnable_tokens(self) -> int:
        """Prompt tokens of all requests that run or for which there are request slots, before any
        hit is known."""
        begun = sum(len(r.to_prefill) - r.held.inserted for r in self.chunked if r.held is not None)
        first = self.waiting[: self.slots.requests.num_free]
        return begun + sum(len(request.to_prefill) for request in first)

    def _in_order(self) -> list[Request]:
        if not self.longest_match_first or len(self.waiting) > MAX_SORTED:
            return list(self.waiting)

        ranks: dict[Request, tuple[bool, int]] = {}
        walked = self.slots.cache.num_walked
        for request in self.waiting:
            if self._has_walked_far(walked):
                return list(self.waiting)
            hit = self.slots.match(request.to_prefill, request.hit_limit, request.salt).position
            ranks[request] = request.retractions == 0, -hit
        return sorted(ranks, key=ranks.__getitem__)

    def _has_walked_far(self, before: int) -> bool:
        """Since ``num_walked`` was that. Prompts that part at each token leave long paths."""
        return self.slots.cache.num_walked - before > MAX_WALKED

    def _comes_from_below(self, request: Request, start: Start, plan: PlanDraft) -> bool:
        """A lower tier has more of its prompt, which is being copied to the device. It asks for
        that a few times only, since others may evict what has come before it is admitted."""
        above = (start.otherwise or start.match).position
        if request.fetches >= MAX_FETCHES:
            return False
        started, limit = self.tiers.num_started, request.hit_limit
        comes = self.tiers.fetch(request.to_prefill, limit, request.salt, above, plan.reads)
        request.fetches += self.tiers.num_started - started
        return comes

    def _admit(
        self, request: Request, start: Start, plan: PlanDraft, holding: Sequence[Request]
    ) -> bool:
        """Gives it all that its prompt needs, if that leaves room for decoding as well."""
        match = start.match
        num_running = sum(not other.leaving for other in holding)
        # Replayed tokens are in the tree already. Once it has processed them they are locked there,
        # while it holds duplicates of its own.
        replayed = match.length - match.position if num_running else 0
        headroom = replayed + (2 + num_running) * self.nodes
        fresh = len(request.to_prefill) - match.position
        if self.slots.kv.num_free < fresh <= self.slots.available_kv - headroom:
            self._mark_wanted(request, plan)
            if num_running and not self.slots.make_room(match, fresh, MAX_EVICTED):
                plan.evicts_more = True
                return False

        def take(keep: Collection[int] = (), in_place: bool = False) -> HeldSlots | None:
            tokens, salt = len(request.to_prefill), request.salt
            return self.slots.admit(match, tokens, headroom, keep, salt, in_place, start.followed)

        held = take(plan.reads)
        if held is None and start.otherwise is not None:
            return self._admit(request, Start(start.otherwise, False, False), plan, holding)
        if held is None:
            if holding or match.position == 0 or self.tiers.in_flight:
                return False
            # The only state slot has the state of its own prefix: it goes on in it. If there are
            # too few KV slots beside what is cached, it starts over without.
            if match.journal < 0:
                held = take(in_place=True)
        if held is None:
            self.slots.flush()
            return self._admit(request, self.catch_up.from_nothing(request), plan, holding)
        request.admit(held)
        request.length_below = self.tiers.length(request.to_prefill, request.salt)
        self.policy.admit(request.drafts, start.catches_up)
        if match.position > 0:
            plan.reads.update((match.state_slot, match.draft_state))
        return True

    def _mark_wanted(self, request: Request, plan: PlanDraft) -> None:
        """KV is about to be evicted for the request. What other waiting requests need goes last,
        and of that what is needed latest goes first; by age it would be what is needed next. Once
        in a plan: with long prompts it takes 10 ms."""
        if plan.evicts:
            return
        plan.evicts, walked = True, self.slots.cache.num_walked
        for other in reversed(self.waiting[:LOOK_AHEAD]):
            if self._has_walked_far(walked):
                break
            if other is not request:
                self.slots.match(other.to_prefill, other.hit_limit, other.salt)

    def _cut(self, request: Request, budget: int, plan: PlanDraft) -> int:
        """Plans the next chunk; returns what it takes of the budget, in tokens."""
        held = request.held
        assert held is not None
        start = held.inserted
        cost = _cost(request) if start + budget > request.asked.logprob_start else 1
        end = min(start + max(budget // cost, 1), len(request.to_prefill))
        saves = self.saves.choose(request, held, end, plan, self.waiting[:LOOK_AHEAD])
        if end == len(request.to_prefill) and self.saves.keeps_output(request):
            self.slots.start_trail(held, end, plan.reads)
            if held.trail is not None:
                saves.append(message.StateSave(end, held.trail.state_slot))
        item = _chunk(request, held, start, end, saves)
        if start == held.hit.position:
            item.first = self._first(request, held)
        plan.prompts.append(request)
        plan.message.prefill.append(item)
        return (end - start) * cost

    def _first(self, request: Request, held: HeldSlots) -> message.FirstChunk:
        """What the first chunk alone says."""
        hit, heat = held.hit, request.sampling.temperature
        start = hit.position
        # Greedy requests sample from no distribution: theirs is the model's own.
        tempered = self.tempers_logprobs and heat > 0
        returned = {
            name: getattr(request.asked, name) for name in message.Returned.__struct_fields__
        }
        returned["pooling"] = request.pooling
        first = message.FirstChunk(
            sampling=request.sampling,
            output_start=request.prompt_len,
            prefix_kv_slots=held.kv[:start],
            logprob_temperature=heat if tempered else 1.0,
            adapter=self.adapters.slot_of(request.adapter),
            salted=bool(request.asked.salt),
            **returned,
        )
        if start > 0:
            first.load_from = hit.state_slot
        if hit.journal >= 0:
            first.replay = message.JournalPart(hit.journal, hit.anchor, start)
        if request.drafts.tracked and self.catch_up.lacks(held):
            lacking = request.tokens[hit.draft_from : start]
            first.draft_start = message.DraftStart(hit.draft_from, lacking, hit.draft_state)
        if request.sampling.reads_history or self.drafter_needs_history:
            first.history = request.tokens[:start]
        return first


def _place(request: Request) -> tuple[int, bool, int]:
    """In the queue, the smallest first."""
    priority, order = rank(request)
    return priority, request.retractions == 0, order


def _cost(request: Request) -> int:
    """Of a prompt's token, in tokens without logprobs: all processes handle each of these alone."""
    asked, logprobs = request.asked, 0
    if request.wants_input_logprobs:
        logprobs = 1 + asked.top_logprobs + len(asked.token_ids_logprob)
    return 1 + logprobs // LOGPROBS_PER_TOKEN


def _chunk(
    request: Request, held: HeldSlots, start: int, end: int, saves: list[message.StateSave]
) -> message.PrefillItem:
    """What every chunk says."""
    item = message.PrefillItem(
        slot=held.slot,
        state_slot=held.state_slot,
        start=start,
        token_ids=request.tokens[start:end],
        kv_slots=held.kv[start:end],
        saves=saves,
        is_last=end == len(request.to_prefill),
        track=request.drafts.tracked,
        journal=held.prompt_journal,
    )
    if held.trail is not None:
        item.trail = held.trail.journal
    if request.wants_input_logprobs and request.asked.logprob_start < end:
        item.logprob_start = max(request.asked.logprob_start, start)
    return item
