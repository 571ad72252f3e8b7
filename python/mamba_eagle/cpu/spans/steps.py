"""What a decode step does around a model's layers as spans (span_kernels.py), for programs.

Each computes what the kernel of the same name does elsewhere, bit by bit.

b requests, T nodes of a tree, R request slots, W rows per request, D the longest accepted path.
"""

import numpy as np

from mamba_eagle.cpu import abi
from mamba_eagle.cpu.abi import bools, floats, ints, reader
from mamba_eagle.cpu.memory import pointer_to
from mamba_eagle.cpu.ops import tree_verify
from mamba_eagle.cpu.ops.accept import accept_and_truncate, append_pending, commit
from mamba_eagle.cpu.ops.best_token import best_of
from mamba_eagle.cpu.products.transpose import place_in_pairs
from mamba_eagle.cpu.span_kernels import SpanKernel
from mamba_eagle.cpu.spans.layers import frame_at, layout_of, recurrence_at, recurrence_of
from mamba_eagle.machine_code import kernel, numba

step_at, stored_rows_at = reader(abi.Step), reader(abi.StoredRows)
append_at, enter_roots_at, best_of_at = map(reader, (abi.Append, abi.EnterRoots, abi.BestOf))


@kernel
def _scale(row, scale):
    if scale != np.float32(1.0):
        for c in range(row.shape[0]):
            row[c] *= scale


@kernel
def _begin_of(own, token):
    """Where the embedding has the row of a token: the place of its first number."""
    place = token % own.per_block
    if own.pair > 0:
        place = place_in_pairs(place, own.pair)
    return token // own.per_block * own.block + place * own.neighbours


