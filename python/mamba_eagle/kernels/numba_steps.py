"""What a decode step does around a model's layers as spans (vector_code.py), for programs.

Each computes what the kernel of the same name does elsewhere, bit by bit. The first argument is the
address of the layers' ``Frame`` (numba_spans.py), the second that of the ``Step``.

b requests, T nodes of a tree, R request slots, W rows per request, D the longest accepted path.
"""

from __future__ import annotations

import numpy as np

from mamba_eagle.kernels.accept.cpu import accept_and_truncate, append_pending, commit
from mamba_eagle.kernels.numba_math import kernel, numba
from mamba_eagle.kernels.numba_spans import _floats, _integers, _recurrence, _words
from mamba_eagle.kernels.numba_words import pointer_to
from mamba_eagle.kernels.tree_verify.cpu import _fold_head, begin, extend_journals, move_history
from mamba_eagle.kernels.vector_code import SpanKernel


class Step:
    """Words that all calls of a step read: addresses and sizes."""

    # given: request slots [b]; KV slots, tokens, parents, depths of the nodes [b, T]
    SLOTS, B, T, KV_SLOTS, TOKENS, PARENTS, DEPTHS = range(7)
    # made: positions of the nodes [b, T]; hidden states [b*T, F]
    POSITIONS, FEATURES, SIZE = 7, 8, 9
    # by request slot [R]: tokens processed, state slots, journals' lengths; places [R, P]
    R, PROCESSED, STATE_SLOT, JOURNAL_LEN, PATH, PLACES = range(10, 16)
    # K-1, W, the longest journal that leaves room for a tree
    HISTORY, W, MAX_JOURNAL = 16, 17, 18
    # the layout [b, …]: request slots, state slots, journal, its length, rows, tail
    ITS_SLOTS, STATE_SLOTS, JOURNAL, LENGTHS, ROWS, TAIL = range(19, 25)
    FOLDED = 25  # [b]: rows of the journals that are folded in this step
    # features by row [R, W, F] and by state slot [S, F]; raw inputs [layers, R, K-1 + W, channels]
    ROW_FEATURES, POOL_FEATURES, STATES, CONV_IN, LAYERS, CHANNELS = range(26, 32)
    # the request table: slot table [R, positions], [R] each, stop tokens [R, stops]
    TABLE, TABLE_COLUMNS, LAST_TOKEN, REMAINING, STOPS, NUM_STOPS = range(32, 38)
    # accepted: the target's tokens [b, T]; nodes and tokens of the paths [b, D], count, finished
    # [b]; positions of the states [b]
    TARGET, D, PATH_NODES, PATH_TOKENS, NUMBER, FINISHED, FOLDED_AT = range(38, 45)
    PREFIX = 45  # [b]: as ``processed`` was before the step
    COUNT = 46


@kernel
def _ints(address, count):
    return numba.carray(pointer_to(address), count, np.int64)


@kernel
def _scale(row, scale):
    if scale != np.float32(1.0):
        for c in range(row.shape[0]):
            row[c] *= scale


def _embed_16(arguments, first, last):
    """Rows of an embedding in bfloat16, times a scale. Words: tokens, out, its columns, size, scale
    (of a float32), the embedding, and how its rows lie there: so many in a block of so many
    numbers, from one number of a row to the next."""
    given = _words(arguments, 9)
    tokens, out, size = _ints(given[0], last), _floats(given[1], last, given[2]), given[3]
    scale = numba.carray(pointer_to(given[4]), 1, np.float32)[0]
    per_block, block, step = given[6], given[7], given[8]
    for r in range(first, last):
        at = tokens[r] // per_block * block + tokens[r] % per_block
        stored = numba.carray(pointer_to(given[5] + 2 * at), size * step, np.uint16)
        row = out[r, :size]
        for c in range(size):
            row[c] = np.uint32(np.uint32(stored[c * step]) << np.uint32(16)).view(np.float32)
        _scale(row, scale)


def _embed_32(arguments, first, last):
    """The same in float32."""
    given = _words(arguments, 9)
    tokens, out, size = _ints(given[0], last), _floats(given[1], last, given[2]), given[3]
    scale = numba.carray(pointer_to(given[4]), 1, np.float32)[0]
    per_block, block, step = given[6], given[7], given[8]
    for r in range(first, last):
        at = tokens[r] // per_block * block + tokens[r] % per_block
        stored = numba.carray(pointer_to(given[5] + 4 * at), size * step, np.float32)
        row = out[r, :size]
        for c in range(size):
            row[c] = stored[c * step]
        _scale(row, scale)


def _crowded(arguments, first, last):
    """Which journals are folded: those that leave no room for the trees."""
    w = _words(_words(arguments, 2)[1], 46)
    b, R = w[1], w[10]
    slots, lengths = _ints(w[0], b), _ints(w[13], R)
    own, folded = _ints(w[19], b), _ints(w[25], b)
    for r in range(b):
        own[r] = slots[r]
        length = lengths[slots[r]]
        folded[r] = length if length > w[18] else 0


