"""Logits of the tokens that a grammar allows, in torch."""

from __future__ import annotations

import torch
from torch import Tensor


def mask_logits(logits: Tensor, rows: Tensor, masks: Tensor) -> Tensor:
    """-inf for every token that a mask forbids; new memory, since logprobs are of raw logits.

    logits [n, V], any float dtype; rows [m] int64, indices of different rows; masks [m, W] int32
    with W = ceil(V / 32), bit ``v % 32`` of word ``v // 32`` for token v. Other rows stay the same.
    """
    bits = torch.arange(32, device=masks.device, dtype=torch.int32)
    allowed = (masks.unsqueeze(2) >> bits).bitwise_and_(1).flatten(1)[:, : logits.shape[1]]
    return logits.index_copy(0, rows, logits[rows].masked_fill_(allowed == 0, -torch.inf))
