"""The k best tokens of each row of logits and their log-probabilities, by sorting, in float64.

    log p_t = logit_t - log Σ_v exp(logit_v)

Of equal logits the lower token id comes first.
"""

import math
from typing import NamedTuple


class Top(NamedTuple):
    """One row, best first."""

    log_probs: list[float]
    tokens: list[int]


def top_log_probs(logits: list[float], k: int) -> Top:
    """logits: one per token, -inf where a token is impossible; k: at most as many."""
    largest = max(logits)
    log_total = largest + math.log(math.fsum(math.exp(x - largest) for x in logits))
    best = sorted(range(len(logits)), key=lambda token: (-logits[token], token))[:k]
    return Top([logits[token] - log_total for token in best], best)
