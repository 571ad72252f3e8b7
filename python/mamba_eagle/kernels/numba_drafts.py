"""What drafting does between a drafter's layers as spans (vector_code.py), for programs.

Entries of a tree are drafted by calls of these kernels and of those of layers (numba_spans.py),
without Python: each computes what backend/pending.py, backend/cpu/attention.py and
tree/candidates.py do, bit by bit. The first argument is the address of the layers' ``Frame``, the
second that of the ``Drafts``, in which one call leaves to the next where it stands.

b requests, n rows of a pass (entries, or lanes of a depth), k = topk lanes, C candidates.
"""

from __future__ import annotations

import numpy as np

from mamba_eagle.kernels.draft_tree.cpu import expand, select
from mamba_eagle.kernels.numba_math import kernel, numba
from mamba_eagle.kernels.numba_spans import Frame, _floats, _integers, _ints, _round, _words
from mamba_eagle.kernels.numba_words import places, pointer_to
from mamba_eagle.kernels.rms_norm.cpu import rms_norm
from mamba_eagle.kernels.top_log_probs.cpu import top_log_probs
from mamba_eagle.kernels.vector_code import SpanKernel


class Drafts:
    """Words that all calls of a step read: addresses and sizes. R request slots."""

    # of the step: request slots [b], b, entries per request, k, and the tree's nodes
    SLOTS, REQUESTS, LONGEST, TOPK, NODES = range(5)
    # how far it is: depths that have been added, and candidates
    DEPTH, SEEN = 5, 6
    # the request table: slot table [R, positions], and by request slot [R]
    KV_SLOTS, R, POSITIONS, PROCESSED, LAST_TOKEN, REMAINING = range(7, 13)
    # waiting entries: tokens [R, width], features [R, width, F], pending and processed [R]
    TOKENS, WIDTH, FEATURES, SIZE, PENDING, DONE = range(13, 19)
    # KV slot for padding, before the spare ones, of which a request has so many
    PADDING, MAX_LANES = 19, 20
    # attention: KV slots and parents of the nodes [b, E], prefix [b]; parents of all lanes so far
    OWN, PARENTS, PREFIX, LANE_PARENTS = range(21, 25)
    # rows: tokens, addresses of features, places of the rows whose outputs are wanted; each [n]
    ROW_TOKENS, ROW_FEATURES, WANTED = range(25, 28)
    # outputs [n, F], best tokens and their log-probabilities [n, k]
    OUTPUTS, BEST, LOG_PROBS = range(28, 31)
    # candidates [b, C]
    CANDIDATES, ALL_TOKENS, ALL_PARENTS, ALL_SCORES = range(31, 35)
    # lanes [b, k]: candidate numbers, scores, the lane above, the token
    NUMBERS, SCORES, ABOVE, LANE_TOKENS, ORDER = range(35, 40)
    # fields of the Tree that is selected
    TREE_TOKENS, TREE_PARENTS, TREE_DEPTHS, TREE_ANCESTORS, TREE_SCORES = range(40, 45)
    # whether a chain ends here, before the depth that was added last
    DOUBTS = 45
    COUNT = 46


FRAME, AT = places(Frame), places(Drafts)


@kernel
def _attend(frame, w, rows, family):
    """What the layers' attention reads: ``family`` nodes of each request."""
    frame[FRAME.ROWS] = rows
    frame[FRAME.TABLE], frame[FRAME.TABLE_ROWS] = w[AT.KV_SLOTS], w[AT.R]
    frame[FRAME.POSITIONS] = w[AT.POSITIONS]
    frame[FRAME.ATTENDED], frame[FRAME.PREFIX] = w[AT.SLOTS], w[AT.PREFIX]
    frame[FRAME.OWN], frame[FRAME.ABOVE], frame[FRAME.FAMILY], frame[FRAME.TREES] = (
        w[AT.OWN],
        w[AT.PARENTS],
        family,
        w[AT.REQUESTS],
    )


