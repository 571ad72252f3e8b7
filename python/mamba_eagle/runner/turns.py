"""What a pipeline stage has begun and cannot end yet: the place where plans wait for each other.

The *Turn* of a step is what the last stage tells the others when it has verified it: the first
tokens of prompts, and the target's tokens at the nodes of the trees. An earlier stage begins a plan
and leaves it here until a later one needs its Turn, which ``Plan.after`` says. The last stage has
all Turns; it drafts trees for plans that have come, before it verifies those that come first.
Docs: docs/design/parallel.md.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch

from mamba_eagle.message import Plan, StepResult
from mamba_eagle.runner.steps.launched import Launched


class PlanTooEarly(RuntimeError):
    """A plan names a request whose last step is not committed, and does not wait for it."""


class Begun:
    """A step whose Turn has not come. As ``Launched`` to the caller that asks for its result."""

    def __init__(
        self, plan: Plan, rest: Iterator[None], collect: Callable[[], Launched], turns: Turns
    ) -> None:
        """rest: commits the step when it is run to its end; ``collect`` then has its results."""
        self.number, self.slots = plan.step, pending_slots(plan)
        self._rest, self._collect, self._turns = rest, collect, turns
        self.done = False

    def commit(self) -> None:
        """Wait for the Turn and apply it."""
        with torch.inference_mode():
            for _ in self._rest:
                raise AssertionError("a step has one Turn")
        self.done = True

    def result(self) -> StepResult:
        """As of ``Launched``; commits this step and those before it."""
        self._turns.commit(self.number)
        return self._collect().result()


class Turns:
    """The steps of an earlier stage that wait for their Turns, oldest first."""

    def __init__(self) -> None:
        self._begun: deque[Begun] = deque()

    def __len__(self) -> int:
        return len(self._begun)

    def add(self, step: Begun) -> None:
        self._begun.append(step)

    def commit(self, until: int | None = None) -> None:
        """Wait for the Turns of all steps up to this one, or of all that are begun."""
        while self._begun and (until is None or self._begun[0].number <= until):
            self._begun.popleft().commit()

    def wait_for(self, plan: Plan) -> None:
        """Before a plan is begun.

        Raises: PlanTooEarly if it does not wait for what it needs.
        """
        self.commit(plan.after if plan.after >= 0 else None)
        for step in self._begun:
            check_order(plan, step.number, step.slots)


def pending_slots(plan: Plan) -> set[int]:
    """The request slots that only the Turn of a step brings up to date."""
    slots = {item.slot for item in plan.prefill if item.is_last}
    return slots.union(plan.decode.slots if plan.decode is not None else ())


def check_order(plan: Plan, step: int, pending: set[int]) -> None:
    """pending: the request slots of a step that is not committed when ``plan`` begins.

    Raises: PlanTooEarly.
    """
    named = {release.slot for release in plan.releases}.union(plan.end_trails)
    named.update(item.slot for item in plan.prefill if item.is_first)
    named.update(plan.decode.slots if plan.decode is not None else ())
    if early := named & pending:
        raise PlanTooEarly(
            f"step {plan.step} comes after step {plan.after}, but names request slot "
            f"{min(early)}, which step {step} has not left"
        )


def draftable(upcoming: Sequence[Plan], committed: int, check_every: int) -> list[Plan]:
    """Of the plans that have come, in order, those whose trees the last stage may draft now.

    committed: the newest step that is. check_every: ranks compare their tables after each step
    whose number is a multiple, 0 for never; nothing may be drafted beyond.

    Raises: PlanTooEarly.
    """
    found: list[Plan] = []
    before: list[tuple[int, set[int]]] = []  # the plans that come first
    for plan in upcoming:
        if not 0 <= plan.after <= committed:
            break
        for step, slots in before:
            check_order(plan, step, slots)
        before.append((plan.step, pending_slots(plan)))
        if plan.decode is not None and plan.decode.shape.nodes > 1:
            found.append(plan)
        if check_every and plan.step % check_every == 0:
            break
    return found
