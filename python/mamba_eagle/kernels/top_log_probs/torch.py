"""The best tokens of each row of logits and their log-probabilities, in torch."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

MAX_TOP = 16  # tokens per row that the GPU kernels can choose; beyond that torch does


class TopTokens(NamedTuple):
    """The k best tokens of some rows, best first."""

    log_probs: Tensor  # [..., k] float32
    tokens: Tensor  # [..., k] int64

    def unflatten(self, shape: tuple[int, ...]) -> TopTokens:
        """[n, k] -> [*shape, k]."""
        return TopTokens(*(part.view(*shape, -1) for part in self))


def top_log_probs(logits: Tensor, k: int) -> TopTokens:
    """Of ``log_softmax(logits)``, in float32. logits: [n, V], any float dtype."""
    return TopTokens(*logits.float().log_softmax(-1).topk(k))
