"""The kernels between a layer's products as spans (span_kernels.py), for programs (team.py).

Each is a loop over units that calls the kernel of the same name elsewhere, so programs compute what
layers do, bit by bit. It is given the address of its block (abi.py), which names the pass's
``Frame``.
"""

import numpy as np

from mamba_eagle.cpu import abi
from mamba_eagle.cpu.abi import bools, floats, ints, reader
from mamba_eagle.cpu.memory import pointer_to
from mamba_eagle.cpu.ops import tree_verify
from mamba_eagle.cpu.ops.gated_norm import gated_group_rms_norm, head_norm_then_gate
from mamba_eagle.cpu.ops.rms_norm import rms_norm
from mamba_eagle.cpu.ops.tree_attention import _tree_head
from mamba_eagle.cpu.products.amx import split_rows
from mamba_eagle.cpu.products.grouped import GROUP, round_rows
from mamba_eagle.cpu.span_kernels import SpanKernel
from mamba_eagle.cpu.vector_math import ZERO, copy_row, sigmoid_of, silu
from mamba_eagle.kernels.tree_verify.layout import TreeLayout
from mamba_eagle.machine_code import kernel, numba, strictly

frame_at, norm_at, gated_norm_at = reader(abi.Frame), reader(abi.Norm), reader(abi.GatedNorm)
gate_at, residual_at, inputs_at = reader(abi.Gate), reader(abi.Residual), reader(abi.Inputs)
columns_at = reader(abi.Columns)
recurrence_at, attention_at = reader(abi.Recurrence), reader(abi.Attention)
place_heads_at, gate_heads_at = reader(abi.PlaceHeads), reader(abi.GateHeads)


