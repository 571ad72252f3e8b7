"""Two pipeline stages in virtual time, in the place of ``VirtualRunner``.

Each stage has a host, which launches, and a device, which executes in order and waits where a
message has not come. The last one drafts the trees of plans that have come before it launches the
next one, and waits for these where nothing is lost by it, as runner/worker.py does.
Docs: docs/design/parallel.md.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from benchmark.lib.virtual import Clock, Costs, VirtualRunner, between
from mamba_eagle.message import Plan, StepResult

RECHECK = 1e-4  # seconds until the last stage looks again whether plans have come
CAPTURED_TOKENS = 512  # a pass over so many is launched as graphs
LAUNCH_CAPTURED = 0.003
LAUNCH_DRAFT = 0.0004


@dataclass(frozen=True)
class StageCosts(Costs):
    """Of both stages together; ``decode`` is without drafting."""

    draft: Sequence[tuple[int, float]] = ()  # (requests, seconds in the last stage)
    first_share: float = 30 / 56  # of the layers that are in the first stage

    def draft_step(self, requests: int) -> float:
        return between(self.draft, requests)

    def launch(self, plan: Plan) -> float:
        """The host's part of both stages' passes over a plan's prompts."""
        tokens = sum(len(item.token_ids) for item in plan.prefill)
        captured = tokens <= CAPTURED_TOKENS
        return 2 * LAUNCH_CAPTURED if captured else self.launch_pass

    def alone(self) -> Costs:
        """The same layers and drafter on one device."""
        steps = [(n, seconds + self.draft_step(n)) for n, seconds in self.decode]
        fields = {name: getattr(self, name) for name in Costs.__dataclass_fields__}
        return Costs(**{**fields, "decode": steps})


# Nemotron-Nano-9B-v2's geometry in bfloat16 on H100s; trees of 8 nodes by an EAGLE head, which
# reads lm_head five times (events of two stages, 2026-11-27).
H100_STAGES = StageCosts(
    decode=((1, 0.005), (8, 0.006), (32, 0.011), (64, 0.0185)),
    draft=((1, 0.0012), (8, 0.002), (32, 0.0035), (64, 0.0046)),
    tokens=3,
    per_prompt_token=25e-6,
    pass_fixed=0.004,
    pass_least=0.005,
    launch_pass=0.015,
    launch_prompt=0.0002,
    launch_decode=0.0008,
)


class Signal:
    """Something that happens once."""

    def __init__(self) -> None:
        self.happened = False
        self._waiting: list[Callable[[], None]] = []

    def wake(self, who: Callable[[], None]) -> None:
        self._waiting.append(who)

    def happen(self) -> None:
        self.happened = True
        for who in self._waiting:
            who()


class Work(NamedTuple):
    """What a device executes."""

    seconds: float
    needs: Signal | None
    ended: Callable[[], None]


