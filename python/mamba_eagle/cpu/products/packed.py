"""Products on a CPU, each of which holds its weight alone: one copy, in the order it is read."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mamba_eagle.backend.torch.layer_ops import HAS_ONEDNN, onednn_product
from mamba_eagle.cpu import abi
from mamba_eagle.cpu.products import amx as cpu_tiles
from mamba_eagle.cpu.products import grouped
from mamba_eagle.cpu.products import panels as linear
from mamba_eagle.cpu.span_kernels import SpanKernel
from mamba_eagle.cpu.vectors.code import LANES, has
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
    """One that a kernel of ours computes, from ``weight``. Its units, which threads share out, are
    panels or blocks of outputs; a row of its result has ``width`` numbers, padding included."""

    weight: Tensor | grouped.Blocks
    per_unit: int  # outputs
    # what a core reads and multiplies in a nanosecond, at best
    bytes_per_ns: int
    per_ns: int

    def __init__(
        self, sizes: Sequence[int], weight: Tensor | grouped.Blocks, kernel: SpanKernel, block: Any
    ) -> None:
        """sizes: outputs, inputs. block: of the kernel, with the weight. Most of it stays from call
        to call: a decode step makes a hundred, so each microsecond counts."""
        super().__init__(*sizes)
        self.weight, self.kernel, self.block = weight, kernel, block
        self.units = -(-self.outputs // self.per_unit)
        self.width = block.width = self.units * self.per_unit
        self.read_ns = weight.nbytes // self.bytes_per_ns
        self._address = block.address
        kernel.prepare()

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    def multiply(self, x: Tensor) -> Tensor:
        if not x.is_contiguous():
            x = x.contiguous()
        n, given = x.shape[0], self.block
        y = torch.empty(n, self.width)
        given.y, given.rows = y.data_ptr(), n
        _read = self.take(x)  # to be kept until the kernel has read it
        multiplying = n * self.inputs * self.width // self.per_ns
        self.kernel.run(self.units, max(self.read_ns, multiplying), self._address)
        return y if self.outputs == self.width else y[:, : self.outputs].contiguous()

    @abstractmethod
    def take(self, x: Tensor) -> Tensor:
        """Points the block, which has the number of rows, to x [n, in] float32, or to what the
        kernel reads in its place; returns that."""


class PanelProduct(OwnProduct):
    """Weights of 16 or 32 bits, multiplied in vectors."""

    weight: Tensor
    per_unit, bytes_per_ns, per_ns = linear.PANEL, linear.BYTES_PER_NS, linear.PRODUCTS_PER_NS

    def __init__(self, weight: Tensor) -> None:
        panels = linear.panels(weight)
        block = abi.Product(weight=panels.data_ptr(), inputs=weight.shape[1])
        super().__init__(weight.shape, panels, linear.PRODUCTS[weight.dtype], block)

    def take(self, x: Tensor) -> Tensor:
        self.block.x = x.data_ptr()
        return x

    def rows(self, ids: Tensor) -> Tensor:
        return linear.rows_of(self.weight, ids).float()


class TileProduct(OwnProduct):
    """Weights of bfloat16, multiplied in tile registers with inputs in three parts."""

    weight: Tensor
    per_unit, bytes_per_ns = linear.PANEL, linear.BYTES_PER_NS
    per_ns = cpu_tiles.PRODUCTS_PER_NS

    def __init__(self, weight: Tensor) -> None:
        panels = cpu_tiles.paired_panels(weight)
        block = abi.Product(weight=panels.data_ptr(), inputs=weight.shape[1])
        super().__init__(weight.shape, panels, cpu_tiles.PRODUCT, block)
        cpu_tiles.SPLIT.prepare()
        self._split = abi.Split(inputs=self.inputs)

    def take(self, x: Tensor) -> Tensor:
        n, given = x.shape[0], self._split
        parts = torch.empty(cpu_tiles.parts_bytes(n, self.inputs), dtype=torch.uint8)
        given.x, given.parts = x.data_ptr(), parts.data_ptr()
        cpu_tiles.SPLIT.run(n, n * self.inputs // cpu_tiles.SPLIT_PER_NS, given.address)
        self.block.x = given.parts
        return parts

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
    per_unit, bytes_per_ns, per_ns = LANES, grouped.BYTES_PER_NS, grouped.PRODUCTS_PER_NS

    def __init__(self, matrix: GroupedMatrix) -> None:
        weight = grouped.blocks(matrix.codes, matrix.scale, matrix.minimum)
        block = abi.GroupedProduct(groups=weight.inputs // grouped.GROUP)
        block.point(codes=weight.codes, weight_scale=weight.scale)
        if weight.minimum is not None:
            block.point(weight_minimum=weight.minimum)
        super().__init__(matrix.shape, weight, grouped.product_of(weight), block)
        grouped.ROUND.prepare()

    def take(self, x: Tensor) -> Tensor:
        n, size, given = x.shape[0], self.inputs, self.block
        scales = size // grouped.GROUP * 4  # bytes of a row's, and of its totals
        rounded = torch.empty(n * (size + 2 * scales), dtype=torch.uint8)
        numbers = rounded.data_ptr()
        given.numbers, given.scale = numbers, numbers + n * size
        given.total, given.x = numbers + n * (size + scales), x.data_ptr()
        grouped.ROUND.run(n, n * size // grouped.ROUNDED_PER_NS, self._address)
        return rounded

    def rows(self, ids: Tensor) -> Tensor:
        return grouped.rows_of(self.weight, ids)


def multiplies(matrix: GroupedMatrix) -> bool:
    """Whether there is a product that reads the matrix as it is."""
    fits = matrix.shape[-1] % grouped.GROUP == 0 and matrix.group % grouped.GROUP == 0
    return fits and (matrix.bits == 4 or matrix.minimum is None)
