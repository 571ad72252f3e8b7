"""Rows of an embedding, for programs."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from mamba_eagle.backend.cpu.fused import Call
from mamba_eagle.backend.cpu.products import PanelProduct
from mamba_eagle.kernels import numba_steps as spans
from mamba_eagle.layers.embedding import Embedding


class StoredRows:
    """Where the rows of an embedding lie."""

    def __init__(self, numbers: Tensor, per_block: int, block: int, step: int) -> None:
        """numbers: float32 or bfloat16; those of a row begin at ``row // per_block · block + row %
        per_block``, ``step`` from one to the next."""
        self.numbers, self.layout = numbers, (per_block, block, step)

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


def stored_rows(embedding: Embedding) -> StoredRows | None:
    """None: no kernel reads them."""
    weight, holder = embedding.weight, embedding.holder
    returned = embedding.dtype or weight.dtype
    if isinstance(holder, PanelProduct):
        weight, beside = holder.weight, holder.weight.shape[-1]  # outputs, for each input
        layout = (beside, beside * holder.inputs, beside)
    elif holder is None and weight.is_contiguous() and returned == torch.float32:
        layout = (1, weight.shape[1], 1)
    else:
        return None
    if weight.dtype not in (torch.bfloat16, torch.float32):
        return None
    return StoredRows(weight.detach(), *layout)
