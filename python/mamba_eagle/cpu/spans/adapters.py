"""What adapters add to a product, row by row: so a row has the same bits in each batch, and rows
without an adapter are not touched."""

from __future__ import annotations

from mamba_eagle.cpu import abi
from mamba_eagle.cpu.abi import floats, ints, reader
from mamba_eagle.cpu.span_kernels import SpanKernel
from mamba_eagle.cpu.vector_math import ZERO
from mamba_eagle.machine_code import exactly

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
    """y[c] += Σ small[r] weight[r, c]"""
    for r in range(small.shape[0]):
        factor = small[r]
        for c in range(y.shape[0]):
            y[c] += factor * weight[r, c]


def _add(arguments, first, last):
    own = addition_at(arguments)
    n, R, S, outputs = own.rows, own.R, own.S, own.outputs
    slots, ranks = ints(row_slots_at(own.row_slots).slots, n), ints(own.ranks, S)
    x, y = floats(own.x, (n, own.inputs)), floats(own.y, (n, own.width))
    small = floats(own.small, (n, R))
    down, up = floats(own.down, (S, own.inputs, R)), floats(own.up, (S, R, outputs))
    for row in range(first, last):
        slot = slots[row]
        if slot >= 0 and ranks[slot] > 0:
            made = small[row, : ranks[slot]]
            _down(x[row], down[slot], made)
            _up(made, up[slot], y[row, own.first : own.first + outputs])


ADD = SpanKernel(_add)
