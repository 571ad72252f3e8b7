"""Experts in torch: how a token's are chosen, and their products as one sorted batch."""

from typing import NamedTuple

import torch
from torch import Tensor


class Routes(NamedTuple):
    """The k experts that process each of n tokens."""

    experts: Tensor  # [n, k] int64 or int32
    weights: Tensor  # [n, k] float32
    share: Tensor | None = None  # [n, 1] float32, logits of a shared expert's weight


class Choice(NamedTuple):
    """How a token's experts follow from its logits.

    With ``bias``: scores are sigmoids; the bias affects which experts are chosen, but not their
    weights (DeepSeek-V3, arXiv 2412.19437). Only experts of the best ``top_groups`` of
    ``num_groups`` are eligible; a group's score is the sum of its two best biased scores. Without:
    the best logits, with weights from a softmax over these alone (Mixtral, arXiv 2401.04088).
    """

    top_k: int
    bias: Tensor | None = None  # [E] float32
    num_groups: int = 1
    top_groups: int = 1
    normalize: bool = True  # make the chosen scores sum to 1
    scaling: float = 1.0


def choose(logits: Tensor, choice: Choice, scores: Tensor | None = None) -> Routes:
    """logits [n, E] float32. scores: their sigmoids, if a caller has a kernel for these."""
    if choice.bias is None:
        best, experts = logits.topk(choice.top_k, dim=-1)
        return Routes(experts, best.softmax(-1))
    scores = logits.sigmoid() if scores is None else scores
    biased = scores + choice.bias
    if choice.num_groups > 1:
        groups = biased.unflatten(-1, (choice.num_groups, -1))
        best = groups.topk(2, dim=-1).values.sum(-1).topk(choice.top_groups, dim=-1).indices
        excluded = torch.ones_like(groups[..., 0], dtype=torch.bool).scatter_(1, best, False)
        biased = groups.masked_fill(excluded[..., None], float("-inf")).flatten(-2)
    experts = biased.topk(choice.top_k, dim=-1).indices
    weights = scores.gather(1, experts)
    if choice.normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return Routes(experts, weights * choice.scaling)
