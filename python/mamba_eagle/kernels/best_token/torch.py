"""The best token of scores that lie in parts on several ranks, in torch.

Each rank makes keys of its part, one per row or one per row and block; the largest over ranks are
exchanged, and the best token is in the largest of a row's. Shapes: n rows; own V, a rank's tokens.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from mamba_eagle.kernels.top_parts.torch import LOW_BITS, token_keys

NO_TOKEN = -1  # where no score is finite, or one is NaN
REFUSED = 2**63 - 1  # above every key: a score that is NaN or infinite
NOTHING = -2139095041  # the high half of keys of a score of -inf


class RowNoise(NamedTuple):
    """What is added to the scores of n rows: temperature · noise, in two roundings."""

    seeds: Tensor  # [n] int64
    positions: Tensor  # [n] int64, of the tokens
    temperatures: Tensor  # [n] float32
    vocab_size: int  # V, of all ranks


def best_of(scores: Tensor) -> Tensor:
    """The best token where all scores are on one rank: [..., V] -> [...] int64."""
    best, tokens = scores.max(dim=-1)
    # 0 times a NaN or an infinity is NaN, which differs from 0; isfinite would take five kernels
    return tokens.masked_fill_(best.mul_(0) != 0, NO_TOKEN)


def best_keys(
    scores: Tensor,
    first: int,
    noise: RowNoise | None,
    gumbel: Callable[[Tensor, Tensor, int], Tensor],
) -> Tensor:
    """The largest key of each row: scores [n, own V] of the tokens from ``first`` on -> [n, 1]
    int64. Scores to which noise is added are float32."""
    if noise is not None:
        whole = gumbel(noise.seeds, noise.positions, noise.vocab_size)
        own = whole[:, first : first + scores.shape[1]]
        scores = own.mul(noise.temperatures[:, None]).add_(scores)
    top, column = scores.max(dim=-1, keepdim=True)
    top = top.float()
    keys = token_keys(top, column + first)
    return keys.masked_fill_(torch.isnan(top) | (top == torch.inf), REFUSED)


def best_tokens(keys: Tensor) -> Tensor:
    """[n, m] int64 -> [n] int64."""
    key = keys.amax(dim=1)
    none = (key == REFUSED) | ((key >> 32) == NOTHING)
    return ((key & LOW_BITS) ^ LOW_BITS).masked_fill_(none, NO_TOKEN)
