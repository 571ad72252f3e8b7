"""Logits under a bit mask, number by number.

out[i, v] = logits[i, v] if bit v of masks[j] is set or no j has rows[j] = i, else -inf
"""

import torch
from torch import Tensor


def mask_logits(logits: Tensor, rows: Tensor, masks: Tensor) -> Tensor:
    """logits [n, V] float32; rows [m] int64, indices of different rows; masks [m, W] int32, whose
    bit ``v % 32`` of word ``v // 32`` says whether token v is allowed. Returns [n, V] float32."""
    out = [row.tolist() for row in logits]
    for row, words in zip(rows.tolist(), masks.tolist()):
        for token in range(logits.shape[1]):
            if not words[token // 32] >> (token % 32) & 1:
                out[row][token] = float("-inf")
    return torch.tensor(out, dtype=torch.float32).view_as(logits)
