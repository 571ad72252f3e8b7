"""What decode steps cost and how many drafts are accepted, learned from past steps. No clocks.

A *sample* is what one decode step did for one request.
"""

import math
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from mamba_eagle.core import PLAIN, TreeShape

WINDOW = 9  # step times per median
MIN_TIMES = 2  # step times needed before a median is trusted
PACE_SMOOTHING = 0.5  # exponent applied to (measured / expected) step time
MAX_SLOWDOWN = 1.5  # limit on that ratio, in either direction
FIRST_GUESS = 0.25  # plain-step times added per node and per drafting step before any is measured
PRIOR_RATE = 0.6  # acceptance rate assumed before any draft is seen
PRIOR_TRIALS = 4.0  # number of trials that the assumed rate counts for
MAX_SAMPLES = 256.0  # memory of a running mean
LATE_STEPS = 300  # a median is of the measurements of these steps alone
MIN_LATE_TIMES = 4  # if there are that many: those of two trials
STALE_STEPS = 200  # steps after which a step time may describe a machine that has changed since
PLAIN_DECAY = 100.0  # plain steps after which an acceptance rate keeps 1/e of its weight
OTHER_DECAY = 500.0  # the same for steps of other shapes
REQUEST_MEMORY = 32.0  # steps over which one request's acceptance is averaged
MIN_USEFUL_DRAFTS = 0.1  # accepted drafts per sample; below this the drafter is disabled
USEFULNESS_SAMPLES = 64.0  # samples over which that mean is taken
MIN_SAMPLES_TO_DISABLE = 8  # samples needed before the drafter may be disabled
PRIOR_DRAFTS = 8.0  # drafts for which a request is assumed to be like the others


class _Measured(NamedTuple):
    seconds: float
    step: int  # the step's number


