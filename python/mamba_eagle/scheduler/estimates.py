"""What decode steps cost and what drafts bring, as far as the steps so far tell. No clocks."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from mamba_eagle.core import PLAIN, TreeShape

WINDOW = 9  # step times that a median is taken of
SETTLED = 2  # step times that are believed
PACE_SMOOTHING = 0.5  # how much of what a step was slower than expected goes into the pace, …
MAX_SLOWDOWN = 1.5  # … of so much at most
FIRST_GUESS = 0.25  # of a plain step: what a node or a drafting step adds, before any is measured
PRIOR_RATE = 0.6  # share of drafted tokens that are accepted, before any is seen, …
PRIOR_TRIALS = 4.0  # … and how many trials that is worth
MAX_ROWS = 256.0  # the memory of a running mean
STALE = 200  # steps of others after which a step time may have been that of a bad moment
UNSEEN = 100.0  # plain steps, and …
UNUSED = 500.0  # … steps of other shapes after which what is known counts 1/e
REQUEST_STEPS = 32.0  # the memory of what one request's drafts did
MIN_USEFUL_DRAFTS = 0.1  # accepted drafts of a row; a drafter that has fewer is given up
USEFUL_ROWS = 64.0  # the memory of that
MIN_ROWS_TO_DISABLE = 8  # rows before it is said
PRIOR_DRAFTS = 8.0  # drafts for which a request is taken to be like the others


class StepTimes:
    """Seconds of a decode step, by shape and number of requests, at the machine's usual pace.

    Lower medians of the last few: one kernel's compilation or one stall moves none of them.

    ``pace`` is how slow the machine is just now compared with them, as when others use it too. It
    concerns all shapes alike: none looks bad for having been measured in a bad moment. Medians of
    a shape move where it takes turns with others; while it is run again and again only the pace
    follows, since nothing tells a machine that has become slower from a shape that has.
    """

    def __init__(self) -> None:
        self.pace = 1.0
        self._recent: dict[tuple[TreeShape, int], deque[float]] = {}
        self._median: dict[TreeShape, dict[int, float]] = {}
        self._last, self._again = PLAIN, 0
        self._steps = 0
        self._when: dict[tuple[TreeShape, int], int] = {}  # the step it was last measured in

    def has_samples(self, shape: TreeShape) -> bool:
        return shape in self._median

    def observe(self, shape: TreeShape, batch: int, seconds: float) -> None:
        """``seconds`` as measured, divided by ``pace``."""
        self._steps += 1
        self._when[shape, batch] = self._steps
        self._again = self._again + 1 if shape == self._last else 0
        self._last = shape
        window = self._recent.setdefault((shape, batch), deque(maxlen=WINDOW))
        medians = self._median.setdefault(shape, {})
        settled = len(window) >= SETTLED
        if settled:
            slower = seconds / medians[batch]
            self.pace *= min(max(slower, 1 / MAX_SLOWDOWN), MAX_SLOWDOWN) ** PACE_SMOOTHING
        if len(window) < WINDOW or self._again < SETTLED:
            window.append(seconds)
            medians[batch] = sorted(window)[(len(window) - 1) // 2]

    def of(self, shape: TreeShape, batch: int) -> float:
        """Measured, or guessed from other batch sizes or shapes; plain must have been measured."""
        if shape == PLAIN:
            return self._measured(PLAIN, batch)
        known = self._median.get(shape)
        if known is None:
            return self._guessed(shape, batch)
        if not min(known) <= batch <= max(known) and self._others(shape, batch):
            return self._guessed(shape, batch)
        # a plain step does a part of what every other does
        return max(self._measured(shape, batch), self._measured(PLAIN, batch))

    def optimistic(self, shape: TreeShape, batch: int) -> float:
        """The same, or less if it was measured seldom or long ago and others let hope for less."""
        seconds, key = self.of(shape, batch), (shape, batch)
        if shape == PLAIN or not self.has_samples(shape):
            return seconds
        if len(self._recent.get(key, ())) >= SETTLED and self._is_fresh(shape, batch):
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
        if shape != PLAIN:  # grows as plain steps do
            return known[nearest] * self.of(PLAIN, batch) / self.of(PLAIN, nearest)
        # between a step bound by the weights it reads (no growth) and one bound by arithmetic
        return known[nearest] * math.sqrt(batch / nearest)

    def _others(self, shape: TreeShape, batch: int) -> list[TreeShape]:
        """Shapes with drafts that were measured at this batch size."""
        others = [
            other
            for other, known in self._median.items()
            if other not in (PLAIN, shape) and batch in known
        ]
        return [other for other in others if self._is_fresh(other, batch)] or others

    def _is_fresh(self, shape: TreeShape, batch: int) -> bool:
        """Measured lately, so that it may be compared with what is measured now."""
        return self._steps - self._when[shape, batch] < STALE

    def _guessed(self, shape: TreeShape, batch: int) -> float:
        """What a shape costs beyond a plain step grows with its nodes and drafting steps."""
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
    """How well one request's drafts do, compared with those of all."""

    tracked: bool = True  # by the drafter; if not, nothing is expected of its drafts
    probe: bool = False  # to see whether a drafter that was given up has become of use
    accepted: float = 0.0
    expected: float = 0.0

    @property
    def ratio(self) -> float:
        if not self.tracked:
            return 0.0
        return (self.accepted + PRIOR_DRAFTS) / (self.expected + PRIOR_DRAFTS)

    def observe(self, accepted: int, expected: float) -> None:
        keep = 1 - 1 / REQUEST_STEPS
        self.accepted = keep * self.accepted + accepted
        self.expected = keep * self.expected + expected