def _take(arguments, first, last):
    """``PendingEntries.take`` of all that wait, a chain per request; and the candidates' root."""
    given = _words(arguments, 2)
    frame, w = _words(given[0], FRAME.COUNT), _words(given[1], AT.COUNT)
    b, E, R, size = w[AT.REQUESTS], w[AT.LONGEST], w[AT.R], w[AT.SIZE]
    slots, table = _ints(w[AT.SLOTS], b), _integers(w[AT.KV_SLOTS], R, w[AT.POSITIONS])
    last_token, remaining = _ints(w[AT.LAST_TOKEN], R), _ints(w[AT.REMAINING], R)
    tokens, pending, done = (
        _integers(w[AT.TOKENS], R, w[AT.WIDTH]),
        _ints(w[AT.PENDING], R),
        _ints(w[AT.DONE], R),
    )
    own, parents, prefix = (
        _integers(w[AT.OWN], b, E),
        _integers(w[AT.PARENTS], b, E),
        _ints(w[AT.PREFIX], b),
    )
    row_tokens, row_features = _ints(w[AT.ROW_TOKENS], b * E), _ints(w[AT.ROW_FEATURES], b * E)
    wanted = _ints(w[AT.WANTED], b)
    all_tokens, all_parents = (
        _integers(w[AT.ALL_TOKENS], b, w[AT.CANDIDATES]),
        _integers(w[AT.ALL_PARENTS], b, w[AT.CANDIDATES]),
    )
    all_scores, numbers = _floats(w[AT.ALL_SCORES], b, w[AT.CANDIDATES]), _ints(w[AT.NUMBERS], b)
    scores = _floats(w[AT.SCORES], b, 1)
    for r in range(b):
        slot = slots[r]
        taken = max(pending[slot], 0) if remaining[slot] > 0 else 0
        pending[slot] -= taken
        prefix[r] = done[slot]
        for e in range(E):
            own[r, e] = table[slot, done[slot] + e] if e < taken else w[AT.PADDING]
            parents[r, e] = max(e - 1, 0)
            row_tokens[r * E + e] = tokens[slot, e]
            row_features[r * E + e] = w[AT.FEATURES] + (slot * w[AT.WIDTH] + e) * size * 4
        done[slot] += taken
        wanted[r] = r * E + max(taken - 1, 0)
        all_tokens[r, 0], all_parents[r, 0], all_scores[r, 0] = last_token[slot], 0, 0
        numbers[r], scores[r, 0] = 0, 0
    w[AT.DEPTH], w[AT.SEEN], w[AT.DOUBTS] = 0, 1, 0
    _attend(frame, w, b * E, E)


def _lanes(arguments, first, last):
    """The next lanes follow the request's tokens, its root and the lanes above."""
    given = _words(arguments, 2)
    frame, w = _words(given[0], FRAME.COUNT), _words(given[1], AT.COUNT)
    b, k, R, size, depth, most = (
        w[AT.REQUESTS],
        w[AT.TOPK],
        w[AT.R],
        w[AT.SIZE],
        w[AT.DEPTH],
        w[AT.MAX_LANES],
    )
    slots, processed = _ints(w[AT.SLOTS], b), _ints(w[AT.PROCESSED], R)
    family = depth * k
    own, parents = _integers(w[AT.OWN], b, family), _integers(w[AT.PARENTS], b, family)
    prefix, kept = _ints(w[AT.PREFIX], b), _integers(w[AT.LANE_PARENTS], b, most)
    row_tokens, row_features = _ints(w[AT.ROW_TOKENS], b * k), _ints(w[AT.ROW_FEATURES], b * k)
    wanted = _ints(w[AT.WANTED], b * k)
    above, lane_tokens = _integers(w[AT.ABOVE], b, k), _integers(w[AT.LANE_TOKENS], b, k)
    before = 1 if depth == 1 else k  # lanes of a request in the pass before
    for r in range(b):
        prefix[r] = processed[slots[r]] + 1
        for lane in range(k):
            # the first lanes are roots, each its own parent
            parent = lane if depth == 1 else above[r, lane] + family - 2 * k
            kept[r, family - k + lane] = parent
            i = r * k + lane
            row_tokens[i], wanted[i] = lane_tokens[r, lane], i
            row_features[i] = w[AT.OUTPUTS] + (r * before + above[r, lane]) * size * 4
        for i in range(family):
            own[r, i], parents[r, i] = w[AT.PADDING] + 1 + r * most + i, kept[r, i]
    _attend(frame, w, b * k, family)


def _join(arguments, first, last):
    """The second halves of entries' inputs, their features; the first halves are embeddings. Words:
    frame, drafts, x, its columns, rounded (three)."""
    given = _words(arguments, 7)
    w, columns = _words(given[1], AT.COUNT), given[3]
    x, at = _floats(given[2], last, columns), _ints(w[AT.ROW_FEATURES], last)
    size = columns // 2
    for r in range(first, last):
        feature, row = _floats(at[r], 1, size)[0], x[r, size:]
        for c in range(size):
            row[c] = feature[c]
    _round(x, first, last, given[4:7], last, columns)


def _stream(arguments, first, last):
    """stream = made + bias. Words: frame, size, made, its columns, bias."""
    given = _words(arguments, 5)
    size = given[1]
    stream, made = _floats(_words(given[0], 1)[0], last, size), _floats(given[2], last, given[3])
    bias = _floats(given[4], 1, size)[0]
    for r in range(first, last):
        row, own = stream[r], made[r]
        for c in range(size):
            row[c] = own[c] + bias[c]


