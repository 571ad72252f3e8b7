"""Which running requests take a decode step, with which trees, and which one steps back when KV
slots run out."""

from collections.abc import Sequence

from mamba_eagle.cache.slots import Slots
from mamba_eagle.core import PLAIN
from mamba_eagle.scheduler.plan_draft import DecodeItem, PlanDraft
from mamba_eagle.scheduler.request import Request, rank
from mamba_eagle.scheduler.speculation import ShapePolicy


class DecodeManager:
    """Reserves one tree of KV slots per request; older requests, and those of
    higher priority, are served first."""

    def __init__(self, policy: ShapePolicy, slots: Slots) -> None:
        self.policy = policy
        self.slots = slots

    def schedule(
        self,
        plan: PlanDraft,
        ready: list[Request],
        running: list[Request],
        in_flight: Sequence[PlanDraft],
    ) -> Request | None:
        """Adds to ``plan`` each request of ``ready``, those of the running ones whose turn it is.

        A request that gets no KV slots skips the step. If nothing in flight will free any, returns
        the last of the running requests, to be retracted; it is not part of the decode step.
        """
        if ready:
            plan.choice, untracked = self.policy.choose(
                [request.drafts for request in ready],
                [earlier.choice for earlier in in_flight if earlier.decodes],
            )
            plan.untracked = [ready[place] for place in untracked]
        for request in sorted(ready, key=rank):
            tree = self.slots.reserve_kv(plan.choice.shape.nodes)
            if tree is None:
                plan.short_of_kv = True
                break
            assert request.held is not None
            plan.decodes.append(DecodeItem(request, request.held, tree))
        if plan.short_of_kv and not self._slots_are_coming(running, in_flight):
            return max(running, key=rank)
        return None

    def _slots_are_coming(self, running: list[Request], in_flight: Sequence[PlanDraft]) -> bool:
        rejects = any(plan.decodes and plan.choice.shape != PLAIN for plan in in_flight)
        return rejects or any(request.leaving or request.all_planned for request in running)
