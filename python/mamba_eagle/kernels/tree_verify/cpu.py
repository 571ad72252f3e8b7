"""torch.py's tree verification as one pass per layer on a CPU: float32.

One call does all of a Mamba2 layer except its matrix products: convolution along each node's path,
SiLU, step size, decay, and the dual form. Rows and states are read in place, S0 once. What the
nodes feed into the recurrence is written straight into their rows, which count as free until the
nodes are accepted.

Threads share out requests, then pairs of a request and a head. The order of operations depends on
nothing but the request: its outputs do not depend on the batch, or on the number of threads.

b of R request slots, T tree nodes, W rows per request, H heads of P channels, G groups, N state
size, K convolution width, C = H*P + 2*G*N convolution channels.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from mamba_eagle.kernels.numba_math import ZERO, exp, kernel, prange, silu, softplus
from mamba_eagle.kernels.numba_sums import (
    COLUMNS,
    LANES,
    ROWS,
    WIDTH,
    add_narrow_row,
    add_one_row,
    add_products_of_four_in_order,
    add_products_of_two,
    add_taps,
)
from mamba_eagle.kernels.numba_tiles import COLUMNS as TILE_COLUMNS
from mamba_eagle.kernels.numba_tiles import ROWS as TILE_ROWS
from mamba_eagle.kernels.numba_tiles import add_dots, add_tile
from mamba_eagle.kernels.threads import threaded

FIRST = np.arange(LANES)


class LayerWeights(NamedTuple):
    """The weights that a layer's pass reads."""

    conv: np.ndarray  # [K + 1, C]: the taps, the token itself last, then the bias
    heads: np.ndarray  # [3, H]: A, bias of the step size, D
    low: np.float32  # the step size is clamped to low … high
    high: np.float32


class Buffers(NamedTuple):
    """What the deferred scheme keeps of one layer."""

    conv_in: np.ndarray  # [R, K-1 + W, C] raw convolution inputs: history, then rows
    xB: np.ndarray  # [R, W, H*P + G*N] after convolution and SiLU
    dt: np.ndarray  # [R, W, H] after softplus
    log_decay: np.ndarray  # [R, W, H]: L
    state: np.ndarray  # [state slots, H, P, N]: S0


@kernel
def _dot(a, b):
    total = ZERO
    for n in range(a.shape[0]):
        total += a[n] * b[n]
    return total


