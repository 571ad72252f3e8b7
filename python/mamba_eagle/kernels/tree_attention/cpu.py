"""Attention of tree nodes and of drafted blocks, straight from the paged pool, on a CPU: float32,
one thread.

No keys are gathered and no mask is made: a node reads its request's prefix through the slot table,
and its ancestors through parent indices; a row of a block knows what it sees by its place.
"""

from __future__ import annotations

import numpy as np

from mamba_eagle.kernels.numba_math import ZERO, exp, kernel


@kernel
def _scores(queries, key, scale, out, j):
    """out[m, j] = scale · queries[m] · key; queries [M, D], key [D]; read once per four queries."""
    M, D = queries.shape
    m = 0
    while m + 4 <= M:
        q0, q1, q2, q3 = queries[m], queries[m + 1], queries[m + 2], queries[m + 3]
        t0, t1, t2, t3 = ZERO, ZERO, ZERO, ZERO
        for d in range(D):
            value = key[d]
            t0 += value * q0[d]
            t1 += value * q1[d]
            t2 += value * q2[d]
            t3 += value * q3[d]
        out[m, j], out[m + 1, j] = scale * t0, scale * t1
        out[m + 2, j], out[m + 3, j] = scale * t2, scale * t3
        m += 4
    while m < M:
        q0, t0 = queries[m], ZERO
        for d in range(D):
            t0 += q0[d] * key[d]
        out[m, j] = scale * t0
        m += 1


@kernel
def _add_values(weights, pool_v, kv_head, table, n, result):
    """result[m] = Σ_j weights[m, j] · pool_v[table[j], kv_head], j < n; result [M, D]."""
    result[:] = ZERO
    j = 0
    while j < n:
        # four keys at a time; past the end, the last key again with a weight of zero
        count = min(4, n - j)
        v0 = pool_v[table[j], kv_head]
        v1 = pool_v[table[j + min(1, count - 1)], kv_head]
        v2 = pool_v[table[j + min(2, count - 1)], kv_head]
        v3 = pool_v[table[j + count - 1], kv_head]
        for m in range(result.shape[0]):
            w, total = weights[m], result[m]
            w0 = w[j]
            w1 = w[j + 1] if count > 1 else ZERO
            w2 = w[j + 2] if count > 2 else ZERO
            w3 = w[j + 3] if count > 3 else ZERO
            for d in range(result.shape[1]):
                total[d] += (w0 * v0[d] + w1 * v1[d]) + (w2 * v2[d] + w3 * v3[d])
        j += 4


@kernel
def paged_tree_attention(
    q, k, v, pool_k, pool_v, slot_table, slots, prefix, own, parents, scale, out
):
    """Write the new nodes' keys and values to the pool; they attend to prefix and ancestors.

    b trees (or forests) of E nodes. The last T nodes are new; the others are already in the pool.

    Args:
        q, out: [b*T, heads, D]; k, v: [b*T, kv_heads, D]; pool_k, pool_v: [KV slots, kv_heads, D].
        slot_table: [R, positions], the KV slots of each request slot; slots [b], request slots.
        prefix: [b], how many positions of the table a tree's nodes see.
        own: [b, E], the nodes' KV slots; parents: [b, E], a root is its own parent.
    """
    b, E = own.shape
    T = q.shape[0] // b
    old = E - T
    heads, D = q.shape[1:]
    kv_heads = k.shape[1]
    group = heads // kv_heads  # query heads that share a key head
    scale = np.float32(scale)
    longest = 0
    for r in range(b):
        longest = max(longest, prefix[r])
    queries = np.empty((T * group, D), np.float32)
    weights = np.empty((T * group, longest + E), np.float32)
    result = np.empty((T * group, D), np.float32)
    table = np.empty(longest + E, np.int64)
    for r in range(b):
        first, seen = r * T, prefix[r]
        for j in range(seen):
            table[j] = slot_table[slots[r], j]
        for i in range(E):
            table[seen + i] = own[r, i]
        for i in range(T):
            pool_k[own[r, old + i]] = k[first + i]
            pool_v[own[r, old + i]] = v[first + i]
        for kv_head in range(kv_heads):
            for i in range(T):
                for h in range(group):
                    queries[i * group + h] = q[first + i, kv_head * group + h]
            for j in range(seen + E):
                _scores(queries, pool_k[table[j], kv_head], scale, weights, j)
            for i in range(T):
                for h in range(group):
                    _softmax_over_path(weights[i * group + h], seen, parents[r], old + i)
            _add_values(weights, pool_v, kv_head, table, seen + E, result)
            for i in range(T):
                for h in range(group):
                    out[first + i, kv_head * group + h] = result[i * group + h]


