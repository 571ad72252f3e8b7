"""The k best tokens of a row whose vocabulary lies in parts on several ranks, by sorting, in
float64.

Each rank tells the others the k best of its own tokens, its highest score h_r, and what its scores
add up to beside that: t_r = log Σ_v exp(score_v - h_r). Then, with h the highest of all,

    log p_v = score_v - h - log Σ_r exp(h_r - h + t_r)

Of equal scores the lower token id comes first.
"""

import math
from typing import NamedTuple

from mamba_eagle.kernels.top_log_probs.naive import Top


class Part(NamedTuple):
    """What a rank tells of a row."""

    scores: list[float]  # its k best, best first
    tokens: list[int]
    highest: float
    log_total: float


def part(scores: list[float], first: int, k: int) -> Part:
    """scores: of the tokens from ``first`` on; -inf where a token is impossible."""
    best = sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:k]
    highest = max(scores)
    total = sum(math.exp(x - highest) for x in scores) if highest > -math.inf else 0.0
    log_total = math.log(total) if total else -math.inf
    return Part([scores[i] for i in best], [first + i for i in best], highest, log_total)


def merged(parts: list[Part], k: int) -> Top:
    """k: at most as many as the parts have together. Some score must be finite."""
    found = [pair for each in parts for pair in zip(each.scores, each.tokens, strict=True)]
    found = sorted(found, key=lambda pair: (-pair[0], pair[1]))[:k]
    highest = max(each.highest for each in parts)
    log_total = math.log(sum(math.exp(p.highest - highest + p.log_total) for p in parts))
    return Top([score - highest - log_total for score, _ in found], [token for _, token in found])