class StepTimes:
    """Seconds per decode step, by shape and number of requests, at the machine's usual pace.

    Each estimate is the lower median of the last few measurements, so that one kernel compilation
    or one stall changes none of them. If several are recent, only these count: what a step takes
    relative to a plain one changes with the experts that its tokens choose.

    ``pace`` is the current slowdown of the machine, for example while other programs use it. The
    pace applies to all shapes, so a shape is not penalised for being measured while the machine
    was slow. Medians are updated only when shapes alternate; otherwise a slow machine looks
    like a slow shape, and only the pace follows.
    """

    def __init__(self) -> None:
        self.pace = 1.0
        self._recent: dict[tuple[TreeShape, int], deque[_Measured]] = {}
        self._median: dict[TreeShape, dict[int, float]] = {}  # by shape, then batch size
        self._last_shape = PLAIN
        self._repeats = 0  # times the last shape was run again without another in between
        self._steps = 0
        self._measured_at: dict[tuple[TreeShape, int], int] = {}  # number of its latest step

    def has_samples(self, shape: TreeShape) -> bool:
        return shape in self._median

    def observe(self, shape: TreeShape, batch: int, seconds: float) -> None:
        """``seconds``: the measured time divided by ``pace``."""
        self._steps += 1
        self._measured_at[shape, batch] = self._steps
        self._repeats = self._repeats + 1 if shape == self._last_shape else 0
        self._last_shape = shape
        window = self._recent.setdefault((shape, batch), deque(maxlen=WINDOW))
        medians = self._median.setdefault(shape, {})
        if len(window) >= MIN_TIMES:
            slowdown = seconds / medians[batch]
            self.pace *= min(max(slowdown, 1 / MAX_SLOWDOWN), MAX_SLOWDOWN) ** PACE_SMOOTHING
        if len(window) < WINDOW or self._repeats < MIN_TIMES:
            window.append(_Measured(seconds, self._steps))
            late = [each for each in window if self._steps - each.step < LATE_STEPS]
            known = sorted(late if len(late) >= MIN_LATE_TIMES else window)
            medians[batch] = known[(len(known) - 1) // 2].seconds

    def of(self, shape: TreeShape, batch: int) -> float:
        """Measured, or estimated from other batch sizes or shapes.

        Plain steps must have been measured.
        """
        if shape == PLAIN:
            return self._measured(PLAIN, batch)
        known = self._median.get(shape)
        if known is None:
            return self._guessed(shape, batch)
        if not min(known) <= batch <= max(known) and self._others(shape, batch):
            return self._guessed(shape, batch)
        # every other step includes the work of a plain step
        return max(self._measured(shape, batch), self._measured(PLAIN, batch))

    def optimistic(self, shape: TreeShape, batch: int) -> float:
        """As ``of``; but for a shape with few or old measurements, the estimate from other shapes
        if that is lower."""
        seconds, key = self.of(shape, batch), (shape, batch)
        if shape == PLAIN or not self.has_samples(shape):
            return seconds
        if len(self._recent.get(key, ())) >= MIN_TIMES and self._is_fresh(shape, batch):
            return seconds
        return min(seconds, self._guessed(shape, batch))

    def _measured(self, shape: TreeShape, batch: int) -> float:
        """From the batch sizes nearest to this one."""
        known = self._median[shape]
        if batch in known:
            return known[batch]
        sizes = sorted(known)
        place = bisect_left(sizes, batch)
        if 0 < place < len(sizes):
            low, high = sizes[place - 1], sizes[place]
            return known[low] + (known[high] - known[low]) * (batch - low) / (high - low)
        nearest = sizes[0] if place == 0 else sizes[-1]
        if shape != PLAIN:  # assumed to grow as plain steps do
            return known[nearest] * self.of(PLAIN, batch) / self.of(PLAIN, nearest)
        # between a step that is bound by reading weights (no growth) and one bound by arithmetic
        return known[nearest] * math.sqrt(batch / nearest)

    def _others(self, shape: TreeShape, batch: int) -> list[TreeShape]:
        """Other shapes with drafts that were measured at this batch size."""
        others = [
            other
            for other, known in self._median.items()
            if other not in (PLAIN, shape) and batch in known
        ]
        return [other for other in others if self._is_fresh(other, batch)] or others

    def _is_fresh(self, shape: TreeShape, batch: int) -> bool:
        """Measured recently enough to be compared with what is measured now."""
        return self._steps - self._measured_at[shape, batch] < STALE_STEPS

    def _guessed(self, shape: TreeShape, batch: int) -> float:
        """A plain step, plus a part that is proportional to the number of nodes and drafting
        steps."""
        plain, size = self._measured(PLAIN, batch), _size(shape)
        others = self._others(shape, batch)
        others = others or [other for other in self._median if other not in (PLAIN, shape)]
        if not others:
            return plain * (1 + FIRST_GUESS * size)
        nearest = min(others, key=lambda other: abs(math.log(_size(other) / size)))
        extra = max(self._measured(nearest, batch) - plain, 0.0)
        return plain + extra * size / _size(nearest)


def _size(shape: TreeShape) -> int:
    return shape.nodes - 1 + shape.depth


@dataclass
class RequestDrafts:
    """Whether the drafter follows a request, and how well its drafts do.

    Changed by the ``ShapePolicy`` alone.
    """

    tracked: bool = True  # by the drafter; nothing is expected of an untracked request's drafts
    probe: bool = False  # tracked to find out whether a disabled drafter has become useful
    accepted: float = 0.0  # drafts, a decaying sum
    expected: float = 0.0  # drafts that requests on average would have had accepted

    @property
    def ratio(self) -> float:
        """Accepted drafts relative to an average request."""
        return (self.accepted + PRIOR_DRAFTS) / (self.expected + PRIOR_DRAFTS)

    def observe(self, accepted: int, expected: float) -> None:
        keep = 1 - 1 / REQUEST_MEMORY
        self.accepted = keep * self.accepted + accepted
        self.expected = keep * self.expected + expected


class Usefulness:
    """Whether a drafter could pay for itself whatever a step costs.

    Its passes over prompts and over tokens accepted from plain steps are not part of any step's
    measured time.
    """

    def __init__(self) -> None:
        self.samples = self.accepted = 0.0

    def observe(self, accepted: list[int]) -> None:
        """accepted: drafts per sample, of one step with drafts."""
        for each in accepted:
            self.samples += 1
            self.accepted += each
        if self.samples > USEFULNESS_SAMPLES:
            self.accepted *= USEFULNESS_SAMPLES / self.samples
            self.samples = USEFULNESS_SAMPLES

    @property
    def settled(self) -> bool:
        """The mean covers its full memory."""
        return self.samples >= USEFULNESS_SAMPLES

    @property
    def none(self) -> bool:
        """There would be next to nothing to gain even if drafts cost nothing."""
        enough = self.samples >= MIN_SAMPLES_TO_DISABLE
        return enough and self.accepted < MIN_USEFUL_DRAFTS * self.samples


class Expected(NamedTuple):
    """Accepted drafts per sample."""

    mean: float
    error: float  # one standard deviation of the mean
    samples: float  # from which it was learned


@dataclass
class _Depth:
    """Drafts at one depth, in trees of one kind."""

    samples: float = 0.0  # of trees at least this deep
    trials: float = 0.0  # samples that accepted every depth above
    rate: float = 0.0  # share of the trials that accepted this depth as well

    def observe(self, samples: int, trials: int, accepted: int) -> None:
        self.samples = min(self.samples + samples, max(MAX_SAMPLES, samples))
        if trials:
            self.trials = min(self.trials + trials, max(MAX_SAMPLES, trials))
            self.rate += (accepted - trials * self.rate) / self.trials

    def forget(self, steps: float) -> None:
        self.samples *= 1 - 1 / steps
        self.trials *= 1 - 1 / steps


class Acceptance:
    """Accepted drafts per sample, by shape, from the acceptance rates at each depth.

    Chains share their rates; each tree has rates of its own. Where a depth has few trials, one
    rate common to all shapes and depths fills in. For it, k lanes are assumed to fail together
    with probability (1 - rate) ** (1 + log2(k) / 2), a rough fit to the top-k accuracies of draft
    heads.
    """

    def __init__(self) -> None:
        self.rate = PRIOR_RATE
        self.trials = 0.0
        self._depths: dict[tuple[TreeShape, int], _Depth] = {}

    def of(self, shape: TreeShape) -> Expected:
        if shape == PLAIN:
            return Expected(0.0, 0.0, MAX_SAMPLES)
        weight = self.trials + PRIOR_TRIALS
        rate = (self.trials * self.rate + PRIOR_TRIALS * PRIOR_RATE) / weight
        common = 1 - (1 - rate) ** _width(shape)
        reached, mean, square, samples = 1.0, 0.0, 0.0, MAX_SAMPLES
        for number in range(1, shape.depth + 1):
            depth = self._depths.get((_kind(shape), number), _Depth())
            weight = depth.trials + PRIOR_TRIALS
            reached *= (depth.trials * depth.rate + PRIOR_TRIALS * common) / weight
            mean += reached
            square += (2 * number - 1) * reached
            samples = min(samples, depth.samples)
        variance = max(square - mean * mean, 0.0)
        error = math.sqrt(variance / (1 + samples + min(self.trials / 4, 4.0)))
        return Expected(mean, error, samples)

    def observe(self, shape: TreeShape, accepted: list[int]) -> None:
        """accepted: drafts per sample, of one step."""
        kind, decay = _kind(shape), PLAIN_DECAY if shape == PLAIN else OTHER_DECAY
        for (other, number), depth in self._depths.items():
            if other != kind or number > shape.depth:
                depth.forget(decay)
        if shape == PLAIN:
            self.trials *= 1 - 1 / PLAIN_DECAY
        if shape == PLAIN or not accepted:
            return
        reached = [sum(each >= number for each in accepted) for number in range(shape.depth + 1)]
        for number in range(1, shape.depth + 1):
            depth = self._depths.setdefault((kind, number), _Depth())
            depth.observe(len(accepted), reached[number - 1], reached[number])
        trials, total = sum(reached[:-1]), sum(reached[1:])
        self.trials = min(self.trials + trials, max(MAX_SAMPLES, trials))
        self.rate += (total - trials * (1 - (1 - self.rate) ** _width(shape))) / self.trials
        self.rate = min(max(self.rate, 0.0), 1.0)


def _kind(shape: TreeShape) -> TreeShape:
    return shape if shape.topk > 1 else PLAIN


def _width(shape: TreeShape) -> float:
    lanes = min(shape.topk, (shape.nodes - 1) / shape.depth)
    return 1 + math.log2(max(lanes, 1.0)) / 2
