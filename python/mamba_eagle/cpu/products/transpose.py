"""Weights into the order in which products on a CPU read them: panels of outputs, transposed.

Loading is mostly this. torch copies one number after the other; here 16 vectors of 16 numbers
become their transpose in four rounds, each of which interleaves vector i with vector i + 8.
"""

from typing import Any

import torch
from torch import Tensor

from mamba_eagle.cpu import abi
from mamba_eagle.cpu.span_kernels import vector_kernel
from mamba_eagle.cpu.vectors.code import I16, I32, I64, INTS, LANES, Code, has, ir
from mamba_eagle.machine_code import exactly

BYTES_PER_NS = 4  # that a core transposes
PAIR = 16 if has("avx512f") else 8  # between rows whose numbers are paired: what a register holds


@exactly
def place_in_pairs(row, pair):  # noqa: ANN001, ANN201
    """The column of a row whose numbers are paired; of torch's tensors without Numba."""
    return row // (2 * pair) * 2 * pair + row % pair * 2 + row // pair % 2


def _order(paired: bool) -> tuple[int, int, list[int]]:
    """What 16 columns are made of: with how many neighbours they share the rows of all, how many
    rows further on each of these begins, and the rows, from the first one on."""
    if not paired:
        return 1, 0, list(range(LANES))
    return 2 * PAIR // LANES, LANES // 2, [i // 2 + i % 2 * PAIR for i in range(LANES)]


def _blocks(bits: int, paired: bool = False) -> Any:
    """Panels of rows [width, in] -> [in, width]; in, width: multiples of 16.

    Units are blocks of 16 rows; numbers have 16 or 32 bits. paired: row i lies beside i + PAIR.
    """
    blocks, later, order = _order(paired)

    def write(code: Code, arguments: Any, first: Any, last: Any) -> None:
        b, kind = code.builder, I16 if bits == 16 else I32
        given = code.fields(arguments, abi.Transposed)
        source, target, inputs, width = given.source, given.target, given.inputs, given.width
        with code.loop(b.sub(last, first)) as index:
            block, per_panel = b.add(first, index), b.udiv(width, I64(LANES))
            within_pairs = b.urem(block, I64(blocks))
            row = b.mul(b.sub(block, within_pairs), I64(LANES))
            begin = b.mul(b.add(row, b.mul(within_pairs, I64(later))), inputs)
            within = b.mul(b.urem(block, per_panel), I64(LANES))
            place = b.add(code.times(b.udiv(block, per_panel), inputs, width), within)
            rows = [code.at(source, b.add(begin, b.mul(inputs, I64(row))), kind) for row in order]
            with code.loop(b.udiv(inputs, I64(LANES))) as tile:
                at = b.mul(tile, I64(LANES))
                columns = _transposed(b, [code.vector(row, at, kind) for row in rows])
                out = code.at(target, b.add(place, b.mul(at, width)), kind)
                for i, column in enumerate(columns):
                    code.store(column, out, b.mul(width, I64(i)))

    return write


def _transposed(builder: Any, vectors: list[Any]) -> list[Any]:
    """16 vectors of 16 numbers: those of the transpose."""
    half = LANES // 2
    low, high = (
        ir.Constant(INTS, [i + k for i in range(first, first + half) for k in (0, LANES)])
        for first in (0, half)
    )
    for _ in range(4):  # log2 of 16
        vectors = [
            builder.shuffle_vector(vectors[i], vectors[i + half], mask)
            for i in range(half)
            for mask in (low, high)
        ]
    return vectors


_KERNELS = {
    torch.bfloat16: vector_kernel("transpose_pairs", _blocks(16, paired=True)),
    torch.float16: vector_kernel("transpose_shorts", _blocks(16)),
    torch.float32: (_of_words := vector_kernel("transpose_words", _blocks(32))),
    torch.int32: _of_words,
}


def transpose(rows: Tensor, panels: Tensor) -> None:
    """rows [width * n, in] -> panels [n, in, width], which is contiguous. Numbers have 16 or 32
    bits; those of bfloat16 are paired. width is a multiple of 32."""
    inputs, width = rows.shape[1], panels.shape[2]
    if inputs % LANES or not rows.is_contiguous():
        if rows.dtype == torch.bfloat16:
            rows = rows.unflatten(0, (-1, 2, PAIR)).transpose(1, 2).reshape(rows.shape)
        panels.copy_(rows.unflatten(0, (-1, width)).transpose(1, 2))
        return
    given = abi.Transposed(rows.data_ptr(), panels.data_ptr(), inputs, width)
    _KERNELS[rows.dtype](len(rows) // LANES, rows.nbytes // BYTES_PER_NS, given)