@kernel
def _softmax_over_path(scores, seen, parents, node):
    """In place: scores [seen + E] become weights; nodes off the path to ``node`` get zero."""
    E = parents.shape[0]
    on_path = np.zeros(E, np.bool_)
    at = node
    on_path[at] = True
    largest = scores[seen + at]
    while parents[at] != at:
        at = parents[at]
        on_path[at] = True
        largest = max(largest, scores[seen + at])
    for j in range(seen):
        largest = max(largest, scores[j])
    total = ZERO
    for j in range(seen):
        weight = exp(scores[j] - largest)
        scores[j] = weight
        total += weight
    for i in range(E):
        weight = exp(scores[seen + i] - largest) if on_path[i] else ZERO
        scores[seen + i] = weight
        total += weight
    for j in range(seen + E):
        scores[j] /= total


@kernel
def paged_block_attention(
    q, k, v, pool_k, pool_v, slot_table, slots, prefix, own, window, causal, sinks, scale, out
):
    """Write the rows' keys and values to the pool; they attend to prefix and block.

    b blocks of T rows, row i at position prefix + i.

    Args:
        As for ``paged_tree_attention``; own: [b, T], the rows' KV slots.
        window: a row sees positions less than this far from its own; 0: all. causal: it sees no
            later row. sinks: [heads], logits of keys without values; [0]: there are none.
    """
    b, T = own.shape
    heads, D = q.shape[1:]
    kv_heads = k.shape[1]
    group = heads // kv_heads  # query heads that share a key head
    scale = np.float32(scale)
    longest = 0
    for r in range(b):
        longest = max(longest, prefix[r])
    if window:
        longest = min(longest, window)
    queries = np.empty((T * group, D), np.float32)
    weights = np.empty((T * group, longest + T), np.float32)
    result = np.empty((T * group, D), np.float32)
    table = np.empty(longest + T, np.int64)
    for r in range(b):
        # the first position that any row sees
        begin = max(0, prefix[r] - window + 1) if window else 0
        first, seen = r * T, prefix[r] - begin
        for j in range(seen):
            table[j] = slot_table[slots[r], begin + j]
        for i in range(T):
            table[seen + i] = own[r, i]
            pool_k[own[r, i]] = k[first + i]
            pool_v[own[r, i]] = v[first + i]
        for kv_head in range(kv_heads):
            for i in range(T):
                for h in range(group):
                    queries[i * group + h] = q[first + i, kv_head * group + h]
            for j in range(seen + T):
                _scores(queries, pool_k[table[j], kv_head], scale, weights, j)
            for i in range(T):
                # keys [low, high) of the table
                low = max(0, seen + i - window + 1) if window else 0
                high = seen + i + 1 if causal else seen + T
                if window:
                    high = min(high, seen + i + window)
                for h in range(group):
                    head = kv_head * group + h
                    sink = sinks[head] if len(sinks) else -np.float32(np.inf)
                    _softmax_between(weights[i * group + h, : seen + T], low, high, sink)
            _add_values(weights, pool_v, kv_head, table, seen + T, result)
            for i in range(T):
                for h in range(group):
                    out[first + i, kv_head * group + h] = result[i * group + h]


@kernel
def _softmax_between(scores, low, high, sink):
    """In place: scores become weights; those outside of [low, high) get zero. sink: one more logit
    of the softmax."""
    largest = sink
    for j in range(low, high):
        largest = max(largest, scores[j])
    total = exp(sink - largest)
    for j in range(low, high):
        scores[j] = exp(scores[j] - largest)
        total += scores[j]
    for j in range(len(scores)):
        scores[j] = scores[j] / total if low <= j and j < high else ZERO
