"""The kernels between a layer's products as spans (vector_code.py), for programs (numba_team.py).

Each is a loop over units that calls the kernel of the same name elsewhere, so programs compute what
layers do, bit by bit. Arguments are words: the first is the address of the step's ``Frame``, others
are addresses of arrays that stay and sizes.
"""

from __future__ import annotations

import numpy as np

from mamba_eagle.kernels.gated_norm.cpu import gated_group_rms_norm
from mamba_eagle.kernels.grouped.cpu import GROUP, round_rows
from mamba_eagle.kernels.linear.cpu_tiles import split_rows
from mamba_eagle.kernels.numba_math import ZERO, kernel, numba, silu
from mamba_eagle.kernels.numba_words import pointer_to
from mamba_eagle.kernels.rms_norm.cpu import rms_norm
from mamba_eagle.kernels.tree_attention.cpu import _tree_head
from mamba_eagle.kernels.tree_verify.cpu import Buffers, LayerWeights, Seen, _enter, _head, _room
from mamba_eagle.kernels.tree_verify.layout import TreeLayout
from mamba_eagle.kernels.vector_code import SpanKernel


class Frame:
    """Words that all calls of a step read: addresses, then sizes."""

    STREAM, ROWS = 0, 1  # [n, hidden_size] float32, and n
    # TreeLayout's arrays, each contiguous
    SLOTS, STATE_SLOTS, JOURNAL, JOURNAL_LEN, NODE_ROWS, PARENTS, TAIL = range(2, 9)
    REQUESTS, NODES, MAX_JOURNAL, HISTORY = range(9, 13)
    # what attention reads: the slot table and its columns, by request the slot and the prefix,
    # nodes' KV slots and parents, their number (drafted lanes: those of all depths), and trees
    TABLE, TABLE_ROWS, POSITIONS, ATTENDED, PREFIX, OWN, ABOVE, FAMILY, TREES = range(13, 22)
    FOLD = 22  # TreeLayout's, bytes
    COUNT = 24


@kernel
def _words(address, count):
    return numba.carray(pointer_to(address), count, np.int64)


@kernel
def _floats(address, rows, columns):
    return numba.carray(pointer_to(address), (rows, columns), np.float32)


@kernel
def _ints(address, count):
    return numba.carray(pointer_to(address), count, np.int64)


@kernel
def _integers(address, rows, columns):
    return numba.carray(pointer_to(address), (rows, columns), np.int64)


