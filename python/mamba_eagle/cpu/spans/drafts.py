"""What drafting does between a drafter's layers as spans (span_kernels.py), for programs.

Entries of a tree are drafted by calls of these kernels and of those of layers (spans/layers.py),
without Python: each computes what backend/pending.py, cpu/attention.py and tree/candidates.py do,
bit by bit.

b requests, n rows of a pass (entries, or lanes of a depth), k = topk lanes, C candidates.
"""

import numpy as np

from mamba_eagle.cpu import abi
from mamba_eagle.cpu.abi import bools, floats, ints, reader
from mamba_eagle.cpu.memory import pointer_to
from mamba_eagle.cpu.ops.draft_tree import expand, select
from mamba_eagle.cpu.ops.rms_norm import rms_norm
from mamba_eagle.cpu.ops.top_log_probs import top_log_probs
from mamba_eagle.cpu.span_kernels import SpanKernel
from mamba_eagle.cpu.spans.layers import frame_at, round_made
from mamba_eagle.machine_code import kernel, numba

drafts_at, join_at, best_at = reader(abi.Drafts), reader(abi.Join), reader(abi.Best)
stream_at, outputs_at = reader(abi.Stream), reader(abi.Outputs)


@kernel
def _attend(frame, drafts, rows, family):
    """What the layers' attention reads: ``family`` nodes of each request."""
    frame.rows = rows
    frame.table, frame.table_rows, frame.positions = drafts.table, drafts.R, drafts.positions
    frame.attended, frame.prefix = drafts.slots, drafts.prefix
    frame.own, frame.above = drafts.own, drafts.parents
    frame.family, frame.trees = family, drafts.requests


def _take(arguments, first, last):
    """``PendingEntries.take`` of all that wait, a chain per request; and the candidates' root."""
    drafts = drafts_at(arguments)
    b, E, R, C = drafts.requests, drafts.longest, drafts.R, drafts.candidates
    width, bytes_each, padding = drafts.width, drafts.size * 4, drafts.padding
    slots, table = ints(drafts.slots, b), ints(drafts.table, (R, drafts.positions))
    last_token, remaining = ints(drafts.last_token, R), ints(drafts.remaining, R)
    tokens, pending = ints(drafts.tokens, (R, width)), ints(drafts.pending, R)
    done, wanted = ints(drafts.done, R), ints(drafts.wanted, b)
    own, parents = ints(drafts.own, (b, E)), ints(drafts.parents, (b, E))
    prefix, features = ints(drafts.prefix, b), drafts.features
    row_tokens, row_features = ints(drafts.row_tokens, b * E), ints(drafts.row_features, b * E)
    all_tokens, all_parents = ints(drafts.all_tokens, (b, C)), ints(drafts.all_parents, (b, C))
    all_scores, scores = floats(drafts.all_scores, (b, C)), floats(drafts.scores, (b, 1))
    numbers = ints(drafts.numbers, b)
    for r in range(b):
        slot = slots[r]
        taken = max(pending[slot], 0) if remaining[slot] > 0 else 0
        pending[slot] -= taken
        prefix[r] = done[slot]
        for e in range(E):
            own[r, e] = table[slot, done[slot] + e] if e < taken else padding
            parents[r, e] = max(e - 1, 0)
            row_tokens[r * E + e] = tokens[slot, e]
            row_features[r * E + e] = features + (slot * width + e) * bytes_each
        done[slot] += taken
        wanted[r] = r * E + max(taken - 1, 0)
        all_tokens[r, 0], all_parents[r, 0], all_scores[r, 0] = last_token[slot], 0, 0
        numbers[r], scores[r, 0] = 0, 0
    drafts.depth, drafts.seen, drafts.doubts = 0, 1, 0
    _attend(frame_at(drafts.frame), drafts, b * E, E)


def _lanes(arguments, first, last):
    """The next lanes follow the request's tokens, its root and the lanes above."""
    drafts = drafts_at(arguments)
    b, k, depth, most = drafts.requests, drafts.topk, drafts.depth, drafts.max_lanes
    family, bytes_each, padding = depth * k, drafts.size * 4, drafts.padding
    slots, processed = ints(drafts.slots, b), ints(drafts.processed, drafts.R)
    own, parents = ints(drafts.own, (b, family)), ints(drafts.parents, (b, family))
    prefix, kept = ints(drafts.prefix, b), ints(drafts.lane_parents, (b, most))
    row_tokens, row_features = ints(drafts.row_tokens, b * k), ints(drafts.row_features, b * k)
    wanted, outputs = ints(drafts.wanted, b * k), drafts.outputs
    above, lane_tokens = ints(drafts.lanes_above, (b, k)), ints(drafts.lane_tokens, (b, k))
    before = 1 if depth == 1 else k  # lanes of a request in the pass before
    for r in range(b):
        prefix[r] = processed[slots[r]] + 1
        for lane in range(k):
            # the first lanes are roots, each its own parent
            parent = lane if depth == 1 else above[r, lane] + family - 2 * k
            kept[r, family - k + lane] = parent
            i = r * k + lane
            row_tokens[i], wanted[i] = lane_tokens[r, lane], i
            row_features[i] = outputs + (r * before + above[r, lane]) * bytes_each
        for i in range(family):
            own[r, i], parents[r, i] = padding + 1 + r * most + i, kept[r, i]
    _attend(frame_at(drafts.frame), drafts, b * k, family)


