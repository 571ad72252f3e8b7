"""Groups of running requests whose decode steps alternate, so that pipeline stages work at the same
time: while one stage verifies the trees of one group, the next stage verifies those of another.

A plan decodes the requests of one group. It needs the results of the steps that these requests were
in, and not those of the steps of other groups, which may be in flight (``Plan.after``). With one
group that is the step before.
"""

from collections.abc import Sequence

from mamba_eagle.scheduler.plan_draft import PlanDraft
from mamba_eagle.scheduler.request import Request


class Cohorts:
    """Who decodes next. A request stays in its group; a group that has lost requests gets some of
    another one, which then wait for one step more than usual."""

    def __init__(self, count: int, overlaps: bool) -> None:
        """count: of groups. overlaps: whether a request may be in a second plan while its first one
        is in flight."""
        self.count, self.depth = count, 2 if overlaps else 1
        self.max_in_flight = count + self.depth - 1
        self._group_of: dict[int, int] = {}  # by the requests' order of arrival
        self._next = 0
        self._answered = self._after = self._planned = 0

    def choose(self, running: Sequence[Request]) -> list[Request]:
        """Those that decode in the next plan: all that can, of one group."""
        members = [each for each in running if each.prefill_sent and not each.leaving]
        groups = self._regroup(members)
        for offset in range(self.count):
            group = (self._next + offset) % self.count
            ready = [
                request
                for request in groups[group]
                if request.decodable and request.plans_in_flight < self.depth
            ]
            if ready:
                self._next = (group + 1) % self.count
                return self._together(ready)
        return []

    def _together(self, ready: list[Request]) -> list[Request]:
        """Without those that another group's plan has just served, as with a prompt's last chunk:
        the plan would wait for that one. They join when it is their group's turn again."""
        turn = self._planned + 1 - self.count  # when the group decoded last, if all groups do
        needed = max(turn, min(request.newest_step for request in ready))
        return [request for request in ready if request.newest_step <= needed]

    def _regroup(self, members: Sequence[Request]) -> list[list[Request]]:
        """The groups, whose sizes differ by one at most."""
        if self.count == 1:  # each step of a server with one stage comes here
            return [list(members)]
        groups: list[list[Request]] = [[] for _ in range(self.count)]
        new: list[Request] = []
        for request in members:
            group = self._group_of.get(request.order)
            (new if group is None else groups[group]).append(request)
        for request in new:
            min(groups, key=len).append(request)
        while len(most := max(groups, key=len)) > len(least := min(groups, key=len)) + 1:
            moved = min(most, key=lambda request: request.plans_in_flight)
            most.remove(moved)
            least.append(moved)
        self._group_of = {
            request.order: number for number, group in enumerate(groups) for request in group
        }
        return groups

    def planned(self, plan: PlanDraft) -> int:
        """``Plan.after`` of a plan that is about to be sent: the newest step that one of its
        decoding requests was in, or that has been answered. So whatever the scheduler gave away
        because of an answer, slots above all, is free in all stages."""
        needed = [request.newest_step for request in plan.decodes]
        self._after = max([self._after, self._answered, *needed])
        self._planned = plan.message.step
        for request in (*plan.prompts, *plan.decodes):
            request.newest_step = plan.message.step
        return self._after

    def answered(self, plan: PlanDraft) -> None:
        """Its result has come."""
        self._answered = plan.message.step