@kernel
def round_made(made, first, last, rounded):
    """Rows [first, last) of ``made`` [n, size] as a product's inputs."""
    n, size = made.shape
    if rounded.scale != 0:
        numbers = numba.carray(pointer_to(rounded.numbers), (n, size), np.int8)
        scale = floats(rounded.scale, (n, size // GROUP))
        total = numba.carray(pointer_to(rounded.total), (n, size // GROUP), np.int32)
        round_rows(made[first:last], numbers[first:last], scale[first:last], total[first:last])
    elif rounded.numbers != 0:
        split_rows(made.ctypes.data, rounded.numbers, size, first, last)


def _norm(arguments, first, last):
    own = norm_at(arguments)
    frame, size = frame_at(own.frame), own.size
    x, out = floats(frame.stream, (frame.rows, size)), floats(own.out, (frame.rows, size))
    if own.weight != 0:
        rms_norm(x[first:last], floats(own.weight, size), own.eps, out[first:last])
    else:
        for r in range(first, last):
            copy_row(x[r], out[r])
    round_made(out, first, last, own.rounded)


def _gated_norm(arguments, first, last):
    own = gated_norm_at(arguments)
    n, size, group = frame_at(own.frame).rows, own.size, own.group
    y, out = floats(own.y, (n, size)), floats(own.out, (n, size))
    for r in range(first, last):  # rows that are contiguous, as those that a layer passes
        gate = floats(own.projected + 4 * (r * own.columns + own.gate_at), (1, size))
        row, made = y[r : r + 1], out[r : r + 1]
        if own.norm_first:
            head_norm_then_gate(row, gate, floats(own.weight, group), own.eps, made)
        else:
            gated_group_rms_norm(row, gate, floats(own.weight, size), group, own.eps, made)
    round_made(out, first, last, own.rounded)


def _silu_gate(arguments, first, last):
    own = gate_at(arguments)
    n, size = frame_at(own.frame).rows, own.size
    both, out = floats(own.above, (n, own.columns)), floats(own.out, (n, size))
    for r in range(first, last):
        row, made = both[r], out[r]
        for c in range(size):
            made[c] = silu(row[c]) * row[size + c]
    round_made(out, first, last, own.rounded)


def _relu_squared(arguments, first, last):
    own = gate_at(arguments)
    n, size = frame_at(own.frame).rows, own.size
    above, out = floats(own.above, (n, own.columns)), floats(own.out, (n, size))
    for r in range(first, last):
        row, made = above[r], out[r]
        for c in range(size):
            positive = row[c] if not row[c] <= ZERO else ZERO  # NaN stays
            made[c] = positive * positive
    round_made(out, first, last, own.rounded)


@kernel
def _add_scaled(row, added, scale):
    """Rounded once where the processor can, as torch's ``add`` with ``alpha``."""
    for c in range(row.shape[0]):
        row[c] += scale * added[c]


def _residual(arguments, first, last):
    """stream += scale · made, or its norm"""
    own = residual_at(arguments)
    frame, size, scale = frame_at(own.frame), own.size, own.scale
    stream = floats(frame.stream, (frame.rows, size))
    made = floats(own.made, (frame.rows, own.columns))
    for r in range(first, last):
        row, added = stream[r], made[r]
        if own.weight != 0:
            whole = floats(own.made + 4 * r * own.columns, (1, size))
            rms_norm(whole, floats(own.weight, size), own.eps, whole)
        if scale == np.float32(1.0):
            for c in range(size):
                row[c] += added[c]
        else:
            _add_scaled(row, added, scale)


@kernel
def layout_of(frame):
    """Of the pass's trees."""
    b, T = frame.requests, frame.nodes
    return TreeLayout(
        ints(frame.slots, b),
        ints(frame.state_slots, b),
        ints(frame.journal, (b, frame.max_journal)),
        ints(frame.journal_len, b),
        ints(frame.node_rows, (b, T)),
        ints(frame.parents, (b, T)),
        None,
        ints(frame.tail, (b, frame.history)),
        bools(frame.fold, b),
    )


@kernel
def recurrence_of(own):
    """What ``_enter`` and ``_head`` take."""
    frame = frame_at(own.frame)
    n, b, T, most = frame.rows, frame.requests, frame.nodes, frame.max_journal
    R, K, W, H, P, N, G = own.R, own.K, own.W, own.H, own.P, own.N, own.G
    nodes = layout_of(frame)
    weights = tree_verify.LayerWeights(
        floats(own.conv, (K + 1, own.channels)), floats(own.heads, (3, H)), own.low, own.high
    )
    buffers = tree_verify.Buffers(
        floats(own.conv_in, (R, K - 1 + W, own.channels)),
        floats(own.xB, (R, W, H * P + G * N)),
        floats(own.dt, (R, W, own.E)),
        floats(own.decay, (R, W, H)),
        floats(own.state, (own.states, H, P, N)),
    )
    seen = tree_verify.Seen(
        floats(own.seen_C, (b, T, G, N)),
        ints(own.seen_rows, (b, most + T)),
        ints(own.seen_order, (b, T)),
        ints(own.seen_kept, (b, T)),
    )
    return nodes, weights, buffers, seen, floats(own.out, (n, H * P))


def _begin_requests(arguments, first, last):
    """Requests [first, last) of ``_enter``."""
    own = recurrence_at(arguments)
    nodes, weights, buffers, seen, y = recurrence_of(own)
    n = y.shape[0]
    projected, raw = floats(own.projected, (n, own.columns)), floats(own.raw, (n, own.raw_columns))
    xbc = projected[:, own.channels_at : own.channels_at + own.channels]
    dt = raw[:, own.gates_at : own.gates_at + own.E]
    for r in range(first, last):
        tree_verify._enter(r, xbc, dt, nodes, weights, buffers, seen)


def _heads(arguments, first, last):
    """Pairs [first, last) of a request and a head, of ``_head``."""
    own = recurrence_at(arguments)
    nodes, weights, buffers, seen, y = recurrence_of(own)
    H, skip = own.H, weights.heads[2]
    block = tree_verify._block_of(own.N, own.E, H)
    room = tree_verify._room(nodes.journal.shape[1], nodes.rows.shape[1], own.P, block)
    for task in range(first, last):
        tree_verify._head(task // H, task % H, nodes, skip, buffers, seen, y, room)


def _attention(arguments, first, last):
    """Pairs [first, last) of a request and a key head, of ``_tree_head``."""
    own = attention_at(arguments)
    frame, heads, kv, D = frame_at(own.frame), own.heads, own.kv_heads, own.head_dim
    n, trees, E = frame.rows, frame.trees, frame.family
    packed = floats(own.packed, (n, own.columns // D, D))
    end = heads * own.each  # of the queries
    new = (
        packed[:, : end : own.each],
        packed[:, end : end + kv],
        packed[:, end + kv : end + 2 * kv],
    )
    pool = (floats(own.keys, (own.kv_slots, kv, D)), floats(own.values, (own.kv_slots, kv, D)))
    table = ints(frame.table, (frame.table_rows, frame.positions))
    sequences = (table, ints(frame.attended, trees), ints(frame.prefix, trees))
    nodes, parents = ints(frame.own, (trees, E)), ints(frame.above, (trees, E))
    out = floats(own.out, (n, heads, D))
    for task in range(first, last):
        _tree_head(task // kv, task % kv, new, pool, sequences, nodes, parents, own.scale, out)


@strictly
def _rotate(head, cos, sin):
    pairs = len(cos)
    for c in range(pairs):
        first, second = head[c], head[pairs + c]
        head[c] = first * cos[c] - second * sin[c]
        head[pairs + c] = second * cos[c] + first * sin[c]


def _place_heads(arguments, first, last):
    own = place_heads_at(arguments)
    frame, D = frame_at(own.frame), own.head_dim
    n, end = frame.rows, own.heads * own.each
    cos, sin = floats(frame.cos, (n, frame.pairs)), floats(frame.sin, (n, frame.pairs))
    for r in range(first, last):
        if own.whole:
            at = own.packed + 4 * r * own.columns
            for weight, count in ((own.q_norm, own.heads), (own.k_norm, own.kv_heads)):
                heads = floats(at, (1, count * D))
                rms_norm(heads, floats(weight, count * D), own.eps, heads)
                at += 4 * count * D
        for h in range(own.heads + own.kv_heads):
            is_query = h < own.heads
            at = h * own.each if is_query else end + h - own.heads
            head = floats(own.packed + 4 * (r * own.columns + at * D), (1, D))
            weight = own.q_norm if is_query else own.k_norm
            if weight != 0 and not own.whole:
                rms_norm(head, floats(weight, D), own.eps, head)
            _rotate(head[0], cos[r], sin[r])


@strictly
def _gate_head(read, gate):
    for c in range(len(read)):
        read[c] = read[c] * sigmoid_of(gate[c])


def _gate_heads(arguments, first, last):
    own = gate_heads_at(arguments)
    n, heads, D = frame_at(own.frame).rows, own.heads, own.head_dim
    packed, out = floats(own.packed, (n, own.columns // D, D)), floats(own.out, (n, heads * D))
    for r in range(first, last):
        for h in range(heads):
            _gate_head(out[r, h * D : (h + 1) * D], packed[r, 2 * h + 1])
    round_made(out, first, last, own.rounded)


def _arrange(arguments, first, last):
    own = columns_at(arguments)
    n, order = frame_at(own.frame).rows, ints(own.order, own.size)
    made, out = floats(own.made, (n, own.columns)), floats(own.out, (n, own.size))
    for r in range(first, last):
        for c in range(own.size):
            out[r, c] = made[r, order[c]]


def _round_inputs(arguments, first, last):
    own = inputs_at(arguments)
    x = floats(own.x, (frame_at(own.frame).rows, own.size))
    round_made(x, first, last, own.rounded)


NORM, GATED_NORM = SpanKernel(_norm), SpanKernel(_gated_norm)
SILU_GATE, RELU_SQUARED = SpanKernel(_silu_gate), SpanKernel(_relu_squared)
RESIDUAL, ARRANGE = SpanKernel(_residual), SpanKernel(_arrange)
PLACE_HEADS, GATE_HEADS = SpanKernel(_place_heads), SpanKernel(_gate_heads)
ATTENTION, ROUND_INPUTS = SpanKernel(_attention), SpanKernel(_round_inputs)
BEGIN_REQUESTS, HEADS = SpanKernel(_begin_requests), SpanKernel(_heads)
