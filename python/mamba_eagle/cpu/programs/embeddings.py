"""Rows of an embedding, for programs."""

import torch
from torch import Tensor

from mamba_eagle.cpu import abi
from mamba_eagle.cpu.products.grouped import Blocks, offset_of
from mamba_eagle.cpu.products.packed import GroupedProduct, PanelProduct, TileProduct
from mamba_eagle.cpu.products.transpose import PAIR
from mamba_eagle.cpu.programs.calls import Call
from mamba_eagle.cpu.spans import steps as spans
from mamba_eagle.cpu.spans.grouped_rows import ROWS
from mamba_eagle.layers.embedding import Embedding


class StoredRows:
    """Where the rows of an embedding lie."""

    def __init__(self, numbers: Tensor, **layout: int) -> None:
        """numbers: float32 or bfloat16. layout: as in ``abi.StoredRows``."""
        self.numbers, self.layout = numbers, {"neighbours": 1, **layout}

    def call(self, size: int, columns: int, scale: float) -> Call:
        """A call that writes rows of ``size`` numbers, times ``scale``, to the beginning of rows of
        ``columns``. Tokens and result are the caller's."""
        kernel = spans.EMBED_16 if self.numbers.dtype == torch.bfloat16 else spans.EMBED_32
        own = abi.StoredRows(columns=columns, size=size, scale=scale, **self.layout)
        made = Call(kernel, own, units_per_row=1, work_per_row=size)
        made.keep(numbers=self.numbers)
        return made


class GroupedRows:
    """The same of rows that are integers in groups."""

    def __init__(self, weight: Blocks) -> None:
        self.weight = weight

    def call(self, size: int, columns: int, scale: float) -> Call:
        weight = self.weight
        assert size == weight.inputs
        own = abi.GroupedRows(columns=columns, size=size, factor=scale, bits=weight.bits)
        own.offset, own.wide = offset_of(weight), weight.scale.dtype == torch.float32
        made = Call(ROWS, own, units_per_row=1, work_per_row=size)
        made.keep(codes=weight.codes, scale=weight.scale)
        if weight.minimum is not None:
            made.keep(minimum=weight.minimum)
        return made


def stored_rows(embedding: Embedding) -> StoredRows | GroupedRows | None:
    """None: no kernel reads them."""
    weight, holder = embedding.weight, embedding.holder
    if isinstance(holder, GroupedProduct):
        return GroupedRows(holder.weight)
    returned = embedding.dtype or weight.dtype
    if isinstance(holder, (PanelProduct, TileProduct)):
        weight, beside = holder.weight, holder.weight.shape[-1]  # outputs, for each input
        layout = {"per_block": beside, "block": beside * holder.inputs, "next": beside}
        if isinstance(holder, TileProduct):
            weight = weight.view(torch.bfloat16)
            layout |= {"next": 2 * beside, "neighbours": 2}
        elif weight.dtype == torch.bfloat16:
            layout["pair"] = PAIR
    elif holder is None and weight.is_contiguous() and returned == torch.float32:
        layout = {"per_block": 1, "block": weight.shape[1], "next": 1}
    else:
        return None
    if weight.dtype not in (torch.bfloat16, torch.float32):
        return None
    return StoredRows(weight.detach(), **layout)
