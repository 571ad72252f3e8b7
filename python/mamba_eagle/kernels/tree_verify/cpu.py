"""torch.py's tree verification as one pass per layer on a CPU: float32, one thread.

One call does all of a Mamba2 layer except its matrix products: convolution along each node's path,
SiLU, step size, decay, and the dual form. Rows and states are read in place, S0 once. What the
nodes feed into the recurrence is written straight into their rows, which count as free until the
nodes are accepted.

Requests are processed one after the other, in an order of operations that depends on nothing but
the request: its outputs do not depend on the batch.

b of R request slots, T tree nodes, W rows per request, H heads of P channels, G groups, N state
size, K convolution width, C = H*P + 2*G*N convolution channels.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from mamba_eagle.kernels.numba_math import ZERO, exp, kernel, silu, softplus


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


@kernel
def _read_state(out, state, C, decay):
    """out[i, h*P + p] += decay[i, h] · (state[h, p] · C[i, group of h]), four nodes at a time.

    out [T, H*P]; state [H, P, N]; C [T, G, N]; decay [T, H].
    """
    T, G, N = C.shape
    H, P = state.shape[:2]
    for h in range(H):
        g = h // (H // G)
        i = 0
        while i + 4 <= T:
            c0, c1, c2, c3 = C[i, g], C[i + 1, g], C[i + 2, g], C[i + 3, g]
            for p in range(P):
                s = state[h, p]
                t0, t1, t2, t3 = ZERO, ZERO, ZERO, ZERO
                for n in range(N):
                    value = s[n]
                    t0 += value * c0[n]
                    t1 += value * c1[n]
                    t2 += value * c2[n]
                    t3 += value * c3[n]
                at = h * P + p
                out[i, at] += decay[i, h] * t0
                out[i + 1, at] += decay[i + 1, h] * t1
                out[i + 2, at] += decay[i + 2, h] * t2
                out[i + 3, at] += decay[i + 3, h] * t3
            i += 4
        while i < T:
            c0 = C[i, g]
            for p in range(P):
                out[i, h * P + p] += decay[i, h] * _dot(state[h, p], c0)
            i += 1


@kernel
def _read_row(out, C, L, xB, dt, row_L, scores, weights):
    """What a row adds to a node that sees it: ``out += exp(L - L_row) dt_row (B_row·C) x_row``.

    out [H*P]; C [G, N]; L, dt, row_L [H]; xB [H*P + G*N]; scores, weights [H]: scratch.
    """
    G, N = C.shape
    H, inner = L.shape[0], out.shape[0]
    P = inner // H
    for g in range(G):
        score = _dot(xB[inner + g * N : inner + (g + 1) * N], C[g])
        for h in range(g * (H // G), (g + 1) * (H // G)):
            scores[h] = score
    for h in range(H):
        weights[h] = exp(L[h] - row_L[h]) * dt[h] * scores[h]
    for h in range(H):
        w, x, y = weights[h], xB[h * P : (h + 1) * P], out[h * P : (h + 1) * P]
        for p in range(P):
            y[p] += w * x[p]


@kernel
def deferred_verify(xbc, dt_raw, nodes, weights, buffers, y):
    """All nodes of b trees in one layer: convolution, torch.py's tree_verify, and D x.

    Args:
        xbc: [b*T, C], before the convolution; dt_raw: [b*T, H]; nodes: TreeLayout of arrays;
            weights: LayerWeights; buffers: Buffers, in which the nodes' rows are written.
        Out: y [b*T, H*P].
    """
    slots, state_slots, rows, parents = nodes.slots, nodes.state_slots, nodes.rows, nodes.parents
    journal, journal_len, tail = nodes.journal, nodes.journal_len, nodes.tail
    conv_in, xB, dt, log_decay, state = buffers
    conv, heads, low, high = weights
    A, dt_bias, D = heads[0], heads[1], heads[2]
    b, T = rows.shape
    K = conv.shape[0] - 1
    history = K - 1
    H, P, N = state.shape[1:]
    inner, width = H * P, xB.shape[2]
    G = (width - inner) // N
    convolved = np.empty(xbc.shape[1], np.float32)
    C = np.empty((T, G, N), np.float32)
    flat_C = C.reshape(T, G * N)
    decay = np.empty((T, H), np.float32)
    scores, scratch = np.empty(H, np.float32), np.empty(H, np.float32)
    visible = np.empty(journal.shape[1] + T, np.int64)  # rows that a node sees
    for r in range(b):
        slot, first = slots[r], r * T
        inputs, slot_rows, above = conv_in[slot], rows[r], parents[r]
        length = journal_len[r]
        for k in range(length):
            visible[k] = journal[r, k]
        for i in range(T):
            row = slot_rows[i]
            raw, kept = xbc[first + i], inputs[history + row]
            for c in range(raw.shape[0]):
                kept[c] = raw[c]
            _convolve(convolved, conv, inputs, slot_rows, above, tail[r], i)
            own, own_C = xB[slot, row], flat_C[i]
            for c in range(width):
                own[c] = convolved[c]
            for c in range(G * N):
                own_C[c] = convolved[width + c]
            before = slot_rows[above[i]] if i > 0 else journal[r, length - 1]
            for h in range(H):
                step = min(max(softplus(dt_raw[first + i, h] + dt_bias[h]), low), high)
                since = log_decay[slot, before, h] if i > 0 or length > 0 else ZERO
                L = since + step * A[h]
                dt[slot, row, h] = step
                log_decay[slot, row, h] = L
                decay[i, h] = exp(L)

        for i in range(T):
            row, out = slot_rows[i], y[first + i]
            x, L = xB[slot, row], log_decay[slot, row]
            for h in range(H):
                for p in range(h * P, (h + 1) * P):
                    out[p] = D[h] * x[p]
            seen, node = length, i
            while True:  # after the journal the node itself, then up to the root
                visible[seen] = slot_rows[node]
                seen += 1
                if node == 0:
                    break
                node = above[node]
            for k in range(seen):
                j = visible[k]
                _read_row(
                    out, C[i], L, xB[slot, j], dt[slot, j], log_decay[slot, j], scores, scratch
                )
        _read_state(y[first : first + T], state[state_slots[r]], C, decay)


@kernel
def fold(slots, lengths, path, state_slots, history, buffers):
    """torch.py's fold of one layer, in place: S0 becomes the state after ``lengths[f]`` rows.

    slots, lengths, state_slots [f]; path [R, …].
    """
    _, xB, dt, log_decay, state = buffers
    H, P, N = state.shape[1:]
    heads_per_group = H * N // (xB.shape[2] - H * P)
    most = 0
    for f in range(slots.shape[0]):
        most = max(most, lengths[f])
    journal = np.empty(most, np.int64)
    weights = np.empty((H, most), np.float32)
    for f in range(slots.shape[0]):
        slot, length, S = slots[f], lengths[f], state[state_slots[f]]
        if length == 0:
            continue
        for k in range(length):
            journal[k] = path[slot, history + k] - history
        last = log_decay[slot, journal[length - 1]]
        for h in range(H):
            for k in range(length):
                j = journal[k]
                weights[h, k] = exp(last[h] - log_decay[slot, j, h]) * dt[slot, j, h]
        for h in range(H):
            decay, of_B = exp(last[h]), H * P + h // heads_per_group * N
            for p in range(P):
                s = S[h, p]
                for n in range(N):
                    s[n] *= decay
                at, k = h * P + p, 0
                while k + 4 <= length:
                    j0, j1, j2, j3 = journal[k], journal[k + 1], journal[k + 2], journal[k + 3]
                    w0, w1 = weights[h, k] * xB[slot, j0, at], weights[h, k + 1] * xB[slot, j1, at]
                    w2, w3 = (
                        weights[h, k + 2] * xB[slot, j2, at],
                        weights[h, k + 3] * xB[slot, j3, at],
                    )
                    B0, B1 = xB[slot, j0, of_B : of_B + N], xB[slot, j1, of_B : of_B + N]
                    B2, B3 = xB[slot, j2, of_B : of_B + N], xB[slot, j3, of_B : of_B + N]
                    for n in range(N):
                        s[n] += (w0 * B0[n] + w1 * B1[n]) + (w2 * B2[n] + w3 * B3[n])
                    k += 4
                while k < length:
                    j0 = journal[k]
                    w0, B0 = weights[h, k] * xB[slot, j0, at], xB[slot, j0, of_B : of_B + N]
                    for n in range(N):
                        s[n] += w0 * B0[n]
                    k += 1


@kernel
def snapshot_verify(xbc, dt_raw, nodes, weights, buffers, y):
    """The recurrence node by node: convolution, torch.py's snapshot_verify, and D x.

    Arguments as for deferred_verify, but buffers: SnapshotBuffers, whose node states are written.
    """
    slots, state_slots, rows, parents = nodes.slots, nodes.state_slots, nodes.rows, nodes.parents
    tail = nodes.tail
    conv_in, node_states, state = buffers
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

    nodes [b, D], count [b]: the accepted paths; processed, trail, journal_len [R] by request slot,
    these tokens included; trail: a journal slot, past the last one for none. rows: conv_in [layers,
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
