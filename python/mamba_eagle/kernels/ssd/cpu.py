"""The chunked scan over prompts of several requests, from and to state slots, on a CPU: float32.

Threads share out pairs of a request and a head. Each keeps one state, transposed to [N, P], in its
core's cache while it walks over the request's tokens. Within a chunk it uses the dual form (arXiv
2405.21060, section 6),

    y_i = D x_i + Σ_{j<=i} exp(L_i - L_j) dt_j (B_j·C_i) x_j + exp(L_i) Σ_n C_in S_n,

whose two sums, and what the chunk adds to the state, are products of small matrices (numba_tiles).
No intermediate of a chunk leaves the cache, and a chunk that ends early costs what its tokens cost.

A head's outputs do not depend on the batch or on the number of threads.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from mamba_eagle.kernels.numba_math import ZERO, exp, kernel, prange
from mamba_eagle.kernels.numba_tiles import COLUMNS, ROWS, add_tile
from mamba_eagle.kernels.threads import threaded

# A chunk of q tokens takes q/2·P products per token and head, a state of 128 numbers 256·P besides:
# longer chunks save nothing.
CHUNK = 64
SLACK = ROWS  # rows of any content that must follow the inputs of ``scan``


@kernel
def scores_of(t, xBC, inner, N, tokens, scores):
    """Token t of ``products``."""
    begin = tokens[t, 2]
    count = t - begin + 1
    G = scores.shape[1]
    for g in range(G):
        at = inner + g * N
        own, row = xBC[t, at + G * N : at + G * N + N], scores[t, g]
        j = 0
        while j + 4 <= count:
            b0, b1 = xBC[begin + j, at : at + N], xBC[begin + j + 1, at : at + N]
            b2, b3 = xBC[begin + j + 2, at : at + N], xBC[begin + j + 3, at : at + N]
            s0, s1, s2, s3 = ZERO, ZERO, ZERO, ZERO
            for n in range(N):
                value = own[n]
                s0 += value * b0[n]
                s1 += value * b1[n]
                s2 += value * b2[n]
                s3 += value * b3[n]
            row[j], row[j + 1], row[j + 2], row[j + 3] = s0, s1, s2, s3
            j += 4
        while j < count:
            b0, s0 = xBC[begin + j, at : at + N], ZERO
            for n in range(N):
                s0 += own[n] * b0[n]
            row[j] = s0
            j += 1


@threaded
def products(xBC, inner, N, tokens, scores):
    """scores[t, g, j] = C_t · B of token j of t's chunk, up to t itself.

    xBC [·, H*P + 2*G*N] after the convolution, inner H*P; tokens [n, 3] int32, whose last column is
    the first token of each one's chunk; scores [n, G, CHUNK].
    """
    for t in prange(tokens.shape[0]):
        scores_of(t, xBC, inner, N, tokens, scores)


class Head(NamedTuple):
    """Where one head's inputs are, and what it adds to them."""

    head: int
    heads: int  # H
    group: int
    of_B: int  # column of the group's B
    of_C: int
    rate: np.float32  # A
    skip: np.float32  # D


class Room(NamedTuple):
    """What a thread needs for one head. W: P, padded to whole tiles."""

    rows: np.ndarray  # [CHUNK + N, W]: x of a chunk, then the state; N padded to whole tiles
    weights: np.ndarray  # [CHUNK, CHUNK]: what a token (column) adds to another (row)
    out: np.ndarray  # [CHUNK, W]
    steps: np.ndarray  # [2, CHUNK]: dt, and L, the running sum of dt·A


@kernel
def _outputs(xBC, at, q, N, own, scores, room, y):
    """The outputs of tokens [at, at + q), from the state before them; ``rows`` has their x."""
    rows, weights, out, steps = room
    C, W = xBC.shape[1], rows.shape[1]
    P = y.shape[1] // own.heads
    out[:] = ZERO
    for i in range(0, q, ROWS):
        for c in range(0, W, COLUMNS):
            of_C = (at + i) * C + own.of_C
            add_tile(out, i * W + c, W, xBC, of_C, C, 1, rows, CHUNK * W + c, W, N)
    for i in range(q):
        L, row, score = steps[1, i], weights[i], scores[at + i, own.group]
        for j in range(i + 1):
            row[j] = exp(L - steps[1, j]) * steps[0, j] * score[j]
        for j in range(i + 1, min(i + ROWS, CHUNK)):
            row[j] = ZERO
        decay, x, total = exp(L), rows[i], out[i]
        for p in range(W):
            total[p] = decay * total[p] + own.skip * x[p]
    for i in range(0, q, ROWS):
        for c in range(0, W, COLUMNS):
            seen = min(i + ROWS, q)
            add_tile(out, i * W + c, W, weights, i * CHUNK, CHUNK, 1, rows, c, W, seen)
    for i in range(q):
        total, found = out[i], y[at + i, own.head * P : (own.head + 1) * P]
        for p in range(P):
            found[p] = total[p]