def _join(arguments, first, last):
    """The second halves of entries' inputs, their features; the first halves are embeddings."""
    given = join_at(arguments)
    x, at = floats(given.x, (last, given.columns)), ints(drafts_at(given.drafts).row_features, last)
    size = given.columns // 2
    for r in range(first, last):
        feature, row = floats(at[r], size), x[r, size:]
        for c in range(size):
            row[c] = feature[c]
    round_made(x, first, last, given.rounded)


def _stream(arguments, first, last):
    """stream = made + bias"""
    given = stream_at(arguments)
    size, bias = given.size, floats(given.bias, given.size)
    stream = floats(frame_at(given.frame).stream, (last, size))
    made = floats(given.made, (last, given.columns))
    for r in range(first, last):
        row, own = stream[r], made[r]
        for c in range(size):
            row[c] = own[c] + bias[c]


def _outputs(arguments, first, last):
    """Norms of the wanted rows."""
    given = outputs_at(arguments)
    stream, size = frame_at(given.frame).stream, given.size
    weight, out = floats(given.weight, size), floats(given.out, (last, size))
    wanted = ints(drafts_at(given.drafts).wanted, last)
    for r in range(first, last):
        row = floats(stream + wanted[r] * size * 4, (1, size))
        rms_norm(row, weight, given.eps, out[r : r + 1])
    round_made(out, first, last, given.rounded)


def _best(arguments, first, last):
    """The k best tokens of each row, in the order of ``top_log_probs``."""
    given = best_at(arguments)
    drafts = drafts_at(given.drafts)
    k = drafts.topk
    tokens, log_probs = ints(drafts.best, (last, k)), floats(drafts.log_probs, (last, k))
    for r in range(first, last):
        logits = floats(given.logits + 4 * r * given.columns, (1, given.tokens))
        top_log_probs(logits, log_probs[r : r + 1], tokens[r : r + 1])


def _expand(arguments, first, last):
    """``Candidates.expand``: the best tokens of each lane join the candidates, and the best of
    these are the next lanes."""
    drafts = drafts_at(arguments)
    b, k, seen, C = drafts.requests, drafts.topk, drafts.seen, drafts.candidates
    n = 1 if drafts.depth == 0 else k
    new = n * k
    tokens, all_tokens = ints(drafts.best, (b, new)), ints(drafts.all_tokens, (b, C))
    all_parents, all_scores = ints(drafts.all_parents, (b, C)), floats(drafts.all_scores, (b, C))
    above, order = ints(drafts.lanes_above, (b, k)), ints(drafts.order, (b, k))
    expand(
        floats(drafts.log_probs, (b, n, k)), floats(drafts.scores, (b, n)),
        ints(drafts.numbers, (b, n)), all_parents[:, seen : seen + new],
        all_scores[:, seen : seen + new], above, order,
    )  # fmt: skip
    numbers, scores = ints(drafts.numbers, (b, k)), floats(drafts.scores, (b, k))
    chosen = ints(drafts.lane_tokens, (b, k))
    for r in range(b):
        for i in range(new):
            all_tokens[r, seen + i] = tokens[r, i]
        for lane in range(k):
            at = order[r, lane]
            numbers[r, lane], scores[r, lane] = seen + at, all_scores[r, seen + at]
            chosen[r, lane] = tokens[r, at]
    drafts.depth, drafts.seen = drafts.depth + 1, seen + new
    likely = 0.0
    for r in range(b):
        likely += np.exp(np.float64(scores[r, 0]))
    least = numba.carray(pointer_to(drafts.least), 1, np.float64)[0]
    drafts.doubts = 1 if likely < least * b else 0


def _select(arguments, first, last):
    """``Candidates.select``: the best nodes of all candidates."""
    drafts = drafts_at(arguments)
    b, C, T, seen = drafts.requests, drafts.candidates, drafts.nodes, drafts.seen
    select(
        ints(drafts.all_tokens, (b, C))[:, :seen],
        ints(drafts.all_parents, (b, C))[:, :seen],
        floats(drafts.all_scores, (b, C))[:, :seen],
        drafts.topk,
        ints(drafts.tree_tokens, (b, T)),
        ints(drafts.tree_parents, (b, T)),
        ints(drafts.tree_depths, (b, T)),
        bools(drafts.tree_ancestors, (b, T, T)),
        floats(drafts.tree_scores, (b, T)),
    )


TAKE, LANES = SpanKernel(_take), SpanKernel(_lanes)
JOIN, STREAM, OUTPUTS = SpanKernel(_join), SpanKernel(_stream), SpanKernel(_outputs)
BEST, EXPAND, SELECT = SpanKernel(_best), SpanKernel(_expand), SpanKernel(_select)
