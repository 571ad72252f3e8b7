"""Counting the tokens of a request's output, in torch."""

from __future__ import annotations

import torch
from torch import Tensor


def count_tokens(counts: Tensor, slots: Tensor, tokens: Tensor, number: Tensor) -> None:
    """Add the first number[i] of tokens[i] to the counts of request slot slots[i].

    counts: [R, V] int32, changed; slots, number: [b] int64; tokens: [b, D] int64, of which those
    beyond ``number`` may be anything.
    """
    valid = torch.arange(tokens.shape[1], device=tokens.device) < number.unsqueeze(1)
    cells = slots.unsqueeze(1) * counts.shape[1] + torch.where(valid, tokens, 0)
    counts.view(-1).scatter_add_(0, cells.flatten(), valid.int().flatten())
