"""What is kept behind running requests, so that the cache can continue inside their outputs."""

from __future__ import annotations

from mamba_eagle.cache.slots import HeldSlots, Slots, Trail
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
    before the last of them.
    """

    def __init__(self, config: EngineConfig, slots: Slots, runner: RunnerReady) -> None:
        self.slots, self.rows, self.moves_anchors = slots, runner.journal_rows, runner.moves_anchors
        self.kept = min(MIN_KEPT, self.rows // 2)
        self.accepts = config.tree_shape.depth + 1  # most tokens that a step accepts
        self.interval = config.mamba_checkpoint_interval
        self.reserve = max(1, slots.states.total // 8)  # state slots that states inside leave free

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
            plan.end_trails.append(held.slot)
            self.slots.end_trail(held)
            return
        rows = JournalPart(trail.journal, trail.anchor, target)
        plan.moves.append(AnchorMove(rows, trail.state_slot, self._save(trail, target)))
        trail.anchor = target

    def _save(self, trail: Trail, target: int) -> int:
        """A state slot for the state that is about to be left behind, if a fork in the output would
        otherwise have to run more than the interval again; else -1."""
        last = trail.inside[-1][0] if trail.inside else trail.first
        wanted = self.interval and target - last > self.interval and trail.anchor > last
        if not wanted or self.slots.states.num_free <= self.reserve:
            return -1
        state_slot = self.slots.reserve_state()
        assert state_slot is not None
        trail.inside.append((trail.anchor, state_slot))
        return state_slot
