"""The part of a stored tensor that a rank holds."""

from __future__ import annotations

import logging
from functools import cache
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
        axis = self.axis - len(whole.shape)
        try:
            parts = [whole.narrow(axis, span.begin, span.size) for span in self.spans]
        except ValueError as error:
            _warn(whole.shape, str(error))
            return None
        return parts[0] if len(parts) == 1 else type(whole).join(parts)

    def of_one(self, is_half: bool) -> Cut:
        """The same of one matrix of a stack; or of the first or second half of its rows, which are
        cut alike."""
        return self._replace(axis=self.axis - 1, spans=self.spans[:1] if is_half else self.spans)

    def of_stack(self) -> Cut:
        """The same of each matrix of a stack."""
        return self._replace(axis=self.axis + 1)


@cache
def _warn(shape: tuple[int, ...], error: str) -> None:
    """Once for all matrices that are alike: a model may have thousands of experts."""
    log.warning("a matrix %s is split and loses its few bits: %s", shape, error)


def rows(*spans: Span) -> Cut:
    """Rows of a matrix, or entries of a vector."""
    return Cut(0, spans)


def columns(span: Span, zero: bool = False) -> Cut:
    return Cut(1, (span,), zero)


def once(size: int, shard: Shard) -> Cut:
    """A bias of ``size`` entries that is added to a sum over all ranks: rank 0 has it."""
    return Cut(0, (Span(0, size),), zero=shard.rank > 0)