class Usefulness:
    """Whether a drafter is worth its costs whatever they are: its own passes over prompts and
    accepted tokens come on top of what a step's time tells."""

    def __init__(self) -> None:
        self.rows = self.accepted = 0.0

    def observe(self, accepted: list[int]) -> None:
        """Accepted drafts of the rows of a step of drafts."""
        for each in accepted:
            self.rows += 1
            self.accepted += each
        if self.rows > USEFUL_ROWS:
            self.accepted *= USEFUL_ROWS / self.rows
            self.rows = USEFUL_ROWS

    @property
    def settled(self) -> bool:
        """The memory is full."""
        return self.rows >= USEFUL_ROWS

    @property
    def none(self) -> bool:
        """Even if drafts cost nothing, there would be next to nothing to win."""
        return self.rows >= MIN_ROWS_TO_DISABLE and self.accepted < MIN_USEFUL_DRAFTS * self.rows


class Expected(NamedTuple):
    """Accepted drafts of a request in a step."""

    mean: float
    error: float  # of the mean, one standard deviation
    rows: float  # that it was learned from


@dataclass
class _Depth:
    """Drafts at one depth, in trees of one kind."""

    rows: float = 0.0  # whose trees were as deep
    trials: float = 0.0  # of them accepted all above it
    rate: float = 0.0  # of these accepted it as well

    def observe(self, rows: int, trials: int, accepted: int) -> None:
        self.rows = min(self.rows + rows, max(MAX_ROWS, rows))
        if trials:
            self.trials = min(self.trials + trials, max(MAX_ROWS, trials))
            self.rate += (accepted - trials * self.rate) / self.trials

    def forget(self, steps: float) -> None:
        self.rows *= 1 - 1 / steps
        self.trials *= 1 - 1 / steps


class Acceptance:
    """Accepted drafts of a row, by shape, from the rates at each depth.

    Chains share their rates, each tree has its own. Where a depth has few trials, one rate counts
    that is common to all shapes and depths; k lanes fail together with probability
    (1 - rate) ** (1 + log2(k) / 2), as the top-k accuracies of draft heads roughly do.
    """

    def __init__(self) -> None:
        self.rate = PRIOR_RATE
        self.trials = 0.0
        self._depths: dict[tuple[TreeShape, int], _Depth] = {}

    def of(self, shape: TreeShape) -> Expected:
        if shape == PLAIN:
            return Expected(0.0, 0.0, MAX_ROWS)
        weight = self.trials + PRIOR_TRIALS
        rate = (self.trials * self.rate + PRIOR_TRIALS * PRIOR_RATE) / weight
        common = 1 - (1 - rate) ** _width(shape)
        reached, mean, square, rows = 1.0, 0.0, 0.0, MAX_ROWS
        for number in range(1, shape.depth + 1):
            depth = self._depths.get((_kind(shape), number), _Depth())
            weight = depth.trials + PRIOR_TRIALS
            reached *= (depth.trials * depth.rate + PRIOR_TRIALS * common) / weight
            mean += reached
            square += (2 * number - 1) * reached
            rows = min(rows, depth.rows)
        variance = max(square - mean * mean, 0.0)
        return Expected(mean, math.sqrt(variance / (1 + rows + min(self.trials / 4, 4.0))), rows)

    def observe(self, shape: TreeShape, accepted: list[int]) -> None:
        """Accepted drafts of each row of a step."""
        kind, steps = _kind(shape), UNSEEN if shape == PLAIN else UNUSED
        for (other, number), depth in self._depths.items():
            if other != kind or number > shape.depth:
                depth.forget(steps)
        if shape == PLAIN:
            self.trials *= 1 - 1 / UNSEEN
        if shape == PLAIN or not accepted:
            return
        reached = [sum(each >= number for each in accepted) for number in range(shape.depth + 1)]
        for number in range(1, shape.depth + 1):
            depth = self._depths.setdefault((kind, number), _Depth())
            depth.observe(len(accepted), reached[number - 1], reached[number])
        trials, total = sum(reached[:-1]), sum(reached[1:])
        self.trials = min(self.trials + trials, max(MAX_ROWS, trials))
        self.rate += (total - trials * (1 - (1 - self.rate) ** _width(shape))) / self.trials
        self.rate = min(max(self.rate, 0.0), 1.0)


def _kind(shape: TreeShape) -> TreeShape:
    return shape if shape.topk > 1 else PLAIN


def _width(shape: TreeShape) -> float:
    lanes = min(shape.topk, (shape.nodes - 1) / shape.depth)
    return 1 + math.log2(max(lanes, 1.0)) / 2
