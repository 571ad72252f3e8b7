"""Logits whose vocabulary is split over ranks: each has some columns, in the order of the ranks.

A token is chosen without collecting the logits, and it is the one that a single rank would choose,
bit for bit: scores are compared as integers, and sums are sums of integers. Nothing here waits for
the device. Shapes: n rows; own V, the rank's columns.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mamba_eagle.kernels.top_parts.torch import token_keys
from mamba_eagle.model_config import Span
from mamba_eagle.parallel.groups import Group
from mamba_eagle.parallel.shard import Shard

SIGN = -(2**63)
DIGIT_BITS = 8


class Columns:
    """A rank's columns of the logits, and what the ranks find out together."""

    def __init__(self, group: Group, vocab_size: int) -> None:
        self.group, self.vocab_size = group, vocab_size
        self.span: Span = group.shard.span(vocab_size)
        spans = [Shard(rank, group.size).span(vocab_size) for rank in range(group.size)]
        self.sizes = [span.size for span in spans]

    def of(self, whole: Tensor) -> Tensor:
        """This rank's columns: [..., V] -> [..., own V]."""
        return whole[..., self.span.begin : self.span.end]

    def whole(self, own: Tensor) -> Tensor:
        """All columns: [n, own V] -> [n, V]."""
        missing = max(self.sizes) - own.shape[1]
        parts = self.group.gather(F.pad(own, (0, missing)).contiguous())
        return torch.cat([part[:, :size] for part, size in zip(parts, self.sizes)], dim=1)

    def keys(self, scores: Tensor) -> Tensor:
        """Distinct keys over all ranks that order tokens by rising score, then by falling id:
        [n, own V] float32 -> [n, own V] int64. The high half has the bits of the score."""
        ids = torch.arange(*self.span, device=scores.device)
        return token_keys(scores, ids)

    def forbid(self, scores: Tensor, rows: Tensor, masks: Tensor) -> Tensor:
        """-inf for tokens whose bit is not set: scores [n, own V]; rows [m] int64 of them; masks
        [m, W] int32, a bit for each of the V tokens, bit ``v % 32`` of number ``v // 32``."""
        ids = torch.arange(*self.span, device=scores.device)
        bits = (masks[:, ids // 32] >> (ids % 32)) & 1
        return scores.index_copy(0, rows, scores[rows].masked_fill(bits == 0, -torch.inf))

    def largest(self, scores: Tensor) -> Tensor:
        """The highest score over all ranks: [n, own V] float32 -> [n, 1]."""
        return self.group.max(scores.amax(dim=-1, keepdim=True))

    def last_kept(self, keys: Tensor, weights: Tensor, limit: Tensor) -> Tensor:
        """The smallest key such that the keys above it weigh less than ``limit`` together.

        keys: [n, own V] int64, distinct. weights: the same shape, int64, 0 or more. limit [n, 1],
        1 or more. Returns [n, 1]. A radix select: each round fixes one digit of the key from the
        weights of its 256 values, summed over the ranks.
        """
        unsigned = keys ^ SIGN
        prefix, before = torch.zeros_like(limit), torch.zeros_like(limit)
        mask = 0
        for shift in range(64 - DIGIT_BITS, -1, -DIGIT_BITS):
            digits = (unsigned >> shift) & 255
            inside = weights if mask == 0 else weights.masked_fill((unsigned & mask) != prefix, 0)
            counts = inside.new_zeros(len(keys), 256).scatter_add_(1, digits, inside)
            falling = self.group.sum(counts).flip(-1).cumsum(dim=-1)  # of this digit or above
            above = ((before + falling) < limit).sum(dim=-1, keepdim=True).clamp_(max=255)
            skipped = falling.gather(1, (above - 1).clamp(min=0))
            before = before + torch.where(above > 0, skipped, 0)
            prefix = prefix | ((255 - above) << shift)
            mask |= 255 << shift
            mask = mask - 2**64 if mask >= 2**63 else mask  # as int64
        return prefix ^ SIGN


def whole_logits(own: Tensor, group: Group, vocab_size: int) -> Tensor:
    """Each rank's columns [n, own V], from all ranks: [n, V]."""
    return Columns(group, vocab_size).whole(own)
