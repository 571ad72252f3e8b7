"""Which tree the next decode step drafts, if any: decided by measured step times and acceptance."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mamba_eagle.config import DraftSettings
from mamba_eagle.core import PLAIN, TreeShape
from mamba_eagle.message import ShapeUse, SpeculationState
from mamba_eagle.scheduler.estimates import Acceptance, RequestDrafts, StepTimes, Usefulness
from mamba_eagle.tree.shapes import step_shapes

EXPLORATION_SHARE = 0.01  # fraction of decode time that trial steps may cost
INITIAL_CREDIT = 2.0  # plain-step times granted before anything is measured
MAX_CREDIT = 12.0  # plain-step times that either account may hold
TRIAL_STEPS = 2  # steps per trial; the first may include catching up after plain steps
MIN_ADVANTAGE = 1.02  # ratio of rates at which another shape replaces the one in use
MIN_RELIABLE_SAMPLES = 4  # samples needed before a shape's estimates count as known
PROBE_REQUEST_INTERVAL = 16  # fewest requests admitted from one probe to the next
PROBE_STEP_INTERVAL = 800  # fewest decode steps from one probe to the next
TRIALS_PER_PROBE = 2  # trials of the smallest shape on each probe
STEPS_PER_CHOICE = 4  # steps for which a settled choice stands; choosing takes 50 to 100 us
PLAIN_INTERVAL = 128  # steps with drafts after which a plain step is timed again


class Choice(NamedTuple):
    """What a step drafts, and why."""

    shape: TreeShape
    trial: bool = False  # made to learn about a shape: a better one is known
    pace: float = 0.0  # of a trial: seconds per token of that better shape
    catches_up: bool = False  # the drafter first processes tokens that plain steps made
    untracked: Sequence[int] = ()  # places of the requests that the drafter shall stop following


class Outcome(NamedTuple):
    """What a step did for one request."""

    drafts: RequestDrafts
    tokens: int  # 0: the request had ended before the step


class ShapePolicy(ABC):
    """Chooses the shape of every decode step, and learns the outcome of each, in order.

    The next step may be chosen before the outcome of the last one is known. Choosing changes no
    request: a request's ``RequestDrafts`` change in ``admit``, ``untrack`` and ``observe`` only,
    which report what has happened.
    """

    adaptive: bool
    disabled = False  # whether drafting is off because too few drafts are accepted

    def __init__(self) -> None:
        self._current = PLAIN
        self._used: dict[TreeShape, _Use] = {}

    def tracks_next(self, catches_up: bool) -> bool:
        """Whether the next request that is admitted is tracked. catches_up: the drafter follows, or
        will have followed, all that comes before."""
        return True

    def admit(self, request: RequestDrafts, catches_up: bool = True) -> None:
        """A request's prompt is about to be processed: tracks it if ``tracks_next`` says so."""
        request.tracked = self.tracks_next(catches_up)

    def untrack(self, request: RequestDrafts) -> None:
        """The plan that untracks the request, as a ``Choice`` asked for, is sent."""
        request.tracked = False

    @abstractmethod
    def choose(self, requests: Sequence[RequestDrafts], in_flight: Sequence[Choice]) -> Choice:
        """For a step of these requests, at least one, to be sent after the steps ``in_flight``."""

    @abstractmethod
    def learn(self, choice: Choice, outcomes: Sequence[Outcome], seconds: float) -> None:
        """A step has ended that took ``seconds`` (0: not measured)."""

    def observe(self, choice: Choice, outcomes: Sequence[Outcome], seconds: float) -> None:
        """As ``learn``, and counts the step for ``state``."""
        use = self._used.setdefault(choice.shape, _Use())
        use.steps += 1
        use.samples += sum(outcome.tokens > 0 for outcome in outcomes)
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


def shape_policy(config: DraftSettings) -> ShapePolicy:
    shape = config.tree_shape
    if config.speculative_adaptive and shape != PLAIN:
        return AdaptiveShape(shape)
    return FixedShape(shape)


class FixedShape(ShapePolicy):
    """Always the same shape."""

    adaptive = False

    def __init__(self, shape: TreeShape) -> None:
        super().__init__()
        self.shape = shape

    def choose(self, requests: Sequence[RequestDrafts], in_flight: Sequence[Choice]) -> Choice:
        return Choice(self.shape)

    def learn(self, choice: Choice, outcomes: Sequence[Outcome], seconds: float) -> None: ...