@kernel
def _state_after(xBC, at, q, N, own, room):
    """The state after tokens [at, at + q), in place; overwrites their x."""
    rows, steps = room.rows, room.steps
    C, W = xBC.shape[1], rows.shape[1]
    # Summed from the end, so that the decays of the last tokens are exact
    left = ZERO
    for j in range(q - 1, -1, -1):
        share, x = exp(left) * steps[0, j], rows[j]
        for p in range(W):
            x[p] *= share
        left += steps[0, j] * own.rate
    decay = exp(left)
    for n in range(0, N, ROWS):
        for k in range(CHUNK + n, CHUNK + n + ROWS):
            state = rows[k]
            for p in range(W):
                state[p] *= decay
        for c in range(0, W, COLUMNS):
            of_B = at * C + own.of_B + n
            add_tile(rows, (CHUNK + n) * W + c, W, xBC, of_B, 1, C, rows, c, W, q)


@kernel
def _read_chunk(xBC, dt, at, q, P, own, room):
    """x, dt and L of tokens [at, at + q)."""
    total = ZERO
    for j in range(q):
        step = dt[at + j, own.head]
        total += step * own.rate
        room.steps[0, j], room.steps[1, j] = step, total
        x, kept = xBC[at + j, own.head * P : (own.head + 1) * P], room.rows[j]
        for p in range(P):
            kept[p] = x[p]


@kernel
def _walk(xBC, dt, own, P, N, state, source, segments, scores, y):
    """One head of one request, through its segments."""
    W, N_padded = -(-P // COLUMNS) * COLUMNS, -(-N // ROWS) * ROWS
    room = Room(
        np.zeros((CHUNK + N_padded, W), np.float32),
        np.zeros((CHUNK, CHUNK), np.float32),
        np.empty((CHUNK, W), np.float32),
        np.empty((2, CHUNK), np.float32),
    )
    h, rows = own.head, room.rows
    if source >= 0:
        for n in range(N):
            for p in range(P):
                rows[CHUNK + n, p] = state[source, h, p, n]
    for s in range(segments.shape[0]):
        begin, end, slot = segments[s, 0], segments[s, 1], segments[s, 2]
        for at in range(begin, end, CHUNK):
            q = min(CHUNK, end - at)
            _read_chunk(xBC, dt, at, q, P, own, room)
            _outputs(xBC, at, q, N, own, scores, room, y)
            _state_after(xBC, at, q, N, own, room)
        if slot >= 0:
            for p in range(P):
                for n in range(N):
                    state[slot, h, p, n] = rows[CHUNK + n, p]


@kernel
def scan_head(task, xBC, dt, A, D, state, requests, segments, scores, y):
    """A pair of a request and a head of ``scan``."""
    H, P, N = state.shape[1:]
    G = scores.shape[1]
    r, h = task // H, task % H
    g = h // (H // G)
    of_B = H * P + g * N
    own = Head(h, H, g, of_B, of_B + G * N, A[h], D[h])
    first, last, source = requests[r, 0], requests[r, 1], requests[r, 2]
    _walk(xBC, dt, own, P, N, state, source, segments[first:last], scores, y)


@threaded
def scan(xBC, dt, A, D, state, requests, segments, scores, y):
    """torch.py's scan_prompts, from and to state slots.

    xBC [n + SLACK, H*P + 2*G*N] after the convolution; dt [n, H] after softplus; A, D [H]; state
    [slots, H, P, N]; requests [b, 3], segments [S, 3]: of a PrefillPlan; scores: from ``products``,
    for chunks of CHUNK tokens from each segment's start. Out: y [n, H*P].
    """
    for task in prange(requests.shape[0] * state.shape[1]):
        scan_head(task, xBC, dt, A, D, state, requests, segments, scores, y)
