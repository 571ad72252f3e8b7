"""What a decode step does around a model's layers as spans (vector_code.py), for programs.

Each computes what the kernel of the same name does elsewhere, bit by bit. The first argument is the
address of the layers' ``Frame`` (numba_spans.py), the second that of the ``Step``.

b requests, T nodes of a tree, R request slots, W rows per request, D the longest accepted path.
"""

from __future__ import annotations

import numpy as np

from mamba_eagle.kernels.accept.cpu import accept_and_truncate, append_pending, commit
from mamba_eagle.kernels.best_token.cpu import best_of
from mamba_eagle.kernels.numba_math import kernel, numba
from mamba_eagle.kernels.numba_spans import (
    Frame,
    _floats,
    _integers,
    _ints,
    _recurrence,
    _words,
)
from mamba_eagle.kernels.numba_words import places, pointer_to
from mamba_eagle.kernels.tree_verify.cpu import (
    _fold_head,
    begin,
    empty_journals,
    extend_journals,
    fold_in_step,
)
from mamba_eagle.kernels.tree_verify.layout import TreeLayout
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
    FOLD = 46  # [b] bytes: whether the step itself folds a journal
    COUNT = 47


FRAME, AT = places(Frame), places(Step)


@kernel
def _scale(row, scale):
    if scale != np.float32(1.0):
        for c in range(row.shape[0]):
            row[c] *= scale


@kernel
def _embedded(arguments, last):
    """Words of a call that embeds, the rows [last, size] that it writes, and the scale."""
    given = _words(arguments, 10)
    out = _floats(given[1], last, given[2])[:, : given[3]]
    return given, out, numba.carray(pointer_to(given[4]), 1, np.float32)[0]


@kernel
def _begin_of(given, r):
    """Where the embedding has the row of token number r: the place of its first number."""
    token, per_block = numba.carray(pointer_to(given[0]), r + 1, np.int64)[r], given[6]
    return token // per_block * given[7] + token % per_block * given[9]


