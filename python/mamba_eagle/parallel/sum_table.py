"""Ways to add up the ranks' parts, and which one is taken for how many tokens."""

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor


class SumMethod(ABC):
    """A way to add up tensors [n, size] of all ranks, inside captured graphs too.

    All ranks call the same operations in the same order. Sums have equal bits on all of them.
    """

    name: ClassVar[str]

    @abstractmethod
    def sum(self, x: Tensor) -> Tensor:
        """x [n, size], contiguous, must not be used afterwards, since the result may overwrite
        it."""


class Normed(NamedTuple):
    """A residual stream and its norm, both [n, size]."""

    normed: Any  # a tensor; Rounded for products that take float8
    stream: Tensor


class FusedSum(SumMethod):
    """One that also adds to the residual stream and takes the norm, in one kernel."""

    @abstractmethod
    def sum_norm(self, stream: Tensor, added: Tensor, weight: Tensor, eps: float) -> Normed:
        """The RMSNorm of ``stream`` + the sum of all ranks' ``added``, and that sum. stream, added
        [n, size], weight [size], all of the site's dtype and contiguous. Neither input may be used
        afterwards, since results may overwrite them."""


class SumTable:
    """The methods by number of tokens; None: the group's own collective."""

    def __init__(
        self,
        size: int = 0,
        dtype: torch.dtype | None = None,
        sums: Mapping[int, SumMethod | None] | None = None,
        norms: Mapping[int, FusedSum | None] | None = None,
    ) -> None:
        """sums, norms: by the largest number of tokens that a method is for, the same ones in
        both; above them is the collective."""
        self.size, self.dtype = size, dtype
        self.limits = sorted(sums or {})
        self._sums = [(sums or {})[limit] for limit in self.limits]
        self._norms = [(norms or {}).get(limit) for limit in self.limits]

    def of(self, x: Tensor) -> SumMethod | None:
        """For a tensor of any shape and dtype."""
        place = self._place(x)
        return None if place is None else self._sums[place]

    def fused(self, x: Tensor) -> FusedSum | None:
        """What adds x up, adds the sum to a stream and takes the norm at once; None: nothing that
        would be faster."""
        place = self._place(x)
        return None if place is None else self._norms[place]

    def _place(self, x: Tensor) -> int | None:
        if x.dtype != self.dtype or x.dim() != 2 or x.shape[1] != self.size:
            return None
        place = bisect_left(self.limits, x.shape[0])
        return place if x.shape[0] > 0 and place < len(self.limits) else None

    @property
    def text(self) -> str:
        """To be shown, as in ``1-8 pushed with norm, 16-256 pushed, more: collective``: what
        blocks that leave the norm to a sum use."""
        if not self.limits:
            return "collective"
        parts: list[tuple[str, int, int]] = []
        for limit, plain, fused in zip(self.limits, self._sums, self._norms):
            name = f"{fused.name} with norm" if fused else plain.name if plain else "collective"
            if parts and parts[-1][0] == name:
                parts[-1] = (name, parts[-1][1], limit)
            else:
                parts.append((name, limit, limit))
        shown = [f"{a}-{b} {name}" if a < b else f"{a} {name}" for name, a, b in parts]
        return ", ".join([*shown, "more: collective"])


COLLECTIVES = SumTable()
