"""How many prompt tokens are run per step beside decoding requests, so that streams flow evenly.

A step lasts as long as its decoding and its prompts together, and every stream waits for it. What a
client notices are the steps that last longer than most. So beside decoding requests prompts get no
more time than makes a step twice as long as the median of recent steps, and never more than
``MAX_SHARE`` times what decoding takes: where prompts wait in every step, the median grows with
them. Tokens that do not fit are the next step's.
"""

from __future__ import annotations

from collections import deque
from statistics import median

WINDOW = 64  # steps that are remembered
MIN_STEPS = 8  # measured before anything is limited
MAX_RATIO = 1.8  # of a step's time to the median; 2 is the goal, for the slowest of a hundred
MAX_SHARE = 1.75  # of a step's prompts to its decoding, in time
MIN_TOKENS = 256  # fewer would read all weights for little


class PromptPace:
    """Learns what steps and prompt tokens take. No clocks."""

    def __init__(self, most: int, paced: bool) -> None:
        """most: prompt tokens of any step. paced: otherwise a step always takes that many."""
        self.most, self.paced = most, paced
        self._steps: deque[float] = deque(maxlen=WINDOW)  # seconds, of those with decoding
        self._decoding: deque[float] = deque(maxlen=WINDOW)  # seconds, the decoding in them
        self._per_token: deque[float] = deque(maxlen=WINDOW)  # seconds per prompt token

    def observe(self, seconds: float, decode_seconds: float, tokens: int) -> None:
        """A step has ended; tokens: of its prompts. Times of 0 were not measured."""
        if decode_seconds > 0:
            self._steps.append(seconds)
            self._decoding.append(decode_seconds)
        if tokens >= MIN_TOKENS // 2 and seconds > decode_seconds:
            self._per_token.append((seconds - decode_seconds) / tokens)

    def tokens(self, decodes: bool) -> int:
        """Most prompt tokens of the next step. decodes: whether requests decode in it."""
        known = len(self._steps) >= MIN_STEPS and self._per_token
        if not (self.paced and decodes and known):
            return self.most
        decoding = median(self._decoding)
        spare = min(MAX_RATIO * median(self._steps) - decoding, MAX_SHARE * decoding)
        return min(self.most, max(MIN_TOKENS, int(spare / median(self._per_token))))
