"""Ancestor sets as bits, in plain torch."""

import torch
from torch import Tensor


def pack_ancestors(ancestors: Tensor) -> Tensor:
    """Ancestor sets as bits: [b, T, E] bool -> [b, T, ceil(E / 64)] int64.

    Bit j of word w says ancestors[:, :, 64 w + j]; what servers do by ``triton_masks.pack_paths``.
    """
    words = []
    for part in ancestors.split(64, dim=2):
        bits = torch.arange(part.shape[2], device=part.device)
        words.append((part.to(torch.int64) << bits).sum(2))
    return torch.stack(words, dim=2)