def _fold(arguments, first, last):
    """Pairs [first, last) of a request and a head, of ``fold``. Words: those of a recurrence, which
    begin with the frame, and the step's address behind them."""
    w = _words(_words(arguments, 27)[26], 46)
    b, R, history = w[1], w[10], w[16]
    slots, folded, state_slot = _ints(w[19], b), _ints(w[25], b), _ints(w[12], R)
    path = _integers(w[14], R, w[15])
    _, _, _, buffers, _, _ = _recurrence(arguments)
    H = buffers.state.shape[1]
    for task in range(first, last):
        r, h = task // H, task % H
        length = folded[r]
        if length > 0:
            slot = slots[r]
            rows = path[slot, history : history + length] - history
            _fold_head(slot, rows, length, buffers.state[state_slot[slot], h], h, buffers)


def _open(arguments, first, last):
    """What follows folds, the layout of the step's trees, and what attention reads."""
    given = _words(arguments, 2)
    frame, w = _words(given[0], 24), _words(given[1], 46)
    b, T, R, history, W, F = w[1], w[2], w[10], w[16], w[17], w[9]
    slots, folded, processed = _ints(w[19], b), _ints(w[25], b), _ints(w[11], R)
    state_slot, lengths, path = _ints(w[12], R), _ints(w[13], R), _integers(w[14], R, w[15])
    conv_in = numba.carray(pointer_to(w[29]), (w[30], R, history + W, w[31]), np.float32)
    for r in range(b):
        length = folded[r]
        if length > 0:
            slot = slots[r]
            row = path[slot, history + length - 1] - history
            kept = _floats(w[27] + state_slot[slot] * F * 4, 1, F)[0]
            feature = _floats(w[26] + (slot * W + row) * F * 4, 1, F)[0]
            for c in range(F):
                kept[c] = feature[c]
            move_history(slots[r : r + 1], folded[r : r + 1], path, history, conv_in)
            lengths[slot] = 0
    begin(
        slots, state_slot, path, lengths, _ints(w[20], b), _integers(w[21], b, W),
        _ints(w[22], b), _integers(w[23], b, T), _integers(w[24], b, history),
    )  # fmt: skip
    positions, depths, prefix = _integers(w[7], b, T), _integers(w[6], b, T), _ints(w[45], b)
    for r in range(b):
        prefix[r] = processed[slots[r]]
        for i in range(T):
            positions[r, i] = prefix[r] + depths[r, i]
    frame[1] = b * T
    frame[2], frame[3], frame[4], frame[5] = w[19], w[20], w[21], w[22]
    frame[6], frame[7], frame[8] = w[23], w[5], w[24]
    frame[9], frame[10], frame[11], frame[12] = b, T, W, history
    frame[13], frame[14], frame[15] = w[32], R, w[33]
    frame[16], frame[17] = w[19], w[45]
    frame[18], frame[19], frame[20], frame[21] = w[3], w[5], T, b


def _commit(arguments, first, last):
    """``accept_and_truncate``, ``extend_journals`` and ``commit``."""
    w = _words(_words(arguments, 2)[1], 46)
    b, T, R, D, history, F = w[1], w[2], w[10], w[39], w[16], w[9]
    slots, lengths, processed = _ints(w[0], b), _ints(w[13], R), _ints(w[11], R)
    parents, remaining = _integers(w[5], b, T), _ints(w[35], R)
    nodes, tokens = _integers(w[40], b, D), _integers(w[41], b, D)
    count, finished = _ints(w[42], b), numba.carray(pointer_to(w[43]), b, np.bool_)
    accept_and_truncate(
        _integers(w[4], b, T), parents, _integers(w[38], b, T), _integers(w[36], R, w[37]),
        remaining, slots, nodes, tokens, count, finished,
    )  # fmt: skip
    extend_journals(
        slots, _integers(w[23], b, T), nodes, count, _floats(w[8], b * T, F), history,
        _integers(w[14], R, w[15]), lengths,
        numba.carray(pointer_to(w[26]), (R, w[17], F), np.float32),
    )  # fmt: skip
    commit(
        slots, _integers(w[3], b, T), nodes, tokens, count, finished,
        _integers(w[32], R, w[33]), processed, _ints(w[34], R), remaining,
    )  # fmt: skip
    folded = _ints(w[44], b)
    for r in range(b):
        folded[r] = processed[slots[r]] - lengths[slots[r]]


def _append(arguments, first, last):
    """``append_pending``. Words: slots, nodes, tokens, count, entries, b, T, D, F, then by request
    slot: tokens, entries, number of those that wait, R, their places."""
    w = _words(arguments, 14)
    b, T, D, F, R, places = w[5], w[6], w[7], w[8], w[12], w[13]
    append_pending(
        _ints(w[0], b), _integers(w[1], b, D), _integers(w[2], b, D), _ints(w[3], b),
        numba.carray(pointer_to(w[4]), (b, T, F), np.float32),
        _integers(w[9], R, places), numba.carray(pointer_to(w[10]), (R, places, F), np.float32),
        _ints(w[11], R),
    )  # fmt: skip


EMBED_16, EMBED_32 = SpanKernel(_embed_16), SpanKernel(_embed_32)
CROWDED, FOLD, OPEN = SpanKernel(_crowded), SpanKernel(_fold), SpanKernel(_open)
COMMIT, APPEND = SpanKernel(_commit), SpanKernel(_append)
