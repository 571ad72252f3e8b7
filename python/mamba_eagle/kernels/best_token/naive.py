"""The token that is sampled, given the scores of all tokens: one row, in plain Python.

    token = argmax_v score_v                       score_v = x_v, or x_v + temperature · noise_v

Of equal scores the lower token id is taken; there is none where the highest score is not finite, or
some score is not a number.
"""

import math
from collections.abc import Sequence

from mamba_eagle.kernels.best_token.torch import NO_TOKEN


def best_token(scores: Sequence[float]) -> int:
    if any(math.isnan(score) for score in scores) or not math.isfinite(highest := max(scores)):
        return NO_TOKEN
    return list(scores).index(highest)
