"""How many prompt tokens are run per step beside decoding requests, so that streams flow evenly.

A step lasts as long as its decoding and its prompts together, and every stream waits for it. What a
client notices are the steps that last longer than most. So beside decoding requests prompts get no
more time than makes a step twice as long as the median of recent steps, and never more than
``MAX_SHARE`` times what decoding takes: where prompts wait in every step, the median grows with
them. Tokens that do not fit are the next step's.

A pass over prompts costs something however short they are: all weights are read, all kernels
launched. So a step is never cut so short that this fixed part exceeds ``MAX_FIXED`` of it: prompts
would take several times as long in all, and with them the requests that wait behind.
"""

from __future__ import annotations

from collections import deque
from statistics import median

WINDOW = 64  # steps that are remembered
MIN_STEPS = 8  # measured before anything is limited
MAX_RATIO = 1.8  # of a step's time to the median; 2 is the goal, for the slowest of a hundred
MAX_SHARE = 1.75  # of a step's prompts to its decoding, in time
MIN_TOKENS = 256  # fewer are not worth a pass
MAX_FIXED = 0.25  # share of a pass that does not depend on its tokens
MAX_KNOWN = 0.9  # share of the shortest pass that the fixed part can be
MIN_SPREAD = 1.5  # ratio of long passes' tokens to short ones' that tells the fixed part apart


class PromptPace:
    """Learns what steps and prompt tokens take. No clocks."""

    def __init__(self, most: int, paced: bool) -> None:
        """most: prompt tokens of any step. paced: otherwise a step always takes that many."""
        self.most, self.paced = most, paced
        self._steps: deque[float] = deque(maxlen=WINDOW)  # seconds, of those with decoding
        self._decoding: deque[float] = deque(maxlen=WINDOW)  # seconds, the decoding in them
        self._passes: deque[tuple[int, float]] = deque(maxlen=WINDOW)  # prompt tokens, seconds
        self._fixed = 0.0  # seconds of a pass that do not depend on its tokens

    def observe(self, seconds: float, decode_seconds: float, tokens: int) -> None:
        """A step has ended; tokens: of its prompts. Times of 0 were not measured."""
        if decode_seconds > 0:
            self._steps.append(seconds)
            self._decoding.append(decode_seconds)
        if tokens >= MIN_TOKENS // 2 and seconds > decode_seconds:
            self._passes.append((tokens, seconds - decode_seconds))
            self._fixed = fixed_seconds(sorted(self._passes), self._fixed)

    def tokens(self, decodes: bool) -> int:
        """Most prompt tokens of the next step. decodes: whether requests decode in it."""
        known = len(self._steps) >= MIN_STEPS and self._passes
        if not (self.paced and decodes and known):
            return self.most
        decoding = median(self._decoding)
        spare = min(MAX_RATIO * median(self._steps) - decoding, MAX_SHARE * decoding)
        per_token = median((seconds - self._fixed) / tokens for tokens, seconds in self._passes)
        worthwhile = self._fixed / per_token * (1 - MAX_FIXED) / MAX_FIXED
        least = max(MIN_TOKENS, int(worthwhile))
        return min(self.most, max(least, int((spare - self._fixed) / per_token)))


def fixed_seconds(passes: list[tuple[int, float]], known: float) -> float:
    """Where the line through the medians of the short and of the long passes begins: no single slow
    step moves it. ``known`` where all are about as long, but never all of the shortest pass.

    passes: (tokens, seconds), sorted
    """
    half = len(passes) // 2
    (n, x), (m, y) = _middle(passes[: half or 1]), _middle(passes[half:])
    fixed = (x * m - y * n) / (m - n) if m >= MIN_SPREAD * n else known
    return min(max(fixed, 0.0), MAX_KNOWN * min(seconds for _, seconds in passes))


def _middle(passes: list[tuple[int, float]]) -> tuple[float, float]:
    return median(tokens for tokens, _ in passes), median(seconds for _, seconds in passes)
