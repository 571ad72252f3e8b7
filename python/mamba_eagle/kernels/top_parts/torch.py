"""The best tokens of a vocabulary that lies in parts on several ranks, in torch.

What a rank tells of a row is packed into k + 1 int64 numbers, so that one exchange carries it: k
keys, best first, then the two numbers that its scores add up to, as bits of float32.

    key     bits of the score, so that integers order like scores | token id, lower ones above
    last    bits of the highest score                             | bits of the log of the total

Keys differ, so their order is the same on all ranks. Shapes: n rows; own V, a rank's tokens.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from mamba_eagle.kernels.top_log_probs.torch import TopTokens

LOW_BITS = 2**32 - 1
NO_KEY = -(2**63)  # below every key


def rising_bits(scores: Tensor) -> Tensor:
    """Integers in the order of the scores: float32 -> int32."""
    bits = (scores + 0.0).view(torch.int32)  # -0.0 becomes 0.0
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def score_of(keys: Tensor) -> Tensor:
    """The scores whose rising bits are the high half of some keys: int64 -> float32."""
    rising = (keys >> 32).int()
    return (rising ^ ((rising >> 31) & 0x7FFFFFFF)).view(torch.float32)


def token_keys(scores: Tensor, tokens: Tensor) -> Tensor:
    """scores float32, tokens int64, of the same shape -> int64."""
    return (rising_bits(scores).long() << 32) | (tokens ^ LOW_BITS)


def packed(scores: Tensor, best: TopTokens, first: int, k: int) -> Tensor:
    """scores [n, own V] float32 of the tokens from ``first`` on; best [n, k or own V]: the best of
    their log_softmax -> [n, k + 1] int64."""
    found = scores.gather(1, best.tokens)
    keys = F.pad(token_keys(found, best.tokens + first), (0, k - found.shape[1]), value=NO_KEY)
    highest = found[:, 0]
    log_total = torch.where(highest == -torch.inf, -torch.inf, -best.log_probs[:, 0])
    both = torch.stack([log_total, highest + 0.0], dim=1).view(torch.int32).long()
    last = (both[:, 1] << 32) | (both[:, 0] & LOW_BITS)
    return torch.cat([keys, last[:, None]], dim=1)


def merged(parts: Tensor) -> TopTokens:
    """Of all ranks' packed rows [ranks, n, k + 1] -> [n, k]."""
    k = parts.shape[2] - 1
    keys = parts[..., :k].transpose(0, 1).flatten(1).topk(k).values
    last = parts[..., k]
    highest = (last >> 32).int().view(torch.float32)  # [ranks, n]
    log_total = (last << 32 >> 32).int().view(torch.float32)
    high = highest.amax(0)
    base = high.masked_fill(high == -torch.inf, 0.0)
    total = (highest - base + log_total).exp().sum(0).log()
    log_probs = (score_of(keys) - base[:, None]) - total[:, None]
    return TopTokens(log_probs, (keys & LOW_BITS) ^ LOW_BITS)
