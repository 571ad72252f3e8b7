"""What is kept behind running requests, so that the cache can continue inside their outputs."""

from mamba_eagle.cache.slots import Behind, HeldSlots, Slots, Trail
from mamba_eagle.config import EngineConfig
from mamba_eagle.message import AnchorMove, JournalPart, RunnerReady
from mamba_eagle.scheduler.plan_draft import PlanDraft
from mamba_eagle.scheduler.request import Request

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

    def __init__(self, config: EngineConfig, slots: Slots, runner: RunnerReady) -> None:
        self.slots, self.rows, self.moves_anchors = slots, runner.journal_rows, runner.moves_anchors
        self.kept = min(MIN_KEPT, self.rows // 2)
        self.accepts = config.tree_shape.depth + 1  # most tokens that a step accepts
        self.interval = config.mamba_checkpoint_interval

    def make_room(self, request: Request, held: HeldSlots, plan: PlanDraft) -> None:
        """Before a decode step of the request, which is not yet counted as in flight."""
        trail = held.trail
        if trail is None:
            return
        most = request.processed + (request.plans_in_flight + 1) * self.accepts
        if most - trail.anchor <= self.rows:
            return
        target = request.processed - self.kept
        if not self.moves_anchors or target <= trail.anchor:
            plan.message.end_trails.append(held.slot)
            self.slots.end_trail(held)
            return
        rows = JournalPart(trail.journal, trail.anchor, target)
        move = AnchorMove(rows, trail.state_slot)
        if self.interval and self.slots.has_spare_state:
            self._leave_behind(trail, move, request.processed)
        plan.message.moves.append(move)
        trail.anchor = target

    def _leave_behind(self, trail: Trail, move: AnchorMove, known: int) -> None:
        """Copies what is at the anchor before ``move``, if forks in the output may need it. known:
        position up to which the journal has rows."""
        last = trail.inside[-1] if trail.inside else Behind(trail.first, -1, -1, trail.first)
        target, with_rows = move.journal.end, self.slots.has_spare_journal
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
