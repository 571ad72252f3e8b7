"""Plans: who runs, who waits, and what each gets of the slots."""

import time
from collections import deque
from collections.abc import Collection

from mamba_eagle import message
from mamba_eagle.cache.node import as_tokens
from mamba_eagle.cache.slots import Behind, Slots, Trail
from mamba_eagle.cache.tiers.tiers import CacheTiers
from mamba_eagle.config import EngineConfig
from mamba_eagle.core import DEFAULT_VERSION, PLAIN
from mamba_eagle.scheduler.adapters import Adapters
from mamba_eagle.scheduler.booking import OpenSessions, PlanBooking
from mamba_eagle.scheduler.cohorts import Cohorts
from mamba_eagle.scheduler.plan_draft import PlanDraft
from mamba_eagle.scheduler.prefill import PrefillManager
from mamba_eagle.scheduler.request import Request, rank
from mamba_eagle.scheduler.speculation import shape_policy
from mamba_eagle.scheduler.stats import Stats

MIN_KEPT = 64  # tokens before the end of an output, any of which can be continued after


class TrailKeeper:
    """Moves the anchors of running requests forward before their journals are full.

    position   anchor ─────────────── processed ──────────── processed, at most
               state     rows, known               rows of plans in flight, and of this one

    An anchor is moved by a fold of rows that are known to be accepted, to ``MIN_KEPT`` tokens
    before the last of them. On its way it leaves copies behind, while slots are free, for forks in
    the output: of the state and the journal, so that any token can be continued after,

    position   first ───────── end                  each begins where the one before ends, or before
                    anchor ────────── end

    or of the state alone, where forks would otherwise run more than the interval again.
    """

    def __init__(self, config: EngineConfig, slots: Slots, runner: message.Ready) -> None:
        self.slots, self.rows, self.moves_anchors = slots, runner.journal_rows, runner.moves_anchors
        self.kept = min(MIN_KEPT, self.rows // 2)
        self.accepts = config.tree_shape.depth + 1  # most tokens that a step accepts
        self.interval = config.mamba_checkpoint_interval

    def make_room(self, request: Request, plan: PlanDraft) -> None:
        """Before a decode step of the request, which is not yet counted as in flight."""
        held = request.held
        if held is None or (trail := held.trail) is None:
            return
        most = request.processed + (request.plans_in_flight + 1) * self.accepts
        if most - trail.anchor <= self.rows:
            return
        target = request.processed - self.kept
        if not self.moves_anchors or target <= trail.anchor:
            plan.message.end_trails.append(held.slot)
            self.slots.end_trail(held)
            return
        rows = message.JournalPart(trail.journal, trail.anchor, target)
        move = message.AnchorMove(rows, trail.state_slot)
        if self.interval and self.slots.states.can_spare:
            self._leave_behind(trail, move, request.processed)
        plan.message.moves.append(move)
        trail.anchor = target

    def _leave_behind(self, trail: Trail, move: message.AnchorMove, known: int) -> None:
        """Copies what is at the anchor before ``move``, if forks in the output may need it. known:
        position up to which the journal has rows."""
        last = trail.inside[-1] if trail.inside else Behind(trail.first, -1, -1, trail.first)
        target, with_rows = move.journal.end, self.slots.journals.can_spare
        if with_rows:
            wanted = target > max(last.end, last.position)
        else:
            wanted = target - last.position > self.interval and trail.anchor > last.position
        if not wanted:
            return
        state_slot = self.slots.reserve_state()
        journal = self.slots.reserve_journal() if with_rows else -1
        assert state_slot is not None and journal is not None
        move.save, move.save_journal = state_slot, journal
        trail.inside.append(Behind(trail.anchor, state_slot, journal, known))


class Pauses:
    """Whether requests may run, and those that came while none may begin.

    A change of the model is a pause of its own: it takes every slot from its requests, which begin
    again with their output so far, so that no state of the old weights is read with the new ones.
    """

    def __init__(self) -> None:
        self.mode: message.PauseMode | None = None  # None: no pause
        self.later: dict[Request, None] = {}  # they wait for the end of a pause
        self.change: message.ChangeModel | None = None  # under way
        self.released: set[str] = set()  # memory that was given back, by tag
        self.version = DEFAULT_VERSION  # of the weights
        self.last = 0.0  # time.time() of the last pause, when it was looked at last

    @property
    def stops_all(self) -> bool:
        """Whether no step may be planned, but for releases."""
        held = self.mode in ("keep", "retract")
        return held or self.change is not None or bool(self.released)

    @property
    def without_memory(self) -> bool:
        """Whether the runner has no slots, or is about to lose them until they are resumed."""
        return bool(self.released) or (self.change is not None and bool(self.change.release))

    @property
    def any(self) -> bool:
        """Whether requests wait that nothing is wrong with."""
        return self.stops_all or self.mode is not None

    def holds_back(self, request: Request) -> bool:
        """Whether a request that has just come is kept here."""
        if self.mode is not None:
            self.later[request] = None
        return self.mode is not None

    def forget(self, request: Request) -> None:
        """It has ended."""
        self.later.pop(request, None)

    def end(self) -> Collection[Request]:
        """The pause is over; returns those that may begin now."""
        self.mode, later, self.later = None, self.later, {}
        return later

    def problem(self, change: message.ChangeModel) -> str:
        """Why a change cannot begin; "" if it can."""
        if self.change is not None:
            return "the model is being changed already: wait for the answer to that call"
        if doubly := self.released.intersection(change.release):
            return f"memory of {', '.join(sorted(doubly))} was released already: resume it first"
        if change.resume and self.released.isdisjoint(change.resume):
            return f"memory of {', '.join(change.resume)} was not released: nothing to resume"
        return ""

    def changed(self, worked: bool) -> None:
        """The runner has answered."""
        change, self.change = self.change, None
        assert change is not None
        if worked:
            self.released = self.released.union(change.release).difference(change.resume)
            if change.weights is not None:
                self.version = change.weights.version or self.version


class Planner:
    """Makes plans of the requests that it is given; ``slots`` owns what they hold."""

    def __init__(
        self, config: EngineConfig, runner: message.Ready, prompts_first: bool = False
    ) -> None:
        """prompts_first: nothing decodes while a prompt can be run. Each step is then of one kind,
        which measurements need; running requests wait for all that arrive."""
        self.runner = runner
        self.prompts_first = prompts_first
        self.shape = config.tree_shape  # the largest of any step
        self.policy = shape_policy(config)
        self.cohorts = Cohorts(runner.cohorts, overlaps=not config.disable_overlap_schedule)
        self.slots = Slots(
            runner.max_kv_slots,
            runner.max_state_slots,
            runner.max_running_requests,
            use_cache=not config.disable_radix_cache,
            max_journals=runner.max_journals,
            folds_journals=runner.moves_anchors,
        )
        self.adapters = Adapters(config.adapter_slots, config.num_ranks)
        self.tiers = CacheTiers(self.slots, runner.tiers, draft_states=not runner.moves_anchors)
        self.prefill = PrefillManager(
            config, self.policy, self.slots, self.tiers, runner, self.adapters
        )
        self.trails = TrailKeeper(config, self.slots, runner)
        self.stats = Stats()
        self.sessions = OpenSessions(self.slots)
        self.booking = PlanBooking(
            runner, self.policy, self.slots, self.prefill, self.sessions, self.stats
        )
        self.pauses = Pauses()
        self._admitted: list[Request] = []  # requests that hold slots, ended ones until released
        self._in_flight: deque[PlanDraft] = deque()

    def plan(self) -> message.Plan | None:
        """The next step; None if there is nothing to do, or if no more plans may be in flight."""
        if len(self._in_flight) >= self.cohorts.max_in_flight:
            return None
        self.slots.cache.pins.end(time.monotonic())
        plan = PlanDraft(message.Plan(step=self.stats.num_steps + 1))
        self._release_leaving(plan)
        if not self.pauses.stops_all:
            self.tiers.write_down()
            self._schedule(plan)
        plan.message.copies = self.tiers.take_copies()
        if not self.pauses.without_memory:
            plan.message.empties_disk = self.tiers.take_empties_disk()
        asks_for_copies = self.tiers.in_flight and not self._in_flight
        if plan.empty and not asks_for_copies:
            return None
        plan.message.arrived = self.tiers.take_arrived()
        self.stats.num_steps += 1
        self._in_flight.append(plan)
        plan.message.after = self.cohorts.planned(plan)
        self.booking.book(plan)
        return plan.message

    def _schedule(self, plan: PlanDraft) -> None:
        if not self.prompts_first:
            self._schedule_decode(plan)
        beside = self._in_flight if self.cohorts.count > 1 else ()  # at work at the same time
        decodes = any(each.decodes for each in (plan, *beside))
        admitted = self.prefill.schedule(plan, self._admitted, decodes)
        self._admitted += admitted
        for request in admitted:
            request.news.weight_version = self.pauses.version
        for request in self.prefill.turned_away:
            self._step_back(request)
        if self.prompts_first and not plan.prompts:
            self._schedule_decode(plan)

    def _schedule_decode(self, plan: PlanDraft) -> None:
        """Reserves one tree of KV slots for each request whose turn it is; older requests, and
        those of higher priority, are served first.

        A request that gets no KV slots skips the step. If nothing in flight will free any, the last
        of the running requests steps back; it is not part of the decode step.
        """
        ready = self.cohorts.choose(self._admitted)
        if ready:
            plan.choice = self.policy.choose(
                [request.drafts for request in ready],
                [earlier.choice for earlier in self._in_flight if earlier.decodes],
            )
            plan.untracked = [ready[place] for place in plan.choice.untracked]
        batch = message.DecodeBatch(shape=plan.choice.shape, slots=[], kv_slots=[])
        for request in sorted(ready, key=rank):
            tree = self.slots.reserve_kv(plan.choice.shape.nodes)
            if tree is None:
                plan.short_of_kv = True
                break
            assert request.held is not None
            plan.decodes.append(request)
            batch.slots.append(request.held.slot)
            batch.kv_slots.append(tree.tolist())
        plan.message.decode = batch if plan.decodes else None
        if plan.short_of_kv and not self._slots_are_coming():
            self._retract(max(self._admitted, key=rank))
            self._release_leaving(plan)
        for request in plan.decodes:
            self.trails.make_room(request, plan)

    def _slots_are_coming(self) -> bool:
        rejects = any(plan.decodes and plan.choice.shape != PLAIN for plan in self._in_flight)
        return rejects or any(each.leaving or each.all_planned for each in self._admitted)

    def _step_back(self, waiting: Request) -> None:
        """Running requests make room for one of higher priority that did not get any: the last,
        or if it lacks a slot for its adapter, all those of the adapter whose first comes last."""
        if any(request.leaving for request in self._admitted):
            return
        groups = [[request] for request in self._admitted]
        if waiting.adapter is not None and not self.adapters.has_room(waiting.adapter):
            held = {request.adapter for request in self._admitted} - {None}
            groups = [[each for each in self._admitted if each.adapter is one] for one in held]
        last = max(groups, key=lambda group: min(map(rank, group)), default=[])
        if all(request.priority < waiting.priority for request in last):
            for request in last:
                self._retract(request)

    def _release_leaving(self, plan: PlanDraft) -> None:
        for request in list(self._admitted):
            if request.leaving and request.plans_in_flight == 0:
                self._admitted.remove(request)
                plan.message.releases.append(self._release(request))
                if request.finish is None:
                    request.start_again()
                    self.prefill.add(request)

    def _release(self, request: Request) -> message.Release:
        held, end = request.held, request.reusable
        assert held is not None
        rest = None if end is None else as_tokens(request.tokens[held.inserted : end])
        anchor = held.trail.anchor if held.trail is not None else end
        released = self.slots.release(held, rest)
        if released.stored and anchor is not None and end is not None and request.finish:
            self.sessions.keep(request.asked.session, held.node, [min(anchor, end), end])
        # Between two chunks of a prompt S0 is where it should be and needs no fold.
        keep_to = end if released.stored and end is not None and request.prefill_sent else -1
        request.held = None
        self.adapters.leave(request.adapter)
        return message.Release(held.slot, keep_to if released.state_kept else -1, keep_to)

    def _retract(self, request: Request) -> None:
        """It waits again once no plan in flight names it and its slots are released."""
        self.stats.num_retracted += 1
        request.retracting = True
        self.prefill.remove(request)

    # ── pauses ───────────────────────────────────────────────────────────────────────────────

    def pause(self, mode: message.PauseMode) -> None:
        """``paused`` says when it has come into force. A second pause replaces the first."""
        self.pauses.mode = mode
        if mode == "retract":
            self._retract_all()

    def resume(self) -> None:
        """End a pause. Requests go on where they were."""
        for request in self.pauses.end():
            self.prefill.add(request)

    @property
    def paused(self) -> bool:
        """Whether the pause is in force: no step is under way and, unless requests are held in
        place, none holds a slot."""
        if self.pauses.mode == "keep":
            return not self._in_flight
        rests = self.pauses.mode == "retract" or not self.prefill.waiting
        return self.holds_nothing and rests

    def begin_change(self, change: message.ChangeModel) -> None:
        """Takes every slot from its request. Once ``holds_nothing`` the cache can be emptied, and
        the runner is to hear of the change."""
        self.pauses.change = change
        self._retract_all()

    def _retract_all(self) -> None:
        for request in self._admitted:
            if not request.leaving:
                self._retract(request)

    @property
    def holds_nothing(self) -> bool:
        """No request holds a slot, and nothing is on its way."""
        return not (self._admitted or self._in_flight or self.tiers.in_flight)
