"""Which tree the next decode step drafts, if any: measured step times and acceptance decide."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mamba_eagle.config import EngineConfig
from mamba_eagle.core import PLAIN, TreeShape, candidates
from mamba_eagle.message import ShapeUse, SpeculationState
from mamba_eagle.scheduler.estimates import Acceptance, RequestDrafts, StepTimes, Usefulness

EXPLORATION_SHARE = (
    0.01  # of the time may be lost on steps that are believed to be worse than others, …
)
INITIAL_CREDIT = 2.0  # … and beforehand the time of so many plain steps
SAVINGS = 12.0  # plain steps' time: the most that is saved up
TRIAL_STEPS = 2  # the first may have to catch up on tokens that plain steps made
MARGIN = 1.02  # by how much a shape must be better than the one in use
MIN_RELIABLE_ROWS = 4  # of a shape before it is relied on
PROBE_REQUEST_INTERVAL = (
    16  # requests, of which one at most is tracked by a drafter that was given up, …
)
PROBE_STEP_INTERVAL = 800  # … and in so many steps, …
TRIALS_PER_PROBE = 2  # … and tried on so often
RETHINK = 4  # steps of a batch for which a choice holds: thinking takes 50 to 100 us
TIME_PLAIN = 128  # steps of drafts after which a plain step is timed again


class Choice(NamedTuple):
    """What a step drafts, and why."""

    shape: TreeShape
    trial: bool = False  # to learn: by what is known, another shape is better, …
    pace: float = 0.0  # … which takes so many seconds a token
    catches_up: bool = False  # the drafter first runs tokens that plain steps made


class Outcome(NamedTuple):
    """What a step gave to one request."""

    drafts: RequestDrafts
    tokens: int  # 0: it had ended before


class ShapePolicy(ABC):
    """Chooses the shape of every decode step, and is told the outcome of each, in order.

    Steps may be chosen before the outcome of the last one is known.
    """

    adaptive: bool
    disabled = False  # the drafter

    def __init__(self) -> None:
        self._current = PLAIN
        self._used: dict[TreeShape, _Use] = {}

    def admit(self, request: RequestDrafts) -> None:
        """Its prompt is about to be run: says whether the drafter follows it."""
        request.tracked = True

    @abstractmethod
    def choose(self, requests: Sequence[RequestDrafts], in_flight: Sequence[Choice]) -> Choice:
        """For a step of these requests, one at least, behind the steps ``in_flight``. Sets
        ``tracked`` of those that the drafter need not follow any longer."""

    @abstractmethod
    def learn(self, choice: Choice, outcomes: Sequence[Outcome], seconds: float) -> None:
        """A step has ended that took ``seconds`` (0: not measured)."""

    def observe(self, choice: Choice, outcomes: Sequence[Outcome], seconds: float) -> None:
        """As ``learn``, and counted."""
        use = self._used.setdefault(choice.shape, _Use())
        use.steps += 1
        use.rows += sum(outcome.tokens > 0 for outcome in outcomes)
        use.tokens += sum(outcome.tokens for outcome in outcomes)
        use.seconds += seconds
        self._current = choice.shape
        self.learn(choice, outcomes, seconds)

    def state(self) -> SpeculationState:
        """For /server_info and /metrics."""
        return SpeculationState(
            adaptive=self.adaptive,
            current=self._current.name,
            disabled=self.disabled,
            shapes={shape.name: use.summary() for shape, use in self._used.items()},
        )


def shape_policy(config: EngineConfig) -> ShapePolicy:
    shape = config.tree_shape
    if config.speculative_adaptive and shape != PLAIN:
        return AdaptiveShape(shape)
    return FixedShape(shape)


class FixedShape(ShapePolicy):
    """Always the same."""

    adaptive = False

    def __init__(self, shape: TreeShape) -> None:
        super().__init__()
        self.shape = shape

    def choose(self, requests: Sequence[RequestDrafts], in_flight: Sequence[Choice]) -> Choice:
        return Choice(self.shape)

    def learn(self, choice: Choice, outcomes: Sequence[Outcome], seconds: float) -> None: ...


class AdaptiveShape(ShapePolicy):
    """The shape that makes most tokens a second, plain decoding among them.

    What is not known well is tried. Two accounts, in plain steps' time, bound what that costs;
    each grows by 1 % of the time that passes:

    ``ahead``: what speculation has won over plain decoding. Below 0 there is none, so that no
    wrong belief costs more (a conservative bandit, arXiv 1602.04282).
    ``budget``: pays for what trials lose against the best shape known.

    A drafter that hits next to nothing is given up: it follows one request of some, to be tried
    on, and the others cost no more than they do without a drafter.
    """

    adaptive = True

    def __init__(self, configured: TreeShape) -> None:
        super().__init__()
        self.shapes = candidates(configured)
        self.times = StepTimes()
        self.acceptance = Acceptance()
        self.usefulness = Usefulness()
        self.ahead = self.budget = INITIAL_CREDIT
        self._best = PLAIN
        self._trial = PLAIN
        self._trial_steps = 0  # of it, that are still to be chosen
        self._since_plain = 0  # steps of drafts
        self._missed = False  # the drafter has not been asked since a plain step
        self._unprobed = self._unprobed_steps = 0  # requests and steps since the last probe
        self._probe_trials = 0  # that are left
        self._held = HeldChoice()

    # ── choosing ─────────────────────────────────────────────────────────────────────────────

    @property
    def disabled(self) -> bool:  # type: ignore[override]
        return self.usefulness.none

    def admit(self, request: RequestDrafts) -> None:
        request.tracked, request.probe = True, False
        if self.disabled:
            self._unprobed += 1
            due = (
                self._unprobed >= PROBE_REQUEST_INTERVAL
                and self._unprobed_steps >= PROBE_STEP_INTERVAL
            )
            request.tracked = request.probe = due
        if request.tracked:
            self._unprobed = self._unprobed_steps = 0
            self._probe_trials = TRIALS_PER_PROBE

    def choose(self, requests: Sequence[RequestDrafts], in_flight: Sequence[Choice]) -> Choice:
        batch = len(requests)
        tracked = [request for request in requests if request.tracked]
        if self.disabled:
            self._unprobed_steps += 1
            for request in tracked:
                request.tracked = request.probe
        num_tracked = sum(request.tracked for request in tracked)
        if not self.times.has_samples(PLAIN) or not num_tracked:
            return self._chosen(Choice(PLAIN))
        if self._held.steps and self._held.requests == (batch, num_tracked):
            self._held.steps -= 1
            return self._chosen(Choice(self._best))
        total = sum(request.ratio for request in requests)
        quality = Quality(total / batch, total / num_tracked)
        odds = {shape: self._odds(shape, batch, quality) for shape in self.shapes}
        best = self._best = self._best_known(odds)
        trying = any(choice.trial for choice in in_flight)
        if not self._trial_steps and not trying:
            self._trial = self._worth_a_trial(odds, best)
            self._trial_steps = TRIAL_STEPS if self._trial != best else 0
            self._probe_trials -= self._trial != best
        if self._trial_steps:
            self._trial_steps -= 1
            return self._chosen(Choice(self._trial, trial=True, pace=1 / odds[best].rate))
        if self.usefulness.settled and (best == PLAIN or self.ahead > INITIAL_CREDIT):
            self._held = HeldChoice(RETHINK - 1, (batch, num_tracked))
        return self._chosen(Choice(best))

    def _chosen(self, choice: Choice) -> Choice:
        if choice.shape == PLAIN:
            self._since_plain, self._missed = 0, True
            return choice
        self._since_plain += 1
        catches_up, self._missed = self._missed, False
        return choice._replace(catches_up=catches_up)

    def _odds(self, shape: TreeShape, batch: int, quality: Quality) -> Odds:
        drafts = self.acceptance.of(shape)
        seconds, optimistic = self.times.of(shape, batch), self.times.optimistic(shape, batch)

        def tokens(accepted: float, quality: float) -> float:
            return batch * (1 + quality * max(accepted, 0.0))

        return Odds(
            rate=tokens(drafts.mean, quality.now) / seconds,
            low=tokens(drafts.mean - drafts.error, quality.now) / optimistic,
            high=tokens(drafts.mean + drafts.error, quality.tracked) / optimistic,
            plain_steps=optimistic / self.times.of(PLAIN, batch),
            is_reliable=self.times.has_samples(shape) and drafts.rows >= MIN_RELIABLE_ROWS,
        )

    def _best_known(self, odds: dict[TreeShape, Odds]) -> TreeShape:
        """Of what has been tried; the one in use unless plain decoding is better, or another
        clearly better."""
        if self.ahead < 0:
            return PLAIN
        known = {shape: each.rate for shape, each in odds.items() if each.is_reliable}
        best = max(known, key=lambda shape: known[shape])
        if best != PLAIN and known[best] < MARGIN * known.get(self._best, 0.0):
            return self._best
        return best

    def _worth_a_trial(self, odds: dict[TreeShape, Odds], best: TreeShape) -> TreeShape:
        """The shape that may be better than ``best`` by most, if it can be paid for."""
        if self.disabled and self._probe_trials <= 0:
            return best
        if best != PLAIN and self._since_plain >= TIME_PLAIN:
            return PLAIN if self._affordable(odds[PLAIN], odds, best) else best
        others = [shape for shape in odds if shape not in (PLAIN, best)]
        if self.disabled or not any(self.times.has_samples(shape) for shape in self.shapes[1:]):
            others = others[:1]  # the smallest: it tells most for its price
        chosen, hope = best, MARGIN * odds[best].rate
        for shape in others:
            if odds[shape].high > hope and self._affordable(odds[shape], odds, best):
                chosen, hope = shape, odds[shape].high
        return chosen

    def _affordable(self, trial: Odds, odds: dict[TreeShape, Odds], best: TreeShape) -> bool:
        """Even if it does badly, as far as can be told."""
        spent = TRIAL_STEPS * trial.plain_steps
        behind_best = spent * (1 - trial.low / odds[best].rate)
        behind_plain = spent * (1 - trial.low / odds[PLAIN].rate)
        return behind_best <= self.budget and behind_plain <= self.ahead

    # ── learning ─────────────────────────────────────────────────────────────────────────────

    def learn(self, choice: Choice, outcomes: Sequence[Outcome], seconds: float) -> None:
        shape, batch = choice.shape, len(outcomes)
        tokens = sum(outcome.tokens for outcome in outcomes)
        accepted: list[int] = []
        if shape != PLAIN:
            drafted = [each for each in outcomes if each.tokens and each.drafts.tracked]
            accepted = [outcome.tokens - 1 for outcome in drafted]
            expected = self.acceptance.of(shape).mean
            for outcome in drafted:
                outcome.drafts.observe(outcome.tokens - 1, expected)
            self.usefulness.observe(accepted)
        self.acceptance.observe(shape, accepted)
        if seconds <= 0:
            return
        seconds /= self.times.pace
        if shape != PLAIN:
            # n nodes and k drafting steps take no longer than n + k plain steps: what does is a
            # kernel that is being compiled
            seconds = min(seconds, self.times.of(PLAIN, batch) * (shape.nodes + shape.depth))
        usual = self.times.optimistic(shape, batch) if self.times.has_samples(PLAIN) else seconds
        if not choice.catches_up:
            self.times.observe(shape, batch, seconds)
        # a stall is nobody's fault
        self._pay(choice, tokens, batch, min(seconds, 2 * usual))

    def _pay(self, choice: Choice, tokens: int, batch: int, seconds: float) -> None:
        plain = self.times.of(PLAIN, batch)
        saved = EXPLORATION_SHARE * seconds / plain
        won = 0.0 if choice.shape == PLAIN else tokens / batch - seconds / plain
        lost = (seconds - tokens * choice.pace) / plain if choice.trial else 0.0
        self.ahead = min(self.ahead + saved + won, SAVINGS)
        self.budget = min(self.budget + saved - lost, SAVINGS)


@dataclass
class HeldChoice:
    """A choice that is made for so many steps more, of a batch of the same size."""

    steps: int = 0
    requests: tuple[int, int] = (0, 0)  # all, and those that are tracked


class Quality(NamedTuple):
    """Of the requests' drafts, compared with all there were."""

    now: float
    tracked: float  # if all were tracked as some are


@dataclass(frozen=True)
class Odds:
    """Tokens a second of a shape: what is expected, and how bad or good it may well be."""

    rate: float
    low: float
    high: float  # if all requests were tracked
    plain_steps: float  # time of a step
    is_reliable: bool


@dataclass
class _Use:
    steps: int = 0
    rows: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def summary(self) -> ShapeUse:
        return ShapeUse(
            steps=self.steps,
            accept_length=self.tokens / max(self.rows, 1),
            step_ms=1000 * self.seconds / self.steps,
        )