class Device:
    """Works one after the other, in the order in which they were launched."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.seconds = clock, 0.0
        self._works: deque[Work] = deque()
        self._is_busy = False

    @property
    def idle(self) -> bool:
        return not self._works

    def launch(self, seconds: float, needs: Signal | None, ended: Callable[[], None]) -> None:
        self._works.append(Work(seconds, needs, ended))
        self._begin()

    def _begin(self) -> None:
        if self._is_busy or not self._works:
            return
        work = self._works[0]
        if work.needs is not None and not work.needs.happened:
            work.needs.wake(self._begin)
            return
        self._is_busy = True
        self.seconds += work.seconds
        self.clock.at(self.clock.now + work.seconds, self._end)

    def _end(self) -> None:
        self._is_busy = False
        self._works.popleft().ended()
        self._begin()


class VirtualStages(VirtualRunner):
    """``seconds``: of the last stage."""

    costs: StageCosts

    def __init__(self, clock: Clock, costs: StageCosts, send: Callable[[StepResult], None]) -> None:
        super().__init__(clock, costs, send)
        self.first, self.last = Device(clock), Device(clock)
        # by step: trees are drafted, prompts and nodes have left the first stage, the step is over
        self.trees, self.prompts, self.nodes, self.turns = (
            defaultdict[int, Signal](Signal) for _ in range(4)
        )
        self._coming: deque[Plan] = deque()  # to the last stage
        self._hosts_free = [0.0, 0.0]
        self._drafted: set[int] = set()
        self._launched = self._over = 0  # newest steps
        self._looks = False

    def take(self, plan: Plan) -> None:
        """Both stages get it."""
        self._begin(plan)
        self._coming.append(plan)
        if not self._looks:
            self._look()

    # ── the first stage ──

    def _begin(self, plan: Plan) -> None:
        costs, device, share = self.costs, self.first, self.costs.first_share
        now = max(self._hosts_free[0], self.clock.now)
        if plan.after > 0:
            self.clock.at(now, device.launch, 0.0, self.turns[plan.after], _nothing)
        if plan.prefill:
            now = self._run_prompts(plan, device, share, None, now)
        if plan.decode is not None:
            now += costs.launch_decode
            seconds = share * costs.decode_step(len(plan.decode.slots))
            ended = self.nodes[plan.step].happen
            self.clock.at(now, device.launch, seconds, self.trees[plan.step], ended)
        self._hosts_free[0] = now

    def _run_prompts(
        self, plan: Plan, device: Device, share: float, needs: Signal | None, now: float
    ) -> float:
        """Returns until when the host launches them. The device begins with the first kernels, and
        is not done before the last ones are launched."""
        tokens = sum(len(item.token_ids) for item in plan.prefill)
        launching = share * self.costs.launch(plan) + self.costs.launch_prompt * len(plan.prefill)
        seconds = max(self._varied(share * self.costs.prompts(tokens)), launching)
        ended = self.prompts[plan.step].happen if device is self.first else _nothing
        self.clock.at(now + 0.1 * launching, device.launch, seconds, needs, ended)
        return now + launching

    # ── the last stage ──

    def _look(self) -> None:
        """Launches the next plan, unless it may wait for those after it."""
        self._looks = False
        if not self._coming:
            return
        plan, now = self._coming[0], max(self._hosts_free[1], self.clock.now)
        works = self._over < self._launched and not self.last.idle
        if works and len(self._coming) < 2 and plan.after < self._launched:
            now += RECHECK
        else:
            self._coming.popleft()
            now = self._launch_last(plan, self._draft([plan, *self._coming], now))
        self._looks = True
        self.clock.at(now, self._look)

    def _draft(self, plans: Sequence[Plan], now: float) -> float:
        """The trees of plans that need no step beyond those that are launched."""
        for plan in plans:
            if not 0 <= plan.after <= self._launched:
                break
            if plan.decode is not None and plan.step not in self._drafted:
                self._drafted.add(plan.step)
                now += LAUNCH_DRAFT
                seconds = self.costs.draft_step(len(plan.decode.slots))
                ended = self.trees[plan.step].happen
                self.clock.at(now, self.last.launch, seconds, None, ended)
        return now

    def _launch_last(self, plan: Plan, now: float) -> float:
        """Returns until when the host is at work."""
        costs, device, share = self.costs, self.last, 1 - self.costs.first_share
        times: list[float] = []  # of its beginning, and that of decoding

        def mark() -> None:
            times.append(self.clock.now)

        result = self._answer(plan)
        self.clock.at(now, device.launch, 0.0, None, mark)
        if plan.prefill:
            now = self._run_prompts(plan, device, share, self.prompts[plan.step], now)
        self.clock.at(now, device.launch, 0.0, None, mark)
        seconds = 0.0
        if plan.decode is not None:
            now += costs.launch_decode
            seconds = self._varied(share * costs.decode_step(len(plan.decode.slots)))

        def end() -> None:
            result.seconds = self.clock.now - times[0]
            result.decode_seconds = self.clock.now - times[1] if plan.decode is not None else 0.0
            self.seconds, self._over = device.seconds, plan.step
            self.turns[plan.step].happen()
            self.clock.at(self.clock.now, self.send, result)

        needs = self.nodes[plan.step] if plan.decode is not None else None
        self.clock.at(now, device.launch, seconds, needs, end)
        self._launched, self._hosts_free[1] = plan.step, now
        return now


def _nothing() -> None: ...
