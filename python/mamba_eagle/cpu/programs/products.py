"""Calls of a program that multiply: products, what rounds their inputs, and what adapters add."""

from typing import Any, cast

from mamba_eagle.cpu import abi
from mamba_eagle.cpu.additions import ADD, CpuAddition
from mamba_eagle.cpu.products import amx as cpu_tiles
from mamba_eagle.cpu.products import grouped
from mamba_eagle.cpu.products.packed import GroupedProduct, OwnProduct, TileProduct
from mamba_eagle.cpu.programs.calls import Call, Scratch
from mamba_eagle.cpu.span_kernels import SpanKernel
from mamba_eagle.layers.linear import Linear

PARTS = "parts"  # in the scratch: inputs in the form that a product in tiles reads


class Calls:
    """The calls of a program so far, and the scratch that they need."""

    def __init__(self, frame: Any, row_slots: abi.RowSlots | None = None) -> None:
        """row_slots: those of passes whose rows have adapters; None: none has."""
        self.frame, self.row_slots = frame, row_slots
        self.scratch, self.calls = Scratch(), list[Call]()

    def call(self, kernel: SpanKernel, block: Any, **columns: int) -> Call:
        """One whose units are rows, and whose block names the frame."""
        block.frame = self.frame.address
        call = Call(kernel, block, **{"units_per_row": 1} | columns)
        self.calls.append(call)
        return call

    def rounded(self, call: Call, reader: Linear) -> None:
        """What a call rounds, and its float32 result: what ``reader`` reads."""
        size = reader.weight.shape[1]
        self.scratch.want("inputs", size * 4)
        if isinstance(reader.packed, GroupedProduct):
            self.scratch.want("rounded", size + size // grouped.GROUP * 8)
            lies_rounded(call, call.block.rounded, size)
        elif isinstance(reader.packed, TileProduct):
            # tiles have the parts of several rows
            each = -(-cpu_tiles.parts_bytes(cpu_tiles.TILE_ROWS, size) // cpu_tiles.TILE_ROWS)
            self.scratch.want(PARTS, each, spare=cpu_tiles.TILE_ROWS)
            call.lies(call.block.rounded, numbers=PARTS)

    def product(self, layer: Linear, x: str, y: str) -> int:
        """Returns the columns of its result, y in the scratch."""
        product = layer.packed
        assert isinstance(product, OwnProduct)
        self.scratch.want(y, product.width * 4)
        kind = type(product.block)
        own = kind.from_buffer_copy(product.block)
        call = Call(
            product.kernel, own, units=product.units, rows_at=own.address + kind.rows.offset,
            work=product.read_ns,
            work_per_row=product.inputs * product.width // product.per_ns,
        )  # fmt: skip
        call.lies(y=y)
        if isinstance(product, GroupedProduct):
            lies_rounded(call, own, product.inputs)
        else:
            call.lies(x=PARTS if isinstance(product, TileProduct) else x)
        call.kept.append(product)
        self.calls.append(call)
        if self.row_slots is not None and layer.additions is not None:
            for added in layer.additions.parts:
                self._add(cast(CpuAddition, added), x, y, product.width)
        return product.width

    def _add(self, added: CpuAddition, x: str, y: str, width: int) -> None:
        """To a product's result, of the same float32 inputs."""
        assert self.row_slots is not None
        self.scratch.want("small", added.size.rank * 4)
        own = abi.Addition.from_buffer_copy(added.block)
        own.assign(row_slots=self.row_slots.address, width=width)
        call = Call(
            ADD, own, units_per_row=1, rows_at=own.address + abi.Addition.rows.offset,
            work_per_row=added.work_per_row,
        )  # fmt: skip
        call.lies(x=x, y=y, small="small")
        call.kept.append(added)
        self.calls.append(call)


def lies_rounded(call: Call, block: Any, size: int) -> None:
    """Numbers, scale and total of rounded rows of ``size`` inputs."""
    groups = size // grouped.GROUP * 4
    call.lies(block, numbers="rounded")
    call.lies(block, before=size, scale="rounded")
    call.lies(block, before=size + groups, total="rounded")


def takes_prepared_inputs(layer: Linear) -> bool:
    """Whether its product reads what the call before made of its inputs, not float32."""
    return isinstance(layer.packed, (TileProduct, GroupedProduct))


def multiplies(layer: Linear) -> bool:
    """Whether a program can call its product, and that is all of it."""
    return layer.bias is None and is_called(layer)


def is_called(layer: Linear) -> bool:
    """Whether a program can call its product."""
    return isinstance(layer.packed, OwnProduct)


def width_of(layer: Linear) -> int:
    """Columns of a product's result, padding included."""
    return cast(OwnProduct, layer.packed).width