class AdaptiveShape(ShapePolicy):
    """The shape that makes the most tokens per second; plain decoding is one of them.

    Shapes that are not known well are tried. Two accounts, in plain-step times, bound what this
    costs. Each earns ``EXPLORATION_SHARE`` of the time that passes:

    ``ahead``: what speculation has won over plain decoding so far. Below 0 nothing is drafted, so
    a wrong estimate cannot cost more than the account (a conservative bandit, arXiv 1602.04282).
    ``budget``: pays for what trials lose against the best known shape.

    A drafter whose drafts are hardly ever accepted is *disabled*. From then on it follows only one
    request now and then, a probe, on which trials are made. All other requests cost what they
    would cost without a drafter.
    """

    adaptive = True

    def __init__(self, configured: TreeShape) -> None:
        super().__init__()
        self.shapes = step_shapes(configured, adaptive=True)
        self.times = StepTimes()
        self.acceptance = Acceptance()
        self.usefulness = Usefulness()
        self.ahead = self.budget = INITIAL_CREDIT
        self._best = PLAIN
        self._trial = PLAIN
        self._trial_steps = 0  # steps of the trial that are still to be chosen
        self._since_plain = 0  # steps with drafts since the last plain one
        self._behind = False  # the drafter has not seen the tokens of the latest plain steps
        self._requests_since_probe = self._steps_since_probe = 0
        self._probe_trials = 0  # trials left on the current probe
        # the latest choice stands for some more steps while the batch stays the same
        self._held_steps, self._held_for = 0, (0, 0)  # requests, and those that are tracked

    # ── choosing ─────────────────────────────────────────────────────────────────────────────

    @property
    def disabled(self) -> bool:  # type: ignore[override]
        return self.usefulness.none

    def tracks_next(self, catches_up: bool) -> bool:
        """A probe that lacks what came before would say nothing about the drafter."""
        if not self.disabled:
            return True
        return (
            catches_up
            and self._requests_since_probe >= PROBE_REQUEST_INTERVAL - 1
            and self._steps_since_probe >= PROBE_STEP_INTERVAL
        )

    def admit(self, request: RequestDrafts, catches_up: bool = True) -> None:
        super().admit(request, catches_up)
        request.probe = request.tracked and self.disabled
        if self.disabled:
            self._requests_since_probe += 1
        if request.tracked:
            self._requests_since_probe = self._steps_since_probe = 0
            self._probe_trials = TRIALS_PER_PROBE

    def choose(self, requests: Sequence[RequestDrafts], in_flight: Sequence[Choice]) -> Choice:
        tracked = [each for each in requests if each.tracked]
        untracked: Sequence[int] = ()
        if self.disabled:
            self._steps_since_probe += 1
            untracked = [i for i, each in enumerate(requests) if each.tracked and not each.probe]
            tracked = [each for each in tracked if each.probe]
        choice = self._choice(len(requests), tracked, in_flight)
        if choice.shape == PLAIN:
            self._since_plain, self._behind = 0, True
        else:
            self._since_plain += 1
            choice = choice._replace(catches_up=self._behind)
            self._behind = False
        return choice._replace(untracked=untracked)

    def _choice(
        self, batch: int, tracked: Sequence[RequestDrafts], in_flight: Sequence[Choice]
    ) -> Choice:
        if not self.times.has_samples(PLAIN) or not tracked:
            return Choice(PLAIN)
        if self._held_steps and self._held_for == (batch, len(tracked)):
            self._held_steps -= 1
            return Choice(self._best)
        total = sum(request.ratio for request in tracked)
        quality = Quality(total / batch, total / len(tracked))
        odds = {shape: self._odds(shape, batch, quality) for shape in self.shapes}
        best = self._best = self._best_known(odds)
        trial_in_flight = any(choice.trial for choice in in_flight)
        if not self._trial_steps and not trial_in_flight:
            self._trial = self._worth_a_trial(odds, best)
            self._trial_steps = TRIAL_STEPS if self._trial != best else 0
            self._probe_trials -= self._trial != best
        if self._trial_steps:
            self._trial_steps -= 1
            return Choice(self._trial, trial=True, pace=1 / odds[best].rate)
        if self.usefulness.settled and (best == PLAIN or self.ahead > INITIAL_CREDIT):
            self._held_steps, self._held_for = STEPS_PER_CHOICE - 1, (batch, len(tracked))
        return Choice(best)

    def _odds(self, shape: TreeShape, batch: int, quality: Quality) -> Odds:
        drafts = self.acceptance.of(shape)
        seconds, optimistic = self.times.of(shape, batch), self.times.optimistic(shape, batch)

        def tokens(accepted: float, quality: float) -> float:
            return batch * (1 + quality * max(accepted, 0.0))

        is_known = self.times.has_samples(shape) and drafts.samples >= MIN_RELIABLE_SAMPLES
        return Odds(
            rate=tokens(drafts.mean, quality.now) / seconds,
            low=tokens(drafts.mean - drafts.error, quality.now) / optimistic,
            high=tokens(drafts.mean + drafts.error, quality.if_all_tracked) / optimistic,
            plain_steps=optimistic / self.times.of(PLAIN, batch),
            is_reliable=is_known,
        )

    def _best_known(self, odds: dict[TreeShape, Odds]) -> TreeShape:
        """The best shape with reliable estimates. The one in use stays unless plain decoding is
        better or another shape is clearly better."""
        if self.ahead < 0:
            return PLAIN
        known = {shape: each.rate for shape, each in odds.items() if each.is_reliable}
        best = max(known, key=lambda shape: known[shape])
        if best != PLAIN and known[best] < MIN_ADVANTAGE * known.get(self._best, 0.0):
            return self._best
        return best

    def _worth_a_trial(self, odds: dict[TreeShape, Odds], best: TreeShape) -> TreeShape:
        """The shape that may exceed ``best`` by most, among those whose trial is affordable;
        ``best`` if there is none."""
        if self.disabled and self._probe_trials <= 0:
            return best
        if best != PLAIN and self._since_plain >= PLAIN_INTERVAL:
            return PLAIN if self._affordable(odds[PLAIN], odds, best) else best
        others = [shape for shape in odds if shape not in (PLAIN, best)]
        if self.disabled or not any(self.times.has_samples(shape) for shape in self.shapes[1:]):
            others = others[:1]  # the smallest: it teaches most for what it costs
        chosen, to_beat = best, MIN_ADVANTAGE * odds[best].rate
        for shape in others:
            if odds[shape].high > to_beat and self._affordable(odds[shape], odds, best):
                chosen, to_beat = shape, odds[shape].high
        return chosen

    def _affordable(self, trial: Odds, odds: dict[TreeShape, Odds], best: TreeShape) -> bool:
        """Both accounts can pay for a trial even if the shape does as badly as it may."""
        spent = TRIAL_STEPS * trial.plain_steps
        loss_to_best = spent * (1 - trial.low / odds[best].rate)
        loss_to_plain = spent * (1 - trial.low / odds[PLAIN].rate)
        return loss_to_best <= self.budget and loss_to_plain <= self.ahead

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
            # n nodes and k drafting steps take no longer than n + k plain steps. If they did, a
            # kernel was being compiled.
            seconds = min(seconds, self.times.of(PLAIN, batch) * (shape.nodes + shape.depth))
        usual = self.times.optimistic(shape, batch) if self.times.has_samples(PLAIN) else seconds
        if not choice.catches_up:
            self.times.observe(shape, batch, seconds)
        # a stall says nothing about the shape
        self._pay(choice, tokens, batch, min(seconds, 2 * usual))

    def _pay(self, choice: Choice, tokens: int, batch: int, seconds: float) -> None:
        plain = self.times.of(PLAIN, batch)
        earned = EXPLORATION_SHARE * seconds / plain
        won = 0.0 if choice.shape == PLAIN else tokens / batch - seconds / plain
        lost = (seconds - tokens * choice.pace) / plain if choice.trial else 0.0
        self.ahead = min(self.ahead + earned + won, MAX_CREDIT)
        self.budget = min(self.budget + earned - lost, MAX_CREDIT)


class Quality(NamedTuple):
    """Accepted drafts of the requests at hand, relative to the average over all requests."""

    now: float
    if_all_tracked: float  # if untracked requests were tracked and did as well as the others


@dataclass(frozen=True)
class Odds:
    """Tokens per second of a shape: expected, and within the error of the estimates."""

    rate: float
    low: float
    high: float  # if all requests were tracked
    plain_steps: float  # duration of a step, in plain-step times
    is_reliable: bool


@dataclass
class _Use:
    steps: int = 0
    samples: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def summary(self) -> ShapeUse:
        return ShapeUse(
            steps=self.steps,
            accept_length=self.tokens / max(self.samples, 1),
            step_ms=1000 * self.seconds / self.steps,
        )
