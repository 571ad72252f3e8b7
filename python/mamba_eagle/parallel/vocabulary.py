"""Logits whose vocabulary is split over ranks: each has some columns, in the order of the ranks.

A token is chosen without collecting the logits, and it is the one that a single rank would choose,
bit for bit: scores are compared as integers, and sums are sums of integers. A single rank is a
group of one, which has all columns. Nothing here waits for the device, unless one rank is asked to
try. Shapes: n rows; own V, the rank's columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from mamba_eagle.kernels.top_parts.torch import LOW_BITS, NO_KEY, score_of, token_keys
from mamba_eagle.model_config import Span
from mamba_eagle.parallel.groups import Group
from mamba_eagle.parallel.shard import Shard

SIGN = -(2**63)
DIGIT_BITS = 8


class Columns:
    """A rank's columns of the logits, and what the ranks find out together."""

    def __init__(self, group: Group, vocab_size: int) -> None:
        self.group = group
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
        [..., own V] float32 -> the same, int64. The high half has the bits of the score."""
        ids = torch.arange(*self.span, device=scores.device)
        return token_keys(scores, ids)

    def forbid(self, scores: Tensor, rows: Tensor, masks: Tensor) -> Tensor:
        """-inf for tokens whose bit is not set: scores [n, own V]; rows [m] int64 of them; masks
        [m, W] int32, a bit for each of the V tokens, bit ``v % 32`` of number ``v // 32``."""
        ids = torch.arange(*self.span, device=scores.device)
        bits = (masks[:, ids // 32] >> (ids % 32)) & 1
        return scores.index_copy(0, rows, scores[rows].masked_fill(bits == 0, -torch.inf))

    def largest(self, scores: Tensor) -> Tensor:
        """The highest score over all ranks: [..., own V] float32 -> [..., 1]."""
        return self.group.max(scores.amax(dim=-1, keepdim=True))

    def total(self, weights: Tensor) -> Tensor:
        """Their sum over all ranks: [..., own V] int64 -> [..., 1]."""
        return self.group.sum(weights.sum(dim=-1, keepdim=True))

    def order(self, scores: Tensor) -> Order:
        """Of the tokens of some rows [..., own V] float32."""
        return Order(self.group, self.keys(scores), scores)


class Order:
    """Tokens from the best to the worst over all ranks, of which this one has some."""

    def __init__(self, group: Group, keys: Tensor, scores: Tensor, is_sorted: bool = False) -> None:
        """keys: [..., n] int64, of ``Columns.keys``; scores: the same, float32."""
        self.group, self.keys, self.scores, self.is_sorted = group, keys, scores, is_sorted

    def first(self, count: int) -> Order:
        """This rank's best tokens, the best of all first, among which are the ``count`` best."""
        keys = self.keys.topk(min(count, self.keys.shape[-1]), dim=-1).values
        return Order(self.group, keys, score_of(keys), is_sorted=True)

    def last_kept(
        self,
        weights: Tensor | None,
        limit: Tensor,
        tries: Sequence[int],
        free: Tensor | None = None,
    ) -> Tensor:
        """The smallest key such that the keys above it weigh less than ``limit`` together.

        weights: [..., n] int64, 0 or more; None: 1 each. limit [..., 1] int64, 1 or more. tries:
        how many keys one rank alone sorts, in turn, until they weigh enough: the last number must
        do, and before another the host waits. free: [..., 1], rows without a limit, if there are
        any. Returns [..., 1].
        """
        limit = limit if free is None else limit.masked_fill(free, 1)
        if self.group.size > 1:
            weights = torch.ones_like(self.keys) if weights is None else weights
            last = self._last_by_digits(weights, limit)
        else:
            last = self._last_of_sorted(weights, limit, tries)
        return last if free is None else last.masked_fill(free, NO_KEY)

    def _last_of_sorted(
        self, weights: Tensor | None, limit: Tensor, tries: Sequence[int]
    ) -> Tensor:
        for tried in tries:
            best = self.keys if self.is_sorted else self.first(tried).keys
            if weights is None:
                return best.gather(-1, (limit - 1).expand(*best.shape[:-1], 1))
            ranked = weights
            if not self.is_sorted:
                ranked = weights.gather(-1, (best & LOW_BITS) ^ LOW_BITS)
            weight = ranked.cumsum(dim=-1)
            if tried == tries[-1] or bool((weight[..., -1:] >= limit).all()):
                break
        count = ((weight - ranked) < limit).sum(dim=-1, keepdim=True)
        return best.gather(-1, count - 1)

    def _last_by_digits(self, weights: Tensor, limit: Tensor) -> Tensor:
        """A radix select: each round fixes one digit of the key from the weights of its 256 values,
        summed over the ranks."""
        unsigned = self.keys ^ SIGN
        prefix, before = torch.zeros_like(limit), torch.zeros_like(limit)
        mask = 0
        for shift in range(64 - DIGIT_BITS, -1, -DIGIT_BITS):
            digits = (unsigned >> shift) & 255
            inside = weights if mask == 0 else weights.masked_fill((unsigned & mask) != prefix, 0)
            counts = inside.new_zeros(*digits.shape[:-1], 256).scatter_add_(-1, digits, inside)
            falling = self.group.sum(counts).flip(-1).cumsum(dim=-1)  # of this digit or above
            above = ((before + falling) < limit).sum(dim=-1, keepdim=True).clamp_(max=255)
            skipped = falling.gather(-1, (above - 1).clamp(min=0))
            before = before + torch.where(above > 0, skipped, 0)
            prefix = prefix | ((255 - above) << shift)
            mask |= 255 << shift
            mask = mask - 2**64 if mask >= 2**63 else mask  # as int64
        return prefix ^ SIGN
