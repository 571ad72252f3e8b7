"""Attention of tree nodes and of drafted blocks, straight from the paged pool, on a CPU: float32.

Threads share out pairs of a request and a key head, each of which is computed as if it were alone.

No keys are gathered and no mask is made: a node reads its request's prefix through the slot table,
and its ancestors through parent indices; a row of a block knows what it sees by its place.
"""

import numpy as np

from mamba_eagle.cpu.threads import threaded
from mamba_eagle.cpu.vector_math import ONE, ZERO, copy_row, exp
from mamba_eagle.cpu.vectors import sums
from mamba_eagle.cpu.vectors.sums import COLUMNS, LANES, ROWS, WIDTH
from mamba_eagle.machine_code import kernel, prange, strictly

INFINITY = np.float32(np.inf)


def multiply_adds(q: np.ndarray, prefix: np.ndarray, own: np.ndarray) -> int:
    """Of a call: q [b*T, heads, D], prefix [b], own [b, E]."""
    return 2 * q.size * (int(prefix.max(initial=0)) + own.shape[1])


@strictly
def _scores(queries, pool_k, kv_head, table, scale, weights):
    """weights[m, j] += scale · queries[m] · pool_k[table[j], kv_head], for all of ``table``, whose
    length is that of whole vectors."""
    (M, D), (n, kv), m = queries.shape, (len(table), pool_k.shape[1]), 0
    if D % LANES != 0:
        for j in range(n):
            key = pool_k[table[j], kv_head]
            for m in range(M):
                total = ZERO
                for d in range(D):
                    total += queries[m, d] * key[d]
                weights[m, j] = scale * total
        return
    flat, scales = pool_k.reshape(pool_k.size), np.empty(ROWS, np.float32)
    scales[:] = scale
    while m + ROWS <= M:
        for j in range(0, n, COLUMNS):
            sums.add_products_of_four(
                weights, m * n + j, n, scales, 0, queries, m * D, D,
                flat, kv_head * D, kv * D, table, j, D,
            )  # fmt: skip
        m += ROWS
    if m + 2 <= M:
        for j in range(0, n, LANES // 2):
            sums.add_products_of_two(
                weights, m * n + j, n, scales, 0, queries, m * D, D,
                flat, kv_head * D, kv * D, table, j, D,
            )  # fmt: skip
        m += 2
    while m < M:
        for j in range(0, n, LANES):
            sums.add_products_of_one(
                weights, m * n + j, n, scales, 0, queries, m * D, D,
                flat, kv_head * D, kv * D, table, j, D,
            )  # fmt: skip
        m += 1


@strictly
def _values(weights, pool_v, kv_head, table, n, result):
    """result[m] = Σ_j weights[m, j] · pool_v[table[j], kv_head], j < n, added up in this order;
    result [M, D]."""
    (M, D), (W, kv), m = result.shape, (weights.shape[1], pool_v.shape[1]), 0
    result[:] = ZERO
    if D % LANES != 0:
        for m in range(M):
            for j in range(n):
                value = pool_v[table[j], kv_head]
                for d in range(D):
                    result[m, d] += weights[m, j] * value[d]
        return
    flat, wide = pool_v.reshape(pool_v.size), D // WIDTH * WIDTH
    while m + ROWS <= M:
        for d in range(0, wide, WIDTH):
            of_head = kv_head * D + d
            sums.add_four_rows(
                result, m * D + d, D, weights, m * W, W, 1, flat, of_head, kv * D, table, n
            )
        m += ROWS
    if m + 2 <= M:
        for d in range(0, wide, WIDTH):
            of_head = kv_head * D + d
            sums.add_two_rows(
                result, m * D + d, D, weights, m * W, W, 1, flat, of_head, kv * D, table, n
            )
        m += 2
    for last in range(m, M):
        for d in range(0, wide, WIDTH):
            of_head = kv_head * D + d
            sums.add_one_row(
                result, last * D + d, D, weights, last * W, W, 1, flat, of_head, kv * D, table, n
            )
    for each in range(M):
        for d in range(wide, D, LANES):
            of_head = kv_head * D + d
            sums.add_narrow_row(
                result, each * D + d, D, weights, each * W, W, 1, flat, of_head, kv * D, table, n
            )


@kernel
def _gathered(r, kv_head, new, pool, sequences, own, begin):
    """What the T newest nodes of request r read, whose keys and values are in the pool then.

    begin: the first position of its prefix that is read. Returns queries [T * group, D], node by
    node; the KV slots of all keys, those of the E nodes ``own`` last, filled up to whole vectors;
    and as many weights for each query.
    """
    (q, k, v), (pool_k, pool_v), (slot_table, slots, prefix) = new, pool, sequences
    b, E = own.shape
    T, D = q.shape[0] // b, q.shape[2]
    group = q.shape[1] // k.shape[1]
    first, seen, before = r * T, prefix[r] - begin, kv_head * group
    table = np.empty(-(-(seen + E) // LANES) * LANES, np.int64)
    queries = np.empty((T * group, D), np.float32)
    for j in range(seen):
        table[j] = slot_table[slots[r], begin + j]
    for i in range(E):
        table[seen + i] = own[r, i]
    for j in range(seen + E, len(table)):
        table[j] = own[r, 0]
    for i in range(T):
        copy_row(k[first + i, kv_head], pool_k[own[r, E - T + i], kv_head])
        copy_row(v[first + i, kv_head], pool_v[own[r, E - T + i], kv_head])
        for h in range(group):
            copy_row(q[first + i, before + h], queries[i * group + h])
    return queries, table, np.zeros((T * group, len(table)), np.float32)


@kernel
def _read(r, kv_head, weights, pool_v, table, keys, out):
    """out, of the queries that ``_gathered`` returns: what their weights read of the first keys."""
    group = out.shape[1] // pool_v.shape[1]
    T = len(weights) // group
    result = np.empty((T * group, out.shape[2]), np.float32)
    _values(weights, pool_v, kv_head, table, keys, result)
    for i in range(T):
        for h in range(group):
            copy_row(result[i * group + h], out[r * T + i, kv_head * group + h])


@kernel
def _tree_head(r, kv_head, new, pool, sequences, own, parents, scale, out):
    """All nodes of request r, in the query heads that share a key head."""
    E, seen, group = own.shape[1], sequences[2][r], new[0].shape[1] // new[1].shape[1]
    queries, table, weights = _gathered(r, kv_head, new, pool, sequences, own, 0)
    T = len(queries) // group
    _scores(queries, pool[0], kv_head, table, scale, weights)

    hidden, path = np.empty(len(table), np.bool_), np.empty(E, np.int64)
    for i in range(T):
        _off_path(hidden, seen, parents[r], E - T + i)
        length = 0
        for e in range(E):
            if not hidden[seen + e]:
                path[length] = seen + e
                length += 1
        for h in range(group):
            _softmax_of_seen(weights[i * group + h], hidden, seen, path[:length])
    _read(r, kv_head, weights, pool[1], table, seen + E, out)


@threaded
def paged_tree_attention(new, pool, sequences, own, parents, scale, out):
    """Write the new nodes' keys and values to the pool; they attend to prefix and ancestors.

    b trees (or forests) of E nodes. The last T nodes are new; the others are already in the pool.

    Args:
        new: q [b*T, heads, D]; k, v [b*T, kv_heads, D]. out: as q.
        pool: keys and values, [KV slots, kv_heads, D].
        sequences: slot_table [R, positions], the KV slots of each request slot; slots [b], request
            slots; prefix [b], how many positions of the table a tree's nodes see.
        own: [b, E], the nodes' KV slots; parents: [b, E], a root is its own parent.
        scale: float32.
    """
    kv_heads = new[1].shape[1]
    for task in prange(own.shape[0] * kv_heads):
        r, kv_head = task // kv_heads, task % kv_heads
        _tree_head(r, kv_head, new, pool, sequences, own, parents, scale, out)


@kernel
def _off_path(hidden, seen, parents, node):
    """Whether a key is hidden from the node: [keys], the prefix's first. What is behind the nodes'
    keys is hidden as well."""
    hidden[:seen] = False
    hidden[seen:] = True
    hidden[seen + node] = False
    while parents[node] != node:
        node = parents[node]
        hidden[seen + node] = False


@strictly
def _softmax_of_seen(scores, hidden, seen, path):
    """In place: scores become weights; hidden ones get zero. Their number is a multiple of LANES:
    vectors of exponentials have no remainder. path: places of the nodes' keys, root first.

    The sum is that of LANES sums over every LANES-th *position*, so it has the same bits whether a
    token is still a node of the tree or already in the prefix, whatever other nodes there are.
    """
    for j in range(len(scores)):
        scores[j] = -INFINITY if hidden[j] else scores[j]
    largest, total = sums.largest_of(scores, len(scores)), ZERO
    for j in range(len(scores)):
        scores[j] = ZERO if hidden[j] else exp(scores[j] - largest)
    by_lane = np.empty(LANES, np.float32)
    sums.add_up_lanes(by_lane, scores, seen)
    for j in range(seen // LANES * LANES, seen):
        by_lane[j % LANES] += scores[j]
    for i in range(len(path)):
        by_lane[(seen + i) % LANES] += scores[path[i]]
    for lane in range(LANES):
        total += by_lane[lane]
    inverse = ONE / total
    for j in range(len(scores)):
        scores[j] *= inverse


@kernel
def _block_head(r, kv_head, new, pool, sequences, own, window, causal, sinks, scale, out):
    """All rows of request r, in the query heads that share a key head."""
    T, prefix, group = own.shape[1], sequences[2][r], new[0].shape[1] // new[1].shape[1]
    # the first position that any row sees
    begin = max(0, prefix - window + 1) if window else 0
    seen = prefix - begin
    queries, table, weights = _gathered(r, kv_head, new, pool, sequences, own, begin)
    _scores(queries, pool[0], kv_head, table, scale, weights)
    for i in range(T):
        # keys [low, high) of the table
        low = max(0, seen + i - window + 1) if window else 0
        high = seen + i + 1 if causal else seen + T
        if window:
            high = min(high, seen + i + window)
        for h in range(group):
            head = kv_head * group + h
            sink = sinks[head] if len(sinks) else -INFINITY
            _softmax_between(weights[i * group + h], low, high, sink)
    _read(r, kv_head, weights, pool[1], table, seen + T, out)


@threaded
def paged_block_attention(new, pool, sequences, own, window, causal, sinks, scale, out):
    """Write the rows' keys and values to the pool; they attend to prefix and block.

    b blocks of T rows, row i at position prefix + i.

    Args:
        As for ``paged_tree_attention``; own: [b, T], the rows' KV slots.
        window: a row sees positions less than this far from its own; 0: all. causal: it sees no
            later row. sinks: [heads], logits of keys without values; [0]: there are none.
    """
    kv_heads = new[1].shape[1]
    for task in prange(own.shape[0] * kv_heads):
        r, kv_head = task // kv_heads, task % kv_heads
        _block_head(r, kv_head, new, pool, sequences, own, window, causal, sinks, scale, out)


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
