"""Products on a CPU, each of which holds its weight alone: one copy, in the order it is read."""

from __future__ import annotations

import torch
from torch import Tensor

from mamba_eagle.backend.torch.layer_ops import HAS_ONEDNN, onednn_product
from mamba_eagle.cpu.products import amx as cpu_tiles
from mamba_eagle.cpu.products import grouped
from mamba_eagle.cpu.products import panels as linear
from mamba_eagle.cpu.vectors.code import has
from mamba_eagle.layers.products import PackedProduct
from mamba_eagle.quantization.grouped import GroupedMatrix

MANY_ROWS = 32  # from which on a second copy pays


def has_bfloat16_products() -> bool:
    """Whether the processor multiplies bfloat16 in its own instructions, and oneDNN is there."""
    return HAS_ONEDNN and has("amx-bf16", "avx512bf16")


def as_short_as_exact(weight: Tensor) -> Tensor:
    """In bfloat16, if all numbers fit into it, which takes half the memory traffic and changes no
    value."""
    if weight.dtype != torch.float32:
        return weight
    short = weight.bfloat16()
    return short if torch.equal(short.float(), weight) else weight


def float_product(weight: Tensor) -> PanelProduct | TileProduct:
    """The faster one of those with weights of 16 and 32 bits that fits."""
    weight = as_short_as_exact(weight)
    fits = cpu_tiles.permitted() and cpu_tiles.fits(weight)
    return TileProduct(weight) if fits else PanelProduct(weight)


class OwnProduct(PackedProduct):
    """One that a kernel of ours computes, called ``product``, from ``weight``."""

    weight: Tensor | grouped.Blocks
    product: linear.Product | cpu_tiles.Product | grouped.Product

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    def multiply(self, x: Tensor) -> Tensor:
        return self.product(x)


class PanelProduct(OwnProduct):
    """Weights of 16 or 32 bits, multiplied in vectors."""

    weight: Tensor

    def __init__(self, weight: Tensor) -> None:
        super().__init__(*weight.shape)
        self.weight = linear.panels(weight)
        self.product = linear.Product(self.weight, self.outputs)

    def rows(self, ids: Tensor) -> Tensor:
        return linear.rows_of(self.weight, ids).float()


class TileProduct(OwnProduct):
    """Weights of bfloat16, multiplied in tile registers with inputs in three parts."""

    weight: Tensor

    def __init__(self, weight: Tensor) -> None:
        super().__init__(*weight.shape)
        self.weight = cpu_tiles.paired_panels(weight)
        self.product = cpu_tiles.Product(self.weight, self.outputs)

    def rows(self, ids: Tensor) -> Tensor:
        return cpu_tiles.rows_of(self.weight, ids).float()


class PromptProduct(PanelProduct):
    """A ``PanelProduct``, and with many rows oneDNN's product in bfloat16, from a second copy of
    the weight, made when it is first needed. Its inputs and outputs are rounded to bfloat16."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__(as_short_as_exact(weight))
        self._second: Tensor | None = None

    @property
    def nbytes(self) -> int:
        second = 0 if self._second is None else 2 * self.outputs * self.inputs
        return super().nbytes + second

    def multiply(self, x: Tensor) -> Tensor:
        if x.shape[0] < MANY_ROWS or self.weight.dtype != torch.bfloat16:
            return super().multiply(x)
        if self._second is None:
            whole = self.rows(torch.arange(self.outputs)).bfloat16()
            self._second = torch.ops.mkldnn._reorder_linear_weight(whole, MANY_ROWS)
        return onednn_product(x.bfloat16(), self._second, None).float()


class GroupedProduct(OwnProduct):
    """Weights of int8 or int4 groups, multiplied with inputs that are rounded to int8."""

    few_bits = True
    weight: grouped.Blocks

    def __init__(self, matrix: GroupedMatrix) -> None:
        outputs, inputs = matrix.shape
        super().__init__(outputs, inputs)
        self.weight = grouped.blocks(matrix.codes, matrix.scale, matrix.minimum)
        self.product = grouped.Product(self.weight, outputs)

    def rows(self, ids: Tensor) -> Tensor:
        return grouped.rows_of(self.weight, ids)


def multiplies(matrix: GroupedMatrix) -> bool:
    """Whether there is a product that reads the matrix as it is."""
    fits = matrix.shape[-1] % grouped.GROUP == 0 and matrix.group % grouped.GROUP == 0
    return fits and (matrix.bits == 4 or matrix.minimum is None)
