"""How many prompt tokens are run per step beside decoding requests, so that streams flow evenly.

A step lasts as long as its decoding and its prompts together, and every stream waits for it. What a
client notices are the steps that last longer than most. If all prompts were spread evenly, every
step would run the mean number of prompt tokens. So beside decoding requests a step may last
``MAX_RATIO`` times as long as such an even step. If it could last twice as long, prompts would need
few of the steps: most would run none, and these few would last several times as long as most.
With d a step without prompts, m an even step and c the ratio, waiting prompts fill the share
``(m - d) / (c m - d)`` of steps. Either that is more than half, and the median step is a long one,
or ``c m / d`` is the ratio of long steps to the median. For no load that exceeds 2 if c is 4/3.

That is as long as time follows tokens. Where passes of few and of many tokens take the same, as
those that a host launches more slowly than the device executes them, long passes would need few of
the steps again. So none takes more tokens than leave prompts in ``MIN_FILL`` of all steps.

What is even is not known when many prompts come at once: these are spread over the steps in which a
stream makes ``BURST_TOKENS``, from the first of them until none waits.

A pass over prompts costs something however short they are: all weights are read, all kernels
launched. So no step is cut so short that its pass takes much longer per token than others.
"""

from __future__ import annotations

from collections import deque
from itertools import islice, pairwise
from statistics import median
from typing import NamedTuple

# Prompts' load is spread evenly over the steps in which a stream makes this many tokens. Requests
# make about as many: what comes once in the life of a request comes once in that time.
EVEN_TOKENS = 160
BURST_TOKENS = 108  # a burst is run within the steps in which a stream makes this many
WINDOW = 160  # steps that are remembered: one makes a token or more
RECENT = 5  # decode steps whose median is taken for the next one
MAX_RATIO = 1.3  # of a step's time to an even step's; 4/3 would leave nothing for noise
MIN_FILL = 0.55  # of steps have prompts, if passes are worth it: the median step is one of these
MIN_SHARE = 0.8  # of a step's prompts to its decoding, in time, that disturbs no one
MAX_SHARE = 6.0  # of the same, whatever waits
MAX_COST = 1.35  # of a token, by what it costs in the passes that suit it best
MIN_TOKENS = 128  # fewer are not worth a pass
REST = 0.5  # of the shortest pass that is worth it: less goes along with what comes before
FIRST_TOKENS = 512  # while nothing is known
SAMPLES = 9  # passes of each class of sizes that are remembered


class PromptPace:
    """Learns what steps and prompt tokens take. No clocks."""

    def __init__(self, most: int, paced: bool, least: int = 0) -> None:
        """most: prompt tokens of any step. paced: otherwise a step always takes that many. least:
        tokens that are worth a pass whatever passes take."""
        self.most, self.paced, self.least = most, paced, least
        self._passes = PassTimes()
        self._decoding: deque[float] = deque(maxlen=RECENT)  # seconds
        self._made: deque[float] = deque(maxlen=RECENT)  # output tokens of a request per step
        # prompt tokens of steps in which requests decoded; none before the start
        self._beside: deque[int] = deque([0] * WINDOW, maxlen=WINDOW)
        self._waiting = 0  # the most tokens since there were none

    def observe(self, seconds: float, decode_seconds: float, tokens: int, made: float) -> None:
        """A step has ended; decode_seconds: 0 if no request decoded; tokens: of its prompts; made:
        output tokens of a decoding request, on average. Times of 0 were not measured."""
        if decode_seconds > 0:
            self._decoding.append(decode_seconds)
            self._made.append(max(made, 1.0))
            self._beside.append(tokens)
        if tokens and seconds > decode_seconds:
            self._passes.observe(tokens, seconds - decode_seconds)

    def tokens(self, decodes: bool, waiting: int) -> int:
        """Most prompt tokens of the next step. decodes: whether requests decode in it. waiting:
        tokens of the prompts that could be run."""
        self._waiting = max(self._waiting, waiting) if waiting else 0
        if not (self.paced and decodes):
            return self.most
        made = median(self._made) if self._made else 1.0
        burst = self._waiting * made / BURST_TOKENS
        if not (self._decoding and self._passes):
            return min(self.most, max(FIRST_TOKENS, int(burst)))
        passes, decoding = self._passes, median(self._decoding)
        mean = self._even(round(EVEN_TOKENS / made))
        ratio = passes.tokens(MAX_RATIO * (decoding + passes.seconds(mean)) - decoding)
        even = min(ratio, mean / MIN_FILL)
        unnoticed = passes.tokens(MIN_SHARE * decoding)
        least = max(self.least, MIN_TOKENS, passes.worthwhile())
        most = passes.tokens(MAX_SHARE * decoding)
        tokens = round(max(least, min(max(unnoticed, even, burst), most)))
        rest = waiting - tokens
        return min(self.most, waiting if 0 < rest < REST * least else tokens)

    def _even(self, steps: int) -> float:
        """Prompt tokens per step, of the last ``steps``."""
        steps = min(max(steps, 1), WINDOW)
        return sum(islice(reversed(self._beside), steps)) / steps


class Point(NamedTuple):
    """A pass over prompts."""

    tokens: float
    seconds: float

    def towards(self, other: Point, share: float) -> Point:
        """The point at ``share`` of the way to another one."""
        tokens = self.tokens + share * (other.tokens - self.tokens)
        return Point(tokens, self.seconds + share * (other.seconds - self.seconds))


class PassTimes:
    """What passes over prompts take, by their size.

    Sizes between two powers of two are one class. The medians of the last passes of each class are
    the corners of a line that begins at no tokens and no time and goes on like its last corner,
    as if the passes that are shorter or longer than all known ones cost the same per token: so
    they are tried, and known then. A pass takes no longer than a longer one.
    """

    def __init__(self) -> None:
        self._known: dict[int, deque[Point]] = {}  # by the bits of the number of tokens
        self._line = [Point(0, 0.0)]

    def __bool__(self) -> bool:
        return bool(self._known)

    def observe(self, tokens: int, seconds: float) -> None:
        passes = self._known.setdefault(tokens.bit_length(), deque(maxlen=SAMPLES))
        passes.append(Point(tokens, seconds))
        corners, limit = [], float("inf")
        for bits in sorted(self._known, reverse=True):
            sizes, times = zip(*self._known[bits])
            limit = min(limit, median(times))
            corners.append(Point(median(sizes), limit))
        self._line = [Point(0, 0.0), *reversed(corners)]

    def seconds(self, tokens: float) -> float:
        """Of a pass over this many; something must be known."""
        for a, b in pairwise(self._line):
            if tokens <= b.tokens:
                return a.towards(b, (tokens - a.tokens) / (b.tokens - a.tokens)).seconds
        last = self._line[-1]
        return last.seconds * tokens / last.tokens

    def tokens(self, seconds: float) -> int:
        """The most that take no longer."""
        for a, b in pairwise(self._line):
            if seconds < b.seconds:
                return int(a.towards(b, (seconds - a.seconds) / (b.seconds - a.seconds)).tokens)
        last = self._line[-1]
        return int(last.tokens * seconds / last.seconds)

    def worthwhile(self) -> int:
        """The fewest that take ``MAX_COST`` times as long per token as those that take least."""
        limit = MAX_COST * min(b.seconds / b.tokens for b in self._line[1:])
        for a, b in pairwise(self._line):
            # where the line from the origin with the slope ``limit`` crosses that from a to b
            above, below = a.seconds - limit * a.tokens, limit * b.tokens - b.seconds
            if below >= 0:
                return int(a.towards(b, above / (above + below)).tokens) if above > 0 else 0
        return 0