@kernel
def _convolve(out, conv, inputs, rows, parents, tail, node):
    """out [C] = silu(bias + Σ taps · (the node's K-1 nearest ancestors and itself)).

    inputs [K-1 + W, C]; rows, parents [T]; tail [K-1], places of the tokens before the tree. Tree
    parents come first, then the tail from its end.
    """
    K, C = conv.shape[0] - 1, out.shape[0]
    history = K - 1
    before = history - 1  # of the tail, next to be read
    places = np.empty(K, np.int64)  # from the node upwards
    places[0] = history + rows[node]
    for k in range(1, K):
        if node > 0:
            node = parents[node]
            places[k] = history + rows[node]
        else:
            places[k] = tail[before]
            before -= 1
    add_taps(out, conv, C, inputs, places, K)
    for c in range(C // LANES * LANES, C):
        out[c] = conv[K, c]
        for k in range(K):
            out[c] += conv[K - 1 - k, c] * inputs[places[k], c]
    for c in range(C):
        out[c] = silu(out[c])


class Seen(NamedTuple):
    """What the heads of a layer share. M: rows of the longest journal there may be."""

    C: np.ndarray  # [b, T, G, N]
    decay: np.ndarray  # [b, T, H]: exp(L)
    rows: np.ndarray  # [b, T, M + T]: those that a node sees, the node's own among them
    count: np.ndarray  # [b, T]: how many
    scores: np.ndarray  # [b, T, G, M + T]: B of that row · C of the node
    # [b, T, (M + T) * H + LANES]: what a row's x counts in the node's output, row by row
    weights: np.ndarray


@kernel
def _weigh(log_decay, dt, node, rows, count, scores, weights):
    """weights[k * H + h] = exp(L of the node - L of rows[k]) · scores[g, k] · dt of rows[k].

    log_decay, dt [W, H]; scores [G, …].
    """
    H, G = dt.shape[1], scores.shape[0]
    for k in range(count):
        for h in range(H):
            weights[k * H + h] = log_decay[node, h] - log_decay[rows[k], h]
    whole = -(-count * H // LANES) * LANES  # vectors of exponentials have no remainder
    for k in range(count * H, whole):
        weights[k] = ZERO
    for k in range(whole):
        weights[k] = exp(weights[k])
    for k in range(count):
        for g in range(G):
            score = scores[g, k]
            for h in range(H // G * g, H // G * (g + 1)):
                weights[k * H + h] = weights[k * H + h] * score * dt[rows[k], h]


@kernel
def _enter(r, xbc, dt_raw, nodes, weights, buffers, seen):
    """The nodes of request r: their rows, and what all heads share."""
    conv_in, xB, dt, log_decay, state = buffers
    conv, heads, low, high = weights
    A, dt_bias = heads[0], heads[1]
    T = nodes.rows.shape[1]
    history, H, N = conv.shape[0] - 2, state.shape[1], state.shape[3]
    width, inner = xB.shape[2], H * state.shape[2]
    G = seen.C.shape[2]
    slot, first, length = nodes.slots[r], r * T, nodes.journal_len[r]
    inputs, slot_rows, above = conv_in[slot], nodes.rows[r], nodes.parents[r]
    convolved = np.empty(xbc.shape[1], np.float32)
    for i in range(T):
        row = slot_rows[i]
        raw, kept = xbc[first + i], inputs[history + row]
        for c in range(raw.shape[0]):
            kept[c] = raw[c]
        _convolve(convolved, conv, inputs, slot_rows, above, nodes.tail[r], i)
        own, C = xB[slot, row], seen.C[r, i]
        for c in range(width):
            own[c] = convolved[c]
        for g in range(G):
            for n in range(N):
                C[g, n] = convolved[width + g * N + n]
        before = slot_rows[above[i]] if i > 0 else nodes.journal[r, length - 1]
        for h in range(H):
            step = min(max(softplus(dt_raw[first + i, h] + dt_bias[h]), low), high)
            since = log_decay[slot, before, h] if i > 0 or length > 0 else ZERO
            L = since + step * A[h]
            dt[slot, row, h] = step
            log_decay[slot, row, h] = L
            seen.decay[r, i, h] = exp(L)
        visible, count, node = seen.rows[r, i], length, i
        for k in range(length):
            visible[k] = nodes.journal[r, k]
        while True:  # after the journal the node itself, then up to the root
            visible[count] = slot_rows[node]
            count += 1
            if node == 0:
                break
            node = above[node]
        seen.count[r, i] = count
        for g in range(G):
            of_B = inner + g * N
            for k in range(count):
                B = xB[slot, visible[k], of_B : of_B + N]
                seen.scores[r, i, g, k] = _dot(B, C[g])
        _weigh(
            log_decay[slot], dt[slot], row, visible, count, seen.scores[r, i], seen.weights[r, i]
        )


@kernel
def _read_rows(out, out_at, P, x, weights, at, step, rows, count, first):
    """out[out_at + p] += Σ_k weights[at + k * step] · x[rows[k], first + p], p < P."""
    width, p = x.shape[1], 0
    while p + WIDTH <= P:
        add_one_row(out, out_at + p, 0, weights, at, 0, step, x, first + p, width, rows, count)
        p += WIDTH
    while p + LANES <= P:
        add_narrow_row(out, out_at + p, 0, weights, at, 0, step, x, first + p, width, rows, count)
        p += LANES
    while p < P:
        for k in range(count):
            out[out_at + p] += weights[at + k * step] * x[rows[k], first + p]
        p += 1


@kernel
def _read_state(out, at, width, S, C, C_at, C_row, decay, T):
    """out[at + i * width + p] += decay[i] · (S[p] · C[i]), i < T.

    S [P, N]; rows of C begin at ``C_at``, with ``C_row`` numbers from one to the next.
    """
    (P, N), i = S.shape, 0
    if P % LANES != 0 or N % LANES != 0:
        for i in range(T):
            for p in range(P):
                total = ZERO
                for n in range(N):
                    total += S[p, n] * C[C_at + i * C_row + n]
                out[at + i * width + p] += decay[i] * total
        return
    while i + ROWS <= T:
        own, of_C = at + i * width, C_at + i * C_row
        for p in range(0, P, COLUMNS):
            add_products_of_four_in_order(
                out, own + p, width, decay, i, C, of_C, C_row, S, p * N, N, FIRST, 0, N
            )
        i += ROWS
    if i + 2 <= T:
        own, of_C = at + i * width, C_at + i * C_row
        for p in range(0, P, LANES // 2):
            add_products_of_two(
                out, own + p, width, decay, i, C, of_C, C_row, S, p * N, N, FIRST, 0, N
            )
        i += 2
    while i < T:
        of_C = C_at + i * C_row
        add_dots(out, at + i * width, S, C[of_C : of_C + N], decay[i], P, N)
        i += 1


@kernel
def _head(r, h, nodes, skip, buffers, seen, y):
    """The outputs of one head for the nodes of request r, once ``_enter`` has seen them."""
    xB, state = buffers.xB, buffers.state
    T, G, N = seen.C.shape[1:]
    H, P = state.shape[1:3]
    g, first, slot, width = h // (H // G), h * P, nodes.slots[r], y.shape[1]
    decay = np.empty(T, np.float32)
    flat, begin = y.reshape(y.size), r * T * width + first
    for i in range(T):
        x = xB[slot, nodes.rows[r, i], first : first + P]
        own = y[r * T + i, first : first + P]
        for p in range(P):
            own[p] = skip * x[p]
        rows, count, weights = seen.rows[r, i], seen.count[r, i], seen.weights[r, i]
        _read_rows(flat, begin + i * width, P, xB[slot], weights, h, H, rows, count, first)
        decay[i] = seen.decay[r, i, h]
    S, C, C_at = state[nodes.state_slots[r], h], seen.C, (r * T * G + g) * N
    _read_state(flat, begin, width, S, C.reshape(C.size), C_at, G * N, decay, T)


@threaded
def deferred_verify(xbc, dt_raw, nodes, weights, buffers, y):
    """All nodes of b trees in one layer: convolution, torch.py's tree_verify, and D x.

    Args:
        xbc: [b*T, C], before the convolution; dt_raw: [b*T, H]; nodes: TreeLayout of arrays;
            weights: LayerWeights; buffers: Buffers, in which the nodes' rows are written.
        Out: y [b*T, H*P].
    """
    b, T = nodes.rows.shape
    H, P, N = buffers.state.shape[1:]
    G = (buffers.xB.shape[2] - H * P) // N
    most = nodes.journal.shape[1] + T
    seen = Seen(
        np.empty((b, T, G, N), np.float32),
        np.empty((b, T, H), np.float32),
        np.empty((b, T, most), np.int64),
        np.empty((b, T), np.int64),
        np.empty((b, T, G, most), np.float32),
        np.empty((b, T, most * H + LANES), np.float32),
    )
    skip = weights.heads[2]
    for r in prange(b):
        _enter(r, xbc, dt_raw, nodes, weights, buffers, seen)
    for task in prange(b * H):
        _head(task // H, task % H, nodes, skip[task % H], buffers, seen, y)


@kernel
def _fold_head(slot, rows, length, S, h, buffers):
    """One head of a request: its state S [P, N] becomes that after its journal ``rows``."""
    _, xB, dt, log_decay, state = buffers
    H, P, N = state.shape[1:]
    x = xB[slot]
    of_B = H * P + h // (H * N // (xB.shape[2] - H * P)) * N
    B, added = np.empty((length, N), np.float32), np.empty((length, P), np.float32)
    last = log_decay[slot, rows[length - 1], h]
    for k in range(length):
        weight = exp(last - log_decay[slot, rows[k], h]) * dt[slot, rows[k], h]
        source, own, kept = x[rows[k]], added[k], B[k]
        for p in range(P):
            own[p] = weight * source[h * P + p]
        for n in range(N):
            kept[n] = source[of_B + n]
    decay = exp(last)
    for p in range(P):
        s = S[p]
        for n in range(N):
            s[n] *= decay
    if P % TILE_ROWS == 0 and N % TILE_COLUMNS == 0:
        for p in range(0, P, TILE_ROWS):
            for n in range(0, N, TILE_COLUMNS):
                add_tile(S, p * N + n, N, added, p, 1, P, B, n, N, length)
        return
    for p in range(P):
        s = S[p]
        for k in range(length):
            weight, kept = added[k, p], B[k]
            for n in range(N):
                s[n] += weight * kept[n]


@threaded
def fold(slots, lengths, path, state_slots, history, buffers):
    """torch.py's fold of one layer, in place: S0 becomes the state after ``lengths[f]`` rows.

    slots, lengths, state_slots [f]; path [R, …].
    """
    H = buffers.state.shape[1]
    for task in prange(slots.shape[0] * H):
        f, h = task // H, task % H
        length = lengths[f]
        if length > 0:
            rows = path[slots[f], history : history + length] - history
            _fold_head(slots[f], rows, length, buffers.state[state_slots[f], h], h, buffers)


@kernel
def snapshot_verify(xbc, dt_raw, nodes, weights, buffers, y):
    """The recurrence node by node: convolution, torch.py's snapshot_verify, and D x.

    Arguments as for deferred_verify, but buffers: SnapshotBuffers, whose node states are written.
    """
    slots, state_slots, rows, parents = nodes.slots, nodes.state_slots, nodes.rows, nodes.parents
    tail = nodes.tail
    conv_in, dt, node_states, state = buffers
    conv, heads, low, high = weights
    A, dt_bias, D = heads[0], heads[1], heads[2]
    b, T = rows.shape
    K = conv.shape[0] - 1
    history = K - 1
    H, P, N = state.shape[1:]
    inner, channels = H * P, xbc.shape[1]
    heads_per_group = 2 * H * N // (channels - inner)
    half = (channels - inner) // 2
    convolved = np.empty(channels, np.float32)
    for r in range(b):
        slot, first = slots[r], r * T
        inputs, above = conv_in[slot], parents[r]
        for i in range(T):
            raw, kept = xbc[first + i], inputs[history + rows[r, i]]
            for c in range(channels):
                kept[c] = raw[c]
            _convolve(convolved, conv, inputs, rows[r], above, tail[r], i)
            before = node_states[slot, above[i]] if i > 0 else state[state_slots[r]]
            after, out = node_states[slot, i], y[first + i]
            for h in range(H):
                step = min(max(softplus(dt_raw[first + i, h] + dt_bias[h]), low), high)
                dt[slot, rows[r, i], h] = step
                decay = exp(step * A[h])
                of_B = inner + h // heads_per_group * N
                B, C = convolved[of_B : of_B + N], convolved[of_B + half : of_B + half + N]
                for p in range(P):
                    x = convolved[h * P + p]
                    added, old, new, total = step * x, before[h, p], after[h, p], ZERO
                    for n in range(N):
                        value = decay * old[n] + added * B[n]
                        new[n] = value
                        total += value * C[n]
                    out[h * P + p] = total + D[h] * x


class SnapshotBuffers(NamedTuple):
    """What the snapshot scheme keeps of one layer."""

    conv_in: np.ndarray  # [R, K-1 + W, C]
    dt: np.ndarray  # [R, W, H], after softplus and clamp; written only
    node_states: np.ndarray  # [R, W, H, P, N]
    state: np.ndarray  # [state slots, H, P, N]: where the root starts


# ── between the layers' passes: indices, and the rows of all layers at once ──


@kernel
def begin(slots, state_slot, path, lengths, state_slots, journal, journal_len, rows, tail):
    """A TreeLayout's indices: each request's journal, its lowest free rows, and what precedes it.

    slots [b]; by request slot: state_slot [R], path [R, places], lengths [R], journals of at most
    W - T rows. Out: state_slots, journal_len [b]; journal [b, M]; rows [b, T]; tail [b, K-1].
    """
    history = tail.shape[1]
    taken = np.empty(path.shape[1], np.bool_)
    for r in range(slots.shape[0]):
        slot = slots[r]
        length = lengths[slot]
        state_slots[r], journal_len[r] = state_slot[slot], length
        taken[:] = False
        for k in range(length):
            row = path[slot, history + k] - history
            journal[r, k] = row
            taken[row] = True
        for k in range(history):
            tail[r, k] = path[slot, length + k]
        row = 0
        for i in range(rows.shape[1]):
            while taken[row]:
                row += 1
            rows[r, i] = row
            row += 1


@kernel
def extend_journals(slots, rows, nodes, count, hidden, history, path, journal_len, feature):
    """The first count[r] of nodes[r] join the journal of slots[r], and their features are kept.

    rows [b, T]; nodes [b, D]; hidden [b*T, hidden_size]; feature [R, W, hidden_size].
    """
    for r in range(slots.shape[0]):
        slot = slots[r]
        end = history + journal_len[slot]
        for k in range(count[r]):
            node = nodes[r, k]
            row = rows[r, node]
            path[slot, end + k] = row + history
            feature[slot, row] = hidden[r * rows.shape[1] + node]
        journal_len[slot] += count[r]


@kernel
def keep_rows(
    slots, nodes, count, processed, trail, path, journal_len, history, rows, features, kept
):
    """Copy the rows of the tokens that a step accepted to the journal slots of their requests.

    nodes [b, D], count [b]: the accepted paths, at the end of ``path`` [R, places], which has
    journal_len [R] rows; processed and trail [R] by request slot. All include these tokens; trail:
    a journal slot, past the last one for none. rows: conv_in [layers,
    R, K-1 + W, C] and dt [layers, R, W, H]; features [b, T, F]. kept: the same by journal slot and
    row, conv_in [layers, J, S, C], dt [layers, J, S, H] and feature [J, S, F].
    """
    conv_in, dt, feature = kept
    own_conv_in, own_dt = rows
    for r in range(slots.shape[0]):
        slot = slots[r]
        journal = trail[slot]
        if journal >= feature.shape[0] - 1:
            continue
        first = history + journal_len[slot] - count[r]
        for k in range(count[r]):
            place = path[slot, first + k]
            row = (processed[slot] - count[r] + k) % feature.shape[1]
            source, target = features[r, nodes[r, k]], feature[journal, row]
            for c in range(target.shape[0]):
                target[c] = source[c]
            for layer in range(conv_in.shape[0]):
                source, target = own_conv_in[layer, slot, place], conv_in[layer, journal, row]
                for c in range(target.shape[0]):
                    target[c] = source[c]
                source, target = own_dt[layer, slot, place - history], dt[layer, journal, row]
                for h in range(target.shape[0]):
                    target[h] = source[h]


@kernel
def begin_replay(first, count, conv, A, conv_in, dt, history, state, x, B):
    """All of a replay but its matrix product, in one layer: x and B of ``count`` rows, the first of
    which is row ``first``, the state's decay, and the history.

    conv [K + 1, C]: the taps, the token itself last, then the bias. A [H]. conv_in [S, C] and dt
    [S, H]: a journal slot. In place: history [K-1, C] becomes that after the rows, and state
    [H, P, N] is multiplied by ``exp(L)`` of the last row. Out: x [count, H*P], times
    ``exp(L - L_row) dt_row``, and B [count, G*N].
    """
    K = conv.shape[0] - 1
    size, H, inner = conv_in.shape[0], A.shape[0], x.shape[1]
    P = inner // H
    convolved = np.empty(inner + B.shape[1], np.float32)
    left = np.empty(H, np.float32)  # L of the last row, less that of this one
    for h in range(H):
        left[h] = ZERO
    for k in range(count - 1, -1, -1):
        bias = conv[K]
        for c in range(convolved.shape[0]):
            convolved[c] = bias[c]
        for tap in range(K):
            at = k + tap - (K - 1)  # of the rows; before them is the history
            taps = conv[tap]
            raw = history[at + K - 1] if at < 0 else conv_in[(first + at) % size]
            for c in range(convolved.shape[0]):
                convolved[c] += taps[c] * raw[c]
        for c in range(convolved.shape[0]):
            convolved[c] = silu(convolved[c])
        steps = dt[(first + k) % size]
        for h in range(H):
            weight = exp(left[h]) * steps[h]
            for p in range(h * P, (h + 1) * P):
                x[k, p] = weight * convolved[p]
            left[h] += steps[h] * A[h]
        for n in range(B.shape[1]):
            B[k, n] = convolved[inner + n]
    for h in range(H):
        decay = exp(left[h])
        for p in range(P):
            s = state[h, p]
            for n in range(s.shape[0]):
                s[n] *= decay
    for i in range(K - 1):  # no source is below its target
        at = count + i - (K - 1)
        raw, kept = history[at + K - 1] if at < 0 else conv_in[(first + at) % size], history[i]
        for c in range(kept.shape[0]):
            kept[c] = raw[c]


@kernel
def move_history(slots, lengths, path, history, conv_in):
    """The history becomes that of the token ``lengths[f]`` tokens along the path, in all layers.

    conv_in [layers, R, K-1 + W, C]. No source is below its target, so copying in rising order is
    safe.
    """
    for layer in range(conv_in.shape[0]):
        for f in range(slots.shape[0]):
            inputs = conv_in[layer, slots[f]]
            for k in range(history):
                place = path[slots[f], lengths[f] + k]
                if place != k:
                    inputs[k] = inputs[place]


@kernel
def commit_snapshots(slots, nodes, count, hidden, state_slots, node_states, state, feature):
    """Copy the state and the feature of each request's last accepted node to its state slot.

    nodes [b, D]; hidden [b*T, hidden_size]; node_states [layers, R, W, H, P, N];
    state [layers, state slots, H, P, N]; feature [state slots, hidden_size].
    """
    b = slots.shape[0]
    for layer in range(state.shape[0]):
        for r in range(b):
            if count[r] > 0:
                state[layer, state_slots[r]] = node_states[layer, slots[r], nodes[r, count[r] - 1]]
    for r in range(b):
        if count[r] > 0:
            feature[state_slots[r]] = hidden[r * (hidden.shape[0] // b) + nodes[r, count[r] - 1]]
