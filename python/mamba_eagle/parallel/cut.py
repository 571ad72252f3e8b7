"""The part of a stored tensor that a rank holds."""

import logging
from typing import Any, NamedTuple

import torch

from mamba_eagle.model_config import Span
from mamba_eagle.parallel.shard import Shard
from mamba_eagle.quantization.matrix import Matrix

log = logging.getLogger("mamba_eagle.parallel")


class Cut(NamedTuple):
    """The entries of some spans of an axis, one span after the other."""

    axis: int
    spans: tuple[Span, ...]
    zero: bool = False  # zeros of that shape instead: another rank adds these entries

    def of(self, whole: Any) -> Any:
        """whole: a tensor or a matrix of few bits; or a slice of a safetensors file, of which no
        more is read than that."""
        if isinstance(whole, Matrix):
            part = None if self.zero else self._of_matrix(whole)
            return self.of(whole.dequantize()) if part is None else part
        before = (slice(None),) * self.axis
        parts = [whole[before + (slice(a, b),)] for a, b in self.spans]
        value = parts[0] if len(parts) == 1 else torch.cat(parts, dim=self.axis)
        return torch.zeros_like(value) if self.zero else value

    def _of_matrix(self, whole: Matrix) -> Matrix | None:
        """None if the spans begin or end inside of blocks that share a scale, or if their scales do
        not fit one grid: the rank then holds that part in 16 bits."""
        if len(whole.shape) > 2:
            return None
        axis = -2 if self.axis == 0 else -1
        try:
            parts = [whole.narrow(axis, span.begin, span.size) for span in self.spans]
        except ValueError as error:
            log.warning("a matrix %s is split and loses its few bits: %s", whole.shape, error)
            return None
        return parts[0] if len(parts) == 1 else type(whole).join(parts)

    def place_of(self, index: int) -> int | None:
        """The place of entry ``index`` of axis 0 among those that are kept; None if it is not."""
        assert self.axis == 0
        before = 0
        for begin, end in self.spans:
            if begin <= index < end:
                return before + index - begin
            before += end - begin
        return None


def rows(*spans: Span) -> Cut:
    """Rows of a matrix, entries of a vector, or stacked matrices."""
    return Cut(0, spans)


def columns(span: Span, zero: bool = False) -> Cut:
    return Cut(1, (span,), zero)


def once(size: int, shard: Shard) -> Cut:
    """A bias of ``size`` entries that is added to a sum over all ranks: rank 0 has it."""
    return Cut(0, (Span(0, size),), zero=shard.rank > 0)