def _embed_16(arguments, first, last):
    """Rows of an embedding in bfloat16, times a scale. Words: tokens, out, its columns, size, scale
    (of a float32), the embedding, and how its rows lie there: so many in a block of so many
    numbers, from one group of a row's numbers to the next, so many in a group."""
    given, out, scale = _embedded(arguments, last)
    size, step, group = given[3], given[8], given[9]
    for r in range(first, last):
        at = given[5] + 2 * _begin_of(given, r)
        stored = numba.carray(pointer_to(at), size * step, np.uint16)
        row = out[r]
        for c in range(0, size, group):
            for i in range(group):
                bits = np.uint32(stored[c // group * step + i])
                row[c + i] = np.uint32(bits << np.uint32(16)).view(np.float32)
        _scale(row, scale)


def _embed_32(arguments, first, last):
    """The same in float32."""
    given, out, scale = _embedded(arguments, last)
    size, step = given[3], given[8]
    for r in range(first, last):
        at = given[5] + 4 * _begin_of(given, r)
        stored = numba.carray(pointer_to(at), size * step, np.float32)
        row = out[r]
        for c in range(size):
            row[c] = stored[c * step]
        _scale(row, scale)


def _crowded(arguments, first, last):
    """Which journals are folded: those that leave no room for the trees."""
    w = _words(_words(arguments, 2)[1], AT.COUNT)
    b, R = w[AT.B], w[AT.R]
    slots, lengths = _ints(w[AT.SLOTS], b), _ints(w[AT.JOURNAL_LEN], R)
    own, folded = _ints(w[AT.ITS_SLOTS], b), _ints(w[AT.FOLDED], b)
    for r in range(b):
        own[r] = slots[r]
        length = lengths[slots[r]]
        folded[r] = length if length > w[AT.MAX_JOURNAL] else 0


def _fold(arguments, first, last):
    """Pairs [first, last) of a request and a head, of ``fold``. Words: those of a recurrence, which
    begin with the frame, and the step's address behind them."""
    w = _words(_words(arguments, 26)[25], AT.COUNT)
    b, R, history = w[AT.B], w[AT.R], w[AT.HISTORY]
    slots, folded, state_slot = (
        _ints(w[AT.ITS_SLOTS], b),
        _ints(w[AT.FOLDED], b),
        _ints(w[AT.STATE_SLOT], R),
    )
    path = _integers(w[AT.PATH], R, w[AT.PLACES])
    _, _, _, buffers, _, _ = _recurrence(arguments)
    H = buffers.state.shape[1]
    for task in range(first, last):
        r, h = task // H, task % H
        length = folded[r]
        if length > 0:
            slot = slots[r]
            rows = path[slot, history : history + length] - history
            _fold_head(slot, rows, buffers.state[state_slot[slot], h], h, buffers)


@kernel
def _kept(w):
    """What ``empty_journals`` takes behind slots and lengths."""
    R, history, W, F = w[AT.R], w[AT.HISTORY], w[AT.W], w[AT.SIZE]
    inputs = (w[AT.LAYERS], R, history + W, w[AT.CHANNELS])
    return (
        _ints(w[AT.STATE_SLOT], R),
        _integers(w[AT.PATH], R, w[AT.PLACES]),
        _ints(w[AT.JOURNAL_LEN], R),
        history,
        numba.carray(pointer_to(w[AT.CONV_IN]), inputs, np.float32),
        numba.carray(pointer_to(w[AT.ROW_FEATURES]), (R, W, F), np.float32),
        _floats(w[AT.POOL_FEATURES], w[AT.STATES], F),
    )


def _open(arguments, first, last):
    """What follows folds, the layout of the step's trees, and what attention reads."""
    given = _words(arguments, 2)
    frame, w = _words(given[0], FRAME.COUNT), _words(given[1], AT.COUNT)
    b, T, R, history, W = w[AT.B], w[AT.T], w[AT.R], w[AT.HISTORY], w[AT.W]
    slots, processed = _ints(w[AT.ITS_SLOTS], b), _ints(w[AT.PROCESSED], R)
    kept = _kept(w)
    empty_journals(slots, _ints(w[AT.FOLDED], b), *kept)
    nodes = TreeLayout(
        slots,
        _ints(w[AT.STATE_SLOTS], b),
        _integers(w[AT.JOURNAL], b, W),
        _ints(w[AT.LENGTHS], b),
        _integers(w[AT.ROWS], b, T),
        None,
        None,
        _integers(w[AT.TAIL], b, history),
        numba.carray(pointer_to(w[AT.FOLD]), b, np.bool_),
    )
    begin(
        slots,
        *kept[:3],
        nodes.state_slots,
        nodes.journal,
        nodes.journal_len,
        nodes.rows,
        nodes.tail,
    )
    fold_in_step(nodes, *kept)
    positions, depths, prefix = (
        _integers(w[AT.POSITIONS], b, T),
        _integers(w[AT.DEPTHS], b, T),
        _ints(w[AT.PREFIX], b),
    )
    for r in range(b):
        prefix[r] = processed[slots[r]]
        for i in range(T):
            positions[r, i] = prefix[r] + depths[r, i]
    frame[FRAME.ROWS] = b * T
    frame[FRAME.SLOTS], frame[FRAME.STATE_SLOTS], frame[FRAME.JOURNAL], frame[FRAME.JOURNAL_LEN] = (
        w[AT.ITS_SLOTS],
        w[AT.STATE_SLOTS],
        w[AT.JOURNAL],
        w[AT.LENGTHS],
    )
    frame[FRAME.NODE_ROWS], frame[FRAME.PARENTS] = w[AT.ROWS], w[AT.PARENTS]
    frame[FRAME.TAIL], frame[FRAME.FOLD] = w[AT.TAIL], w[AT.FOLD]
    frame[FRAME.REQUESTS], frame[FRAME.NODES], frame[FRAME.MAX_JOURNAL] = b, T, W
    frame[FRAME.HISTORY] = history
    frame[FRAME.TABLE], frame[FRAME.TABLE_ROWS] = w[AT.TABLE], R
    frame[FRAME.POSITIONS] = w[AT.TABLE_COLUMNS]
    frame[FRAME.ATTENDED], frame[FRAME.PREFIX] = w[AT.ITS_SLOTS], w[AT.PREFIX]
    frame[FRAME.OWN], frame[FRAME.ABOVE], frame[FRAME.FAMILY], frame[FRAME.TREES] = (
        w[AT.KV_SLOTS],
        w[AT.PARENTS],
        T,
        b,
    )


def _commit(arguments, first, last):
    """``accept_and_truncate``, ``extend_journals`` and ``commit``."""
    w = _words(_words(arguments, 2)[1], AT.COUNT)
    b, T, R, D, history, F = w[AT.B], w[AT.T], w[AT.R], w[AT.D], w[AT.HISTORY], w[AT.SIZE]
    slots, lengths, processed = (
        _ints(w[AT.SLOTS], b),
        _ints(w[AT.JOURNAL_LEN], R),
        _ints(w[AT.PROCESSED], R),
    )
    parents, remaining = _integers(w[AT.PARENTS], b, T), _ints(w[AT.REMAINING], R)
    nodes, tokens = _integers(w[AT.PATH_NODES], b, D), _integers(w[AT.PATH_TOKENS], b, D)
    count, finished = _ints(w[AT.NUMBER], b), numba.carray(pointer_to(w[AT.FINISHED]), b, np.bool_)
    accept_and_truncate(
        _integers(w[AT.TOKENS], b, T),
        parents,
        _integers(w[AT.TARGET], b, T),
        _integers(w[AT.STOPS], R, w[AT.NUM_STOPS]),
        remaining, slots, nodes, tokens, count, finished,
    )  # fmt: skip
    extend_journals(
        slots,
        _integers(w[AT.ROWS], b, T),
        nodes,
        count,
        _floats(w[AT.FEATURES], b * T, F),
        history,
        _integers(w[AT.PATH], R, w[AT.PLACES]), lengths,
        numba.carray(pointer_to(w[AT.ROW_FEATURES]), (R, w[AT.W], F), np.float32),
    )  # fmt: skip
    commit(
        slots, _integers(w[AT.KV_SLOTS], b, T), nodes, tokens, count, finished,
        _integers(w[AT.TABLE], R, w[AT.TABLE_COLUMNS]),
        processed,
        _ints(w[AT.LAST_TOKEN], R),
        remaining,
    )  # fmt: skip
    folded = _ints(w[AT.FOLDED_AT], b)
    for r in range(b):
        folded[r] = processed[slots[r]] - lengths[slots[r]]


def _append(arguments, first, last):
    """``append_pending``. Words: slots, nodes, tokens, count, entries, b, T, D, F, then by request
    slot: tokens, entries, number of those that wait, R, their places."""
    given = _words(arguments, 14)
    b, T, D, size, R, most = given[5], given[6], given[7], given[8], given[12], given[13]
    entries = numba.carray(pointer_to(given[4]), (b, T, size), np.float32)
    waiting = numba.carray(pointer_to(given[10]), (R, most, size), np.float32)
    append_pending(
        _ints(given[0], b), _integers(given[1], b, D), _integers(given[2], b, D),
        _ints(given[3], b), entries, _integers(given[9], R, most), waiting, _ints(given[11], R),
    )  # fmt: skip


def _enter_roots(arguments, first, last):
    """``Backend.enter_roots``. Words: slots, KV slots of the nodes, T, KV slots of the request
    table, R, its columns, tokens processed."""
    given = _words(arguments, 7)
    b, R = last, given[4]
    slots, own, processed = _ints(given[0], b), _integers(given[1], b, given[2]), _ints(given[6], R)
    table = _integers(given[3], R, given[5])
    for r in range(first, last):
        table[slots[r], processed[slots[r]]] = own[r, 0]


def _best_of(arguments, first, last):
    """``best_of`` of rows [first, last). Words: scores, V, tokens."""
    given = _words(arguments, 3)
    best_of(_floats(given[0], last, given[1])[first:], _ints(given[2], last)[first:])


EMBED_16, EMBED_32 = SpanKernel(_embed_16), SpanKernel(_embed_32)
CROWDED, FOLD, OPEN = SpanKernel(_crowded), SpanKernel(_fold), SpanKernel(_open)
COMMIT, APPEND = SpanKernel(_commit), SpanKernel(_append)
ENTER_ROOTS, BEST_OF = SpanKernel(_enter_roots), SpanKernel(_best_of)
