"""Rows of an embedding, for programs."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from mamba_eagle.backend.cpu.calls import Call
from mamba_eagle.backend.cpu.products import GroupedProduct, PanelProduct, TileProduct
from mamba_eagle.kernels import numba_steps as spans
from mamba_eagle.kernels.grouped.cpu import Blocks, offset_of
from mamba_eagle.kernels.grouped.cpu_rows import ROWS, Words
from mamba_eagle.layers.embedding import Embedding


class StoredRows:
    """Where the rows of an embedding lie."""

    def __init__(
        self, numbers: Tensor, per_block: int, block: int, step: int, neighbours: int = 1
    ) -> None:
        """numbers: float32 or bfloat16. Those of a row come in groups of ``neighbours``, of which
        the first is at ``row // per_block · block + row % per_block · neighbours``, and the next is
        ``step`` behind."""
        self.numbers, self.layout = numbers, (per_block, block, step, neighbours)

    def call(self, size: int, columns: int, scale: float) -> Call:
        """A call that writes rows of ``size`` numbers, times ``scale``, to the beginning of rows of
        ``columns``. Its first two words, tokens and result, are the caller's."""
        short = self.numbers.dtype == torch.bfloat16
        kernel = spans.EMBED_16 if short else spans.EMBED_32
        at = self.numbers.data_ptr()
        words = [0, 0, columns, size, 0, at, *self.layout]
        made = Call(kernel, words, units_per_row=1, work_per_row=size)
        made.keep(4, np.array([scale], np.float32))
        made.kept.append(self.numbers)
        return made


class GroupedRows:
    """The same of rows that are integers in groups."""

    def __init__(self, weight: Blocks) -> None:
        self.weight = weight

    def call(self, size: int, columns: int, scale: float) -> Call:
        weight, words = self.weight, [0] * Words.COUNT
        assert size == weight.inputs
        words[Words.COLUMNS], words[Words.SIZE] = columns, size
        words[Words.CODES], words[Words.SCALE] = weight.codes.data_ptr(), weight.scale.data_ptr()
        words[Words.MINIMUM] = 0 if weight.minimum is None else weight.minimum.data_ptr()
        words[Words.BITS], words[Words.OFFSET] = weight.bits, offset_of(weight)
        words[Words.WIDE] = int(weight.scale.dtype == torch.float32)
        made = Call(ROWS, words, units_per_row=1, work_per_row=size)
        made.keep(Words.FACTOR, np.array([scale], np.float32))
        made.kept.append(weight)
        return made


def stored_rows(embedding: Embedding) -> StoredRows | GroupedRows | None:
    """None: no kernel reads them."""
    weight, holder = embedding.weight, embedding.holder
    if isinstance(holder, GroupedProduct):
        return GroupedRows(holder.weight)
    returned = embedding.dtype or weight.dtype
    if isinstance(holder, (PanelProduct, TileProduct)):
        weight, beside = holder.weight, holder.weight.shape[-1]  # outputs, for each input
        layout: tuple[int, ...] = (beside, beside * holder.inputs, beside)
        if isinstance(holder, TileProduct):
            weight = weight.view(torch.bfloat16)
            layout = (beside, beside * holder.inputs, 2 * beside, 2)
    elif holder is None and weight.is_contiguous() and returned == torch.float32:
        layout = (1, weight.shape[1], 1)
    else:
        return None
    if weight.dtype not in (torch.bfloat16, torch.float32):
        return None
    return StoredRows(weight.detach(), *layout)
