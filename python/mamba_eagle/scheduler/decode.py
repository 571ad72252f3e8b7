"""Which running requests take a decode step, with which trees, and who steps back when KV slots
run out."""

from __future__ import annotations

from collections.abc import Sequence

from mamba_eagle.cache.pools import Pools
from mamba_eagle.core import PLAIN
from mamba_eagle.scheduler.plan_draft import DecodeItem, PlanDraft
from mamba_eagle.scheduler.request import Request
from mamba_eagle.scheduler.speculation import ShapePolicy


class DecodeManager:
    """Reserves one tree of KV slots a request; the oldest are served first."""

    def __init__(self, policy: ShapePolicy, pools: Pools) -> None:
        self.policy = policy
        self.pools = pools

    def schedule(
        self, step: PlanDraft, running: list[Request], in_flight: Sequence[PlanDraft]
    ) -> Request | None:
        """Adds a row to ``step`` for each request that can go on.

        One without KV slots skips the step. If nothing on its way will free any, returns the
        youngest running request, to be retracted; it has no row.
        """
        ready = [request for request in running if request.decodable]
        tracked = [request for request in ready if request.drafts.tracked]
        if ready:
            step.choice = self.policy.choose(
                [request.drafts for request in ready],
                [earlier.choice for earlier in in_flight if earlier.rows],
            )
        step.untrack = [request.slot for request in tracked if not request.drafts.tracked]
        for request in sorted(ready, key=lambda request: request.order):
            kv_slots = self.pools.take_kv(step.choice.shape.nodes)
            if kv_slots is None:
                step.short_of_kv = True
                break
            step.rows.append(DecodeItem(request, kv_slots))
        if step.short_of_kv and not self._slots_are_coming(running, in_flight):
            return max(running, key=lambda request: request.order)
        return None

    def _slots_are_coming(self, running: list[Request], in_flight: Sequence[PlanDraft]) -> bool:
        rejects = any(step.rows and step.choice.shape != PLAIN for step in in_flight)
        return rejects or any(request.leaving or request.all_planned for request in running)