def _outputs(arguments, first, last):
    """Norms of the wanted rows. Words: frame, drafts, weight, eps (of a float64), size, out, and
    where it is rounded to (three)."""
    given = _words(arguments, 9)
    stream, w, size = _words(given[0], 1)[0], _words(given[1], AT.COUNT), given[4]
    weight = _floats(given[2], 1, size)[0]
    eps = numba.carray(pointer_to(given[3]), 1, np.float64)[0]
    wanted, out = _ints(w[AT.WANTED], last), _floats(given[5], last, size)
    for r in range(first, last):
        row = _floats(stream + wanted[r] * size * 4, 1, size)
        rms_norm(row, weight, eps, out[r : r + 1])
    _round(out, first, last, given[6:9], last, size)


def _best(arguments, first, last):
    """The k best tokens of each row, in the order of ``top_log_probs``. Words: frame, drafts,
    logits, their columns, and those of tokens."""
    given = _words(arguments, 5)
    w = _words(given[1], AT.COUNT)
    k = w[AT.TOPK]
    tokens, log_probs = _integers(w[AT.BEST], last, k), _floats(w[AT.LOG_PROBS], last, k)
    for r in range(first, last):
        logits = _floats(given[2] + 4 * r * given[3], 1, given[4])
        top_log_probs(logits, log_probs[r : r + 1], tokens[r : r + 1])


def _expand(arguments, first, last):
    """``Candidates.expand``: the best tokens of each lane join the candidates, and the best of
    these are the next lanes. Words: frame, drafts, the probability (of a float64) below which a
    chain ends."""
    given = _words(arguments, 3)
    w = _words(given[1], AT.COUNT)
    b, k, seen, C = w[AT.REQUESTS], w[AT.TOPK], w[AT.SEEN], w[AT.CANDIDATES]
    n = 1 if w[AT.DEPTH] == 0 else k
    new = n * k
    log_probs = numba.carray(pointer_to(w[AT.LOG_PROBS]), (b, n, k), np.float32)
    tokens = _integers(w[AT.BEST], b, new)
    all_tokens, all_parents = _integers(w[AT.ALL_TOKENS], b, C), _integers(w[AT.ALL_PARENTS], b, C)
    all_scores = _floats(w[AT.ALL_SCORES], b, C)
    above, order = _integers(w[AT.ABOVE], b, k), _integers(w[AT.ORDER], b, k)
    expand(
        log_probs, _floats(w[AT.SCORES], b, n), _integers(w[AT.NUMBERS], b, n),
        all_parents[:, seen : seen + new], all_scores[:, seen : seen + new], above, order,
    )  # fmt: skip
    numbers, scores, lane_tokens = (
        _integers(w[AT.NUMBERS], b, k),
        _floats(w[AT.SCORES], b, k),
        w[AT.LANE_TOKENS],
    )
    chosen = _integers(lane_tokens, b, k)
    for r in range(b):
        for i in range(new):
            all_tokens[r, seen + i] = tokens[r, i]
        for lane in range(k):
            at = order[r, lane]
            numbers[r, lane], scores[r, lane] = seen + at, all_scores[r, seen + at]
            chosen[r, lane] = tokens[r, at]
    w[AT.DEPTH], w[AT.SEEN] = w[AT.DEPTH] + 1, seen + new
    likely = 0.0
    for r in range(b):
        likely += np.exp(np.float64(scores[r, 0]))
    least = numba.carray(pointer_to(given[2]), 1, np.float64)[0]
    w[AT.DOUBTS] = 1 if k == 1 and likely < least * b else 0


def _select(arguments, first, last):
    """``Candidates.select``: the best nodes of all candidates."""
    w = _words(_words(arguments, 2)[1], AT.COUNT)
    b, C, T = w[AT.REQUESTS], w[AT.CANDIDATES], w[AT.NODES]
    select(
        _integers(w[AT.ALL_TOKENS], b, C)[:, : w[AT.SEEN]],
        _integers(w[AT.ALL_PARENTS], b, C)[:, : w[AT.SEEN]],
        _floats(w[AT.ALL_SCORES], b, C)[:, : w[AT.SEEN]], w[AT.TOPK],
        _integers(w[AT.TREE_TOKENS], b, T),
        _integers(w[AT.TREE_PARENTS], b, T),
        _integers(w[AT.TREE_DEPTHS], b, T),
        numba.carray(pointer_to(w[AT.TREE_ANCESTORS]), (b, T, T), np.bool_),
        _floats(w[AT.TREE_SCORES], b, T),
    )  # fmt: skip


TAKE, LANES = SpanKernel(_take), SpanKernel(_lanes)
JOIN, STREAM, OUTPUTS = SpanKernel(_join), SpanKernel(_stream), SpanKernel(_outputs)
BEST, EXPAND, SELECT = SpanKernel(_best), SpanKernel(_expand), SpanKernel(_select)