def _embed_16(arguments, first, last):
    """Rows of an embedding in bfloat16, times a scale."""
    own = stored_rows_at(arguments)
    tokens, out = ints(own.tokens, last), floats(own.out, (last, own.columns))
    size, step, group = own.size, own.next, own.neighbours
    for r in range(first, last):
        at = own.numbers + 2 * _begin_of(own, tokens[r])
        stored = numba.carray(pointer_to(at), size * step, np.uint16)
        row = out[r, :size]
        for c in range(0, size, group):
            for i in range(group):
                bits = np.uint32(stored[c // group * step + i])
                row[c + i] = np.uint32(bits << np.uint32(16)).view(np.float32)
        _scale(row, own.scale)


def _embed_32(arguments, first, last):
    """The same in float32."""
    own = stored_rows_at(arguments)
    tokens, out = ints(own.tokens, last), floats(own.out, (last, own.columns))
    size, step = own.size, own.next
    for r in range(first, last):
        stored = floats(own.numbers + 4 * _begin_of(own, tokens[r]), size * step)
        row = out[r, :size]
        for c in range(size):
            row[c] = stored[c * step]
        _scale(row, own.scale)


def _crowded(arguments, first, last):
    """Which journals are folded: those that leave no room for the trees."""
    step = step_at(arguments)
    slots, lengths = ints(step.slots, step.b), ints(step.journal_lengths, step.R)
    own, folded = ints(frame_at(step.frame).slots, step.b), ints(step.folded, step.b)
    for r in range(step.b):
        own[r] = slots[r]
        length = lengths[slots[r]]
        folded[r] = length if length > step.max_journal else 0


def _fold(arguments, first, last):
    """Pairs [first, last) of a request and a head, of ``fold``."""
    own = recurrence_at(arguments)
    step, H = step_at(own.step), own.H
    state_slot, path = ints(step.state_slot, step.R), ints(step.path, (step.R, step.places))
    nodes, _, buffers, _, _ = recurrence_of(own)
    slots, folded = nodes.slots, ints(step.folded, step.b)
    for task in range(first, last):
        r, h = task // H, task % H
        length = folded[r]
        if length > 0:
            slot = slots[r]
            rows = path[slot, step.history : step.history + length] - step.history
            tree_verify._fold_head(slot, rows, buffers.state[state_slot[slot], h], h, buffers)


@kernel
def _kept(step):
    """What ``empty_journals`` takes after slots and lengths."""
    R, history, W, F = step.R, step.history, step.W, step.size
    return (
        ints(step.state_slot, R),
        ints(step.path, (R, step.places)),
        ints(step.journal_lengths, R),
        history,
        floats(step.conv_in, (step.layers, R, history + W, step.channels)),
        floats(step.row_features, (R, W, F)),
        floats(step.pool_features, (step.states, F)),
    )


def _open(arguments, first, last):
    """What follows folds, the layout of the step's trees, and where they begin."""
    step = step_at(arguments)
    frame = frame_at(step.frame)
    nodes, kept = layout_of(frame), _kept(step)
    (b, T), slots, processed = nodes.rows.shape, nodes.slots, ints(step.processed, step.R)
    tree_verify.empty_journals(slots, ints(step.folded, b), *kept)
    tree_verify.begin(
        slots, *kept[:3], nodes.state_slots, nodes.journal, nodes.journal_len, nodes.rows,
        nodes.tail,
    )  # fmt: skip
    tree_verify.fold_in_step(nodes, *kept)
    positions, depths = ints(step.positions, (b, T)), ints(step.depths, (b, T))
    prefix = ints(frame.prefix, b)
    for r in range(b):
        prefix[r] = processed[slots[r]]
        for i in range(T):
            positions[r, i] = prefix[r] + depths[r, i]


def _commit(arguments, first, last):
    """``accept_and_truncate``, ``extend_journals`` and ``commit``."""
    step = step_at(arguments)
    b, T, R, D, F = step.b, step.T, step.R, step.D, step.size
    slots, lengths = ints(step.slots, b), ints(step.journal_lengths, R)
    rows = ints(frame_at(step.frame).node_rows, (b, T))
    processed, remaining = ints(step.processed, R), ints(step.remaining, R)
    nodes, tokens = ints(step.path_nodes, (b, D)), ints(step.path_tokens, (b, D))
    count, finished = ints(step.number, b), bools(step.finished, b)
    accept_and_truncate(
        ints(step.tokens, (b, T)), ints(step.parents, (b, T)), ints(step.target, (b, T)),
        ints(step.stops, (R, step.num_stops)), remaining, slots, nodes, tokens, count, finished,
    )  # fmt: skip
    tree_verify.extend_journals(
        slots, rows, nodes, count, floats(step.features, (b * T, F)), step.history,
        ints(step.path, (R, step.places)), lengths, floats(step.row_features, (R, step.W, F)),
    )  # fmt: skip
    commit(
        slots, ints(step.kv_slots, (b, T)), nodes, tokens, count, finished,
        ints(step.table, (R, step.columns)), processed, ints(step.last_token, R), remaining,
    )  # fmt: skip
    folded = ints(step.folded_at, b)
    for r in range(b):
        folded[r] = processed[slots[r]] - lengths[slots[r]]


def _append(arguments, first, last):
    """``append_pending``"""
    own = append_at(arguments)
    b, D, R, places, F = own.b, own.D, own.R, own.places, own.size
    append_pending(
        ints(own.slots, b), ints(own.nodes, (b, D)), ints(own.tokens, (b, D)), ints(own.count, b),
        floats(own.entries, (b, own.T, F)), ints(own.waiting_tokens, (R, places)),
        floats(own.waiting, (R, places, F)), ints(own.pending, R),
    )  # fmt: skip


def _enter_roots(arguments, first, last):
    """``Backend.enter_roots``"""
    own = enter_roots_at(arguments)
    slots, kv_slots = ints(own.slots, last), ints(own.kv_slots, (last, own.T))
    table, processed = ints(own.table, (own.R, own.columns)), ints(own.processed, own.R)
    for r in range(first, last):
        table[slots[r], processed[slots[r]]] = kv_slots[r, 0]


def _best_of(arguments, first, last):
    """``best_of`` of rows [first, last)."""
    own = best_of_at(arguments)
    best_of(floats(own.scores, (last, own.size))[first:], ints(own.tokens, last)[first:])


EMBED_16, EMBED_32 = SpanKernel(_embed_16), SpanKernel(_embed_32)
CROWDED, FOLD, OPEN = SpanKernel(_crowded), SpanKernel(_fold), SpanKernel(_open)
COMMIT, APPEND = SpanKernel(_commit), SpanKernel(_append)
ENTER_ROOTS, BEST_OF = SpanKernel(_enter_roots), SpanKernel(_best_of)
