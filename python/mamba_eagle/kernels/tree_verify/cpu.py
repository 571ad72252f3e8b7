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
from mamba_eagle.kernels.numba_tiles import LANES, add_dots
from mamba_eagle.kernels.threads import threaded


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
    K = conv.shape[0] - 1
    history = K - 1
    before = history - 1  # of the tail, next to be read
    taps, bias, own = conv[K - 1], conv[K], inputs[history + rows[node]]
    for c in range(out.shape[0]):
        out[c] = bias[c] + taps[c] * own[c]
    for k in range(K - 2, -1, -1):
        if node > 0:
            node = parents[node]
            place = history + rows[node]
        else:
            place = tail[before]
            before -= 1
        taps, earlier = conv[k], inputs[place]
        for c in range(out.shape[0]):
            out[c] += taps[c] * earlier[c]
    for c in range(out.shape[0]):
        out[c] = silu(out[c])


class Seen(NamedTuple):
    """What the heads of a layer share. M: rows of the longest journal there may be."""

    C: np.ndarray  # [b, T, G, N]
    decay: np.ndarray  # [b, T, H]: exp(L)
    rows: np.ndarray  # [b, T, M + T]: those that a node sees, the node's own among them
    count: np.ndarray  # [b, T]: how many
    scores: np.ndarray  # [b, T, G, M + T]: B of that row · C of the node


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


@kernel
def _read_rows(out, x, weights, rows, count, first):
    """out [P] += Σ_k weights[k] · x[rows[k], first + p]; four rows at a time."""
    P, k = out.shape[0], 0
    while k + 4 <= count:
        w0, w1, w2, w3 = weights[k], weights[k + 1], weights[k + 2], weights[k + 3]
        x0, x1 = x[rows[k], first : first + P], x[rows[k + 1], first : first + P]
        x2, x3 = x[rows[k + 2], first : first + P], x[rows[k + 3], first : first + P]
        for p in range(P):
            out[p] += (w0 * x0[p] + w1 * x1[p]) + (w2 * x2[p] + w3 * x3[p])
        k += 4
    while k < count:
        w0, x0 = weights[k], x[rows[k], first : first + P]
        for p in range(P):
            out[p] += w0 * x0[p]
        k += 1


@kernel
def _read_state(out, first, S, C, decay):
    """out[i, first + p] += decay[i] · (S[p] · C[i]), four nodes at a time.

    out [T, H*P]; S [P, N]; C [T, N]; decay [T].
    """
    T, (P, N), i = out.shape[0], S.shape, 0
    while i + 4 <= T:
        c0, c1, c2, c3 = C[i], C[i + 1], C[i + 2], C[i + 3]
        for p in range(P):
            s = S[p]
            t0, t1, t2, t3 = ZERO, ZERO, ZERO, ZERO
            for n in range(N):
                value = s[n]
                t0 += value * c0[n]
                t1 += value * c1[n]
                t2 += value * c2[n]
                t3 += value * c3[n]
            at = first + p
            out[i, at] += decay[i] * t0
            out[i + 1, at] += decay[i + 1] * t1
            out[i + 2, at] += decay[i + 2] * t2
            out[i + 3, at] += decay[i + 3] * t3
        i += 4
    while i < T:
        if N % LANES == 0:
            add_dots(out[i], first, S, C[i], decay[i], P, N)
        else:
            for p in range(P):
                out[i, first + p] += decay[i] * _dot(S[p], C[i])
        i += 1


@kernel
def _head(r, h, nodes, skip, buffers, seen, y):
    """The outputs of one head for the nodes of request r, once ``_enter`` has seen them."""
    _, xB, dt, log_decay, state = buffers
    T, G, N = seen.C.shape[1:]
    H, P = state.shape[1:3]
    g, first, slot = h // (H // G), h * P, nodes.slots[r]
    out = y[r * T : (r + 1) * T]
    weights = np.empty(seen.rows.shape[2], np.float32)
    C, decay = np.empty((T, N), np.float32), np.empty(T, np.float32)
    for i in range(T):
        row, rows, count = nodes.rows[r, i], seen.rows[r, i], seen.count[r, i]
        x, own, L, scores = xB[slot, row], out[i], log_decay[slot, row, h], seen.scores[r, i, g]
        for k in range(count):
            weights[k] = L - log_decay[slot, rows[k], h]
        for k in range(count):
            weights[k] = exp(weights[k]) * scores[k]
        for k in range(count):
            weights[k] *= dt[slot, rows[k], h]
        for p in range(first, first + P):
            own[p] = skip * x[p]
        _read_rows(own[first : first + P], xB[slot], weights, rows, count, first)
        C[i], decay[i] = seen.C[r, i, g], seen.decay[r, i, h]
    _read_state(out, first, state[nodes.state_slots[r], h], C, decay)


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
    weights = np.empty(length, np.float32)
    last = log_decay[slot, rows[length - 1], h]
    for k in range(length):
        weights[k] = exp(last - log_decay[slot, rows[k], h]) * dt[slot, rows[k], h]
    decay = exp(last)
    for p in range(P):
        s = S[p]
        for n in range(N):
            s[n] *= decay
        at, k = h * P + p, 0
        while k + 4 <= length:
            j0, j1, j2, j3 = rows[k], rows[k + 1], rows[k + 2], rows[k + 3]
            w0, w1 = weights[k] * x[j0, at], weights[k + 1] * x[j1, at]
            w2, w3 = weights[k + 2] * x[j2, at], weights[k + 3] * x[j3, at]
            B0, B1 = x[j0, of_B : of_B + N], x[j1, of_B : of_B + N]
            B2, B3 = x[j2, of_B : of_B + N], x[j3, of_B : of_B + N]
            for n in range(N):
                s[n] += (w0 * B0[n] + w1 * B1[n]) + (w2 * B2[n] + w3 * B3[n])
            k += 4
        while k < length:
            w0, B0 = weights[k] * x[rows[k], at], x[rows[k], of_B : of_B + N]
            for n in range(N):
                s[n] += w0 * B0[n]
            k += 1


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
