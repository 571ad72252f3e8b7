"""What adapters add to a product on a CPU, in float32, row by row: so a row has the same bits in
each batch, and rows without an adapter are not touched."""

import torch
from torch import Tensor

from mamba_eagle.cpu import abi
from mamba_eagle.cpu.abi import floats, ints, reader
from mamba_eagle.cpu.span_kernels import SpanKernel
from mamba_eagle.cpu.vector_math import ZERO
from mamba_eagle.layers.adapters import AdapterSize, Addition
from mamba_eagle.machine_code import exactly

PRODUCTS_PER_NS = 8  # multiply-adds

addition_at, row_slots_at = reader(abi.Addition), reader(abi.RowSlots)


@exactly
def _down(x, weight, small):
    """small[r] = Σ x[i] weight[i, r], four inputs at a time."""
    size, rank = x.shape[0], small.shape[0]
    for r in range(rank):
        small[r] = ZERO
    whole = size - size % 4
    for i in range(0, whole, 4):
        a, b, c, d = x[i], x[i + 1], x[i + 2], x[i + 3]
        for r in range(rank):
            first = a * weight[i, r] + b * weight[i + 1, r]
            small[r] += first + (c * weight[i + 2, r] + d * weight[i + 3, r])
    for i in range(whole, size):
        for r in range(rank):
            small[r] += x[i] * weight[i, r]


@exactly
def _up(small, weight, y):
    """y[c] += Σ small[r] weight[r, c], four ranks at a time."""
    rank = small.shape[0]
    whole = rank - rank % 4
    for r in range(0, whole, 4):
        a, b, c, d = small[r], small[r + 1], small[r + 2], small[r + 3]
        for i in range(y.shape[0]):
            first = a * weight[r, i] + b * weight[r + 1, i]
            y[i] += first + (c * weight[r + 2, i] + d * weight[r + 3, i])
    for r in range(whole, rank):
        for i in range(y.shape[0]):
            y[i] += small[r] * weight[r, i]


def _add(arguments, first, last):
    own = addition_at(arguments)
    n, R, S, outputs = own.rows, own.R, own.S, own.outputs
    slots, ranks = ints(row_slots_at(own.row_slots).slots, n), ints(own.ranks, S)
    x, y = floats(own.x, (n, own.inputs)), floats(own.y, (n, own.width))
    small, up = floats(own.small, (n, R)), floats(own.up, (S, R, outputs))
    for row in range(first, last):
        slot = slots[row]
        if slot >= 0 and ranks[slot] > 0:
            made, at = small[row, : ranks[slot]], own.down + 4 * slot * own.inputs * R
            _down(x[row], floats(at, (own.inputs, ranks[slot])), made)
            _up(made, up[slot], y[row, own.first : own.first + outputs])


ADD = SpanKernel(_add)


class CpuAddition(Addition):
    """The slots of one matrix. ``down`` lies with its ranks side by side, as the kernel adds them
    up, and what a slot holds at its beginning: of lines that are far apart, the memory would also
    read what lies between."""

    def __init__(self, size: AdapterSize) -> None:
        super().__init__(size)
        ADD.prepare()  # no request waits for it
        slots, rank, inputs, outputs, first = size
        self.down = torch.zeros(slots, inputs, rank)
        self.up = torch.zeros(slots, rank, outputs)
        self.ranks = torch.zeros(slots, dtype=torch.int64)
        self.row_slots = abi.RowSlots()  # of passes without a program
        self.block = abi.Addition(
            row_slots=self.row_slots.address, R=rank, S=slots, inputs=inputs, outputs=outputs,
            first=first,
        )  # fmt: skip
        self.block.point(down=self.down, up=self.up, ranks=self.ranks)

    @property
    def work_per_row(self) -> int:
        """Nanoseconds."""
        size = self.size
        return size.rank * (size.inputs + size.outputs) // PRODUCTS_PER_NS

    def put(self, slot: int, down: Tensor, up: Tensor) -> None:
        rank = len(down)
        self.down[slot].view(-1)[: down.numel()].copy_(down.t().flatten())
        self.up[slot, :rank].copy_(up.t())
        self.ranks[slot] = rank

    def __call__(self, y: Tensor, x: Tensor, slots: Tensor) -> None:
        assert y.is_contiguous() and slots.dtype == torch.int64
        x, n = x.contiguous(), len(x)
        small = torch.empty(n, self.size.rank)
        self.row_slots.point(slots=slots)
        self.block.point(x=x, y=y, small=small)
        self.block.assign(rows=n, width=y.shape[1])
        ADD(n, n * self.work_per_row, self.block)