@kernel
def _round(made, first, last, rounded, n, size):
    """Rows [first, last) of ``made`` [n, size] as a product's inputs. rounded: three addresses; one
    alone is that of the parts of inputs, none says that the product takes float32."""
    if rounded[1] != 0:
        numbers = numba.carray(pointer_to(rounded[0]), (n, size), np.int8)
        scale = numba.carray(pointer_to(rounded[1]), (n, size // GROUP), np.float32)
        total = numba.carray(pointer_to(rounded[2]), (n, size // GROUP), np.int32)
        round_rows(made[first:last], numbers[first:last], scale[first:last], total[first:last])
    elif rounded[0] != 0:
        split_rows(made.ctypes.data, rounded[0], size, first, last)


def _norm(arguments, first, last):
    """Words: frame, weight, eps (of a float64), size, out, and where it is rounded to (three)."""
    given = _words(arguments, 8)
    frame = _words(given[0], 2)
    n, size = frame[1], given[3]
    x, out = _floats(frame[0], n, size), _floats(given[4], n, size)
    weight = _floats(given[1], 1, size)[0]
    eps = numba.carray(pointer_to(given[2]), 1, np.float64)[0]
    rms_norm(x[first:last], weight, eps, out[first:last])
    _round(out, first, last, given[5:8], n, size)


def _gated_norm(arguments, first, last):
    """Words: frame, weight, eps, size, group size, y, projected, its columns, out, rounded."""
    given = _words(arguments, 12)
    n, size = _words(given[0], 2)[1], given[3]
    weight = _floats(given[1], 1, size)[0]
    eps = numba.carray(pointer_to(given[2]), 1, np.float64)[0]
    y, out = _floats(given[5], n, size), _floats(given[8], n, size)
    for r in range(first, last):  # rows that are contiguous, as those that a layer passes
        gate = _floats(given[6] + 4 * r * given[7], 1, size)
        gated_group_rms_norm(y[r : r + 1], gate, weight, given[4], eps, out[r : r + 1])
    _round(out, first, last, given[9:12], n, size)


def _silu_gate(arguments, first, last):
    """Words: frame, size, both, its columns, out, rounded."""
    given = _words(arguments, 8)
    n, size = _words(given[0], 2)[1], given[1]
    both, out = _floats(given[2], n, given[3]), _floats(given[4], n, size)
    for r in range(first, last):
        row, made = both[r], out[r]
        for c in range(size):
            made[c] = silu(row[c]) * row[size + c]
    _round(out, first, last, given[5:8], n, size)


def _relu_squared(arguments, first, last):
    """Words: frame, size, above, its columns, out, rounded."""
    given = _words(arguments, 8)
    n, size = _words(given[0], 2)[1], given[1]
    above, out = _floats(given[2], n, given[3]), _floats(given[4], n, size)
    for r in range(first, last):
        row, made = above[r], out[r]
        for c in range(size):
            positive = row[c] if not row[c] <= ZERO else ZERO  # NaN stays
            made[c] = positive * positive
    _round(out, first, last, given[5:8], n, size)


@kernel
def _add_scaled(row, added, scale):
    """Rounded once where the processor can, as torch's ``add`` with ``alpha``."""
    for c in range(row.shape[0]):
        row[c] += scale * added[c]


def _residual(arguments, first, last):
    """stream += scale · made. Words: frame, size, made, its columns, scale (of a float32)."""
    given = _words(arguments, 5)
    frame = _words(given[0], 2)
    n, size = frame[1], given[1]
    stream, made = _floats(frame[0], n, size), _floats(given[2], n, given[3])
    scale = numba.carray(pointer_to(given[4]), 1, np.float32)[0]
    for r in range(first, last):
        row, added = stream[r], made[r]
        if scale == np.float32(1.0):
            for c in range(size):
                row[c] += added[c]
        else:
            _add_scaled(row, added, scale)


class Recurrence:
    """Words of the two spans of a layer's recurrence."""

    FRAME, PROJECTED, WIDTH, CONV, HEADS, LIMITS = range(6)
    CONV_IN, XB, DT, DECAY, STATE = range(6, 11)
    # R request slots; K, W, channels, H, P, N, G as in tree_verify/cpu.py; state slots
    SLOTS, TAPS, ROWS, CHANNELS, NUM_HEADS, HEAD_DIM, STATE_SIZE, GROUPS, STATES = range(11, 20)
    SEEN_C, SEEN_ROWS, SEEN_ORDER, SEEN_KEPT, OUT = range(20, 25)
    COUNT = 25


@kernel
def _recurrence(arguments):
    """What ``_enter`` and ``_head`` take."""
    w = _words(arguments, 25)
    f = _words(w[0], 24)
    n, b, T, most = f[1], f[9], f[10], f[11]
    R, K, rows, channels, H, P, N, G = w[11], w[12], w[13], w[14], w[15], w[16], w[17], w[18]
    inner = H * P
    nodes = TreeLayout(
        numba.carray(pointer_to(f[2]), b, np.int64),
        numba.carray(pointer_to(f[3]), b, np.int64),
        _integers(f[4], b, most),
        numba.carray(pointer_to(f[5]), b, np.int64),
        _integers(f[6], b, T),
        _integers(f[7], b, T),
        None,
        _integers(f[8], b, f[12]),
        numba.carray(pointer_to(f[22]), b, np.bool_),
    )
    limits = numba.carray(pointer_to(w[5]), 2, np.float32)
    weights = LayerWeights(
        _floats(w[3], K + 1, channels), _floats(w[4], 3, H), limits[0], limits[1]
    )
    buffers = Buffers(
        numba.carray(pointer_to(w[6]), (R, K - 1 + rows, channels), np.float32),
        numba.carray(pointer_to(w[7]), (R, rows, inner + G * N), np.float32),
        numba.carray(pointer_to(w[8]), (R, rows, H), np.float32),
        numba.carray(pointer_to(w[9]), (R, rows, H), np.float32),
        numba.carray(pointer_to(w[10]), (w[19], H, P, N), np.float32),
    )
    seen = Seen(
        numba.carray(pointer_to(w[20]), (b, T, G, N), np.float32),
        _integers(w[21], b, most + T),
        _integers(w[22], b, T),
        _integers(w[23], b, T),
    )
    projected = _floats(w[1], n, w[2])
    return projected, nodes, weights, buffers, seen, _floats(w[24], n, inner)


def _begin_requests(arguments, first, last):
    """Requests [first, last) of ``_enter``."""
    projected, nodes, weights, buffers, seen, _ = _recurrence(arguments)
    inner = buffers.state.shape[1] * buffers.state.shape[2]
    channels = buffers.conv_in.shape[2]
    end = inner + channels
    xbc, dt = projected[:, inner:end], projected[:, end : end + buffers.state.shape[1]]
    for r in range(first, last):
        _enter(r, xbc, dt, nodes, weights, buffers, seen)


def _heads(arguments, first, last):
    """Pairs [first, last) of a request and a head, of ``_head``."""
    _, nodes, weights, buffers, seen, y = _recurrence(arguments)
    H, skip = buffers.state.shape[1], weights.heads[2]
    room = _room(nodes.journal.shape[1], nodes.rows.shape[1], buffers.state.shape[2])
    for task in range(first, last):
        _head(task // H, task % H, nodes, skip, buffers, seen, y, room)


class Attended:
    """Words of attention's span."""

    FRAME, PACKED, WIDTH, HEADS, KV_HEADS, HEAD_DIM, SCALE, KEYS, VALUES, KV_SLOTS, OUT = range(11)
    COUNT = 11


def _attention(arguments, first, last):
    """Pairs [first, last) of a request and a key head, of ``_tree_head``. Queries, keys and values
    lie side by side in ``packed`` [n, columns]."""
    w = _words(arguments, 11)
    f = _words(w[0], 24)
    n, b, E = f[1], f[21], f[20]
    heads, kv, D = w[3], w[4], w[5]
    packed = numba.carray(pointer_to(w[1]), (n, w[2] // D, D), np.float32)
    new = (packed[:, :heads], packed[:, heads : heads + kv], packed[:, heads + kv : heads + 2 * kv])
    pool = (
        numba.carray(pointer_to(w[7]), (w[9], kv, D), np.float32),
        numba.carray(pointer_to(w[8]), (w[9], kv, D), np.float32),
    )
    sequences = (
        _integers(f[13], f[14], f[15]),
        numba.carray(pointer_to(f[16]), b, np.int64),
        numba.carray(pointer_to(f[17]), b, np.int64),
    )
    own, parents = _integers(f[18], b, E), _integers(f[19], b, E)
    scale = numba.carray(pointer_to(w[6]), 1, np.float32)[0]
    out = numba.carray(pointer_to(w[10]), (n, heads, D), np.float32)
    for task in range(first, last):
        _tree_head(task // kv, task % kv, new, pool, sequences, own, parents, scale, out)


def _round_inputs(arguments, first, last):
    """Words: frame, size, x, rounded."""
    given = _words(arguments, 6)
    n = _words(given[0], 2)[1]
    _round(_floats(given[2], n, given[1]), first, last, given[3:6], n, given[1])


NORM, GATED_NORM = SpanKernel(_norm), SpanKernel(_gated_norm)
SILU_GATE, RELU_SQUARED = SpanKernel(_silu_gate), SpanKernel(_relu_squared)
RESIDUAL = SpanKernel(_residual)
ATTENTION, ROUND_INPUTS = SpanKernel(_attention), SpanKernel(_round_inputs)
BEGIN_REQUESTS, HEADS = SpanKernel(_begin_requests), SpanKernel(_heads)
