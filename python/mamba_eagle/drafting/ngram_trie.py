"""A trie of n-grams in two arrays, and the draft trees that it predicts (ngram_trie_naive.py among
the tests has them by definition).

A node is one n-gram: an entry of ``nodes`` [capacity + 1, 8] int32, whose entry 0 means "none".
``buckets`` [power of two] int32 finds a node by its parent and token; ``state`` [2] int64 holds how
many entries were ever used and the position of the clock's hand. A node's children are listed with
the most recently seen first.

When all entries are taken, the clock algorithm (second chance) picks one to be reused: the hand
moves round the entries, skips those with children, and gives another round to those that were seen
again since it last passed. A root in use (PINNED) is skipped until it is released.
"""

from math import log

import numpy as np

from mamba_eagle.machine_code import kernel

ESCAPE = 3
MAX_CHILDREN = 32  # continuations considered per context, the most recent first
MAX_TOKENS = 64  # candidates per node
ENOUGH = 0.1  # once this little mass is left, shorter contexts change hardly anything
MAX_COUNTED = 2048  # new tokens of texts that are counted per step: 7 us each, for 12 n-grams
MIN_COUNTED = 64  # of one text, at least
UNKNOWN = -20.0  # log-probability of a token that merely fills up the tree

FIELDS = 8
TOKEN, PARENT, COUNT, CHILD, NEXT, PREVIOUS, SAME_BUCKET, USED = range(FIELDS)
AGAIN, PINNED = 1, 2  # values of USED


@kernel
def _bucket(buckets, parent, token):
    mixed = parent * 0x9E3779B1 + token * 0x85EBCA77
    return ((mixed >> 15) ^ mixed) & (buckets.shape[0] - 1)


@kernel
def find(nodes, buckets, parent, token):
    """The child of ``parent`` for ``token``, or 0 if there is none."""
    at = buckets[_bucket(buckets, int(parent), int(token))]
    while at and (nodes[at, PARENT] != parent or nodes[at, TOKEN] != token):
        at = nodes[at, SAME_BUCKET]
    return at


@kernel
def _unlist(nodes, at):
    """Remove ``at`` from its parent's list of children."""
    before, after = nodes[at, PREVIOUS], nodes[at, NEXT]
    if before:
        nodes[before, NEXT] = after
    else:
        nodes[nodes[at, PARENT], CHILD] = after
    if after:
        nodes[after, PREVIOUS] = before


@kernel
def _list_first(nodes, at):
    parent = nodes[at, PARENT]
    first = nodes[parent, CHILD]
    nodes[at, PREVIOUS], nodes[at, NEXT] = 0, first
    if first:
        nodes[first, PREVIOUS] = at
    nodes[parent, CHILD] = at


@kernel
def _forget(nodes, buckets, at):
    """Remove a node without children from the trie."""
    if nodes[at, PARENT] == 0:  # a root
        return
    _unlist(nodes, at)
    bucket = _bucket(buckets, int(nodes[at, PARENT]), int(nodes[at, TOKEN]))
    if buckets[bucket] == at:
        buckets[bucket] = nodes[at, SAME_BUCKET]
        return
    before = buckets[bucket]
    while nodes[before, SAME_BUCKET] != at:
        before = nodes[before, SAME_BUCKET]
    nodes[before, SAME_BUCKET] = nodes[at, SAME_BUCKET]


@kernel
def _free_entry(nodes, buckets, state, keep):
    """An entry for a new node; never ``keep``, which will be its parent."""
    last = nodes.shape[0] - 1
    if state[0] < last:
        state[0] += 1
        return state[0]
    while True:
        state[1] = state[1] % last + 1
        at = state[1]
        if nodes[at, CHILD] or nodes[at, USED] == PINNED or at == keep:
            continue
        if nodes[at, USED] == AGAIN:
            nodes[at, USED] = 0
            continue
        _forget(nodes, buckets, at)
        return at


@kernel
def new_root(nodes, buckets, state):
    at = _free_entry(nodes, buckets, state, 0)
    nodes[at] = 0
    nodes[at, TOKEN], nodes[at, USED] = -1, PINNED
    return at


@kernel
def _find_or_make(nodes, buckets, state, parent, token):
    at = find(nodes, buckets, parent, token)
    if at:
        nodes[at, USED] = AGAIN
        return at
    at = _free_entry(nodes, buckets, state, parent)
    nodes[at] = 0
    nodes[at, TOKEN], nodes[at, PARENT] = token, parent
    bucket = _bucket(buckets, int(parent), int(token))
    nodes[at, SAME_BUCKET], buckets[bucket] = buckets[bucket], at
    _list_first(nodes, at)
    return at


@kernel
def count(nodes, buckets, state, root, text, first, end, depth):
    """Count, below ``root``, all n-grams of up to ``depth`` tokens that end in text[first:end].

    text [≥ end]. There is one walk down for each start of an n-gram. Nodes on it that end before
    ``first`` were counted earlier; if they were forgotten since, they are made again.
    """
    for start in range(max(0, first - depth + 1), end):
        at = root
        for i in range(start, min(start + depth, end)):
            at = _find_or_make(nodes, buckets, state, at, text[i])
            if i >= first:
                nodes[at, COUNT] += 1
                if nodes[at, PREVIOUS]:
                    _unlist(nodes, at)
                    _list_first(nodes, at)


@kernel
def _predict(nodes, contexts, topk, tokens, mass):
    """Candidates to follow ``contexts`` [orders, 2]: the nodes of the last 0, 1, … tokens in the
    request's own text and in the finished ones. Out: tokens, mass [MAX_TOKENS]. Returns how many.
    """
    found, left = 0, 1.0
    for order in range(contexts.shape[0] - 1, -1, -1):
        for source in range(contexts.shape[1]):
            if left < ENOUGH and found >= topk:
                return found
            at, kinds, total = contexts[order, source], 0, 0
            child, looked = nodes[at, CHILD], 0
            while child and looked < MAX_CHILDREN:
                kinds += nodes[child, COUNT] > 0
                total += nodes[child, COUNT]
                child, looked = nodes[child, NEXT], looked + 1
            if total == 0:
                continue
            scale = left / (total + ESCAPE * kinds)
            child, looked = nodes[at, CHILD], 0
            while child and looked < MAX_CHILDREN:
                if nodes[child, COUNT] > 0:
                    i = 0
                    while i < found and tokens[i] != nodes[child, TOKEN]:
                        i += 1
                    if i == found and found < tokens.shape[0]:
                        tokens[found], mass[found] = nodes[child, TOKEN], 0.0
                        found += 1
                    if i < found:
                        mass[i] += scale * nodes[child, COUNT]
                child, looked = nodes[child, NEXT], looked + 1
            left = scale * ESCAPE * kinds
    return found


@kernel
def _match(nodes, buckets, root, text, end, contexts, source):
    """contexts[n, source]: the node of the last n tokens of text[:end] below ``root``, or 0."""
    for n in range(contexts.shape[0]):
        at = root if n <= end else 0
        for i in range(max(end - n, 0), end):
            at = find(nodes, buckets, at, text[i]) if at else 0
        contexts[n, source] = at


@kernel
def _fill(picked, scores, children, filled, topk, max_depth):
    """Fill up the tree with arbitrary nodes: below the first node that has room, the lowest token
    that it does not have yet. picked [T, 3]: token, parent, depth."""
    at = 0
    while filled < picked.shape[0]:
        while picked[at, 2] >= max_depth or children[at] >= topk:
            at += 1
        token, child = 0, 1
        while child < filled:
            if picked[child, 1] == at and picked[child, 0] == token:
                token, child = token + 1, 1
            else:
                child += 1
        picked[filled, 0], picked[filled, 1], picked[filled, 2] = token, at, picked[at, 2] + 1
        scores[filled] = scores[at] + UNKNOWN
        children[at] += 1
        filled += 1


@kernel
def _grow(nodes, buckets, contexts, topk, max_depth, picked, scores, children):
    """Pick the most probable nodes, best first. contexts [T, orders, 2], by node; the root's are
    given. picked [T, 3]: token, parent, depth; the root's are given. Returns how many."""
    T, orders = contexts.shape[0], contexts.shape[1]
    tokens, mass = np.empty(MAX_TOKENS, np.int64), np.empty(MAX_TOKENS, np.float64)
    waiting = np.empty((T * topk, 2), np.int64)  # token and parent; parent -1: picked
    waiting_scores = np.empty(T * topk, np.float64)
    filled, num_waiting = 1, 0
    while filled < T:
        last = filled - 1
        if picked[last, 2] < max_depth:
            found = _predict(nodes, contexts[last], topk, tokens, mass)
            for _ in range(min(topk, found)):
                best = 0
                for i in range(1, found):
                    if mass[i] > mass[best]:
                        best = i
                waiting[num_waiting, 0], waiting[num_waiting, 1] = tokens[best], last
                waiting_scores[num_waiting] = scores[last] + min(log(mass[best]), 0.0)
                mass[best] = 0.0
                num_waiting += 1
        best = -1
        for i in range(num_waiting):
            if waiting[i, 1] >= 0 and (best < 0 or waiting_scores[i] > waiting_scores[best]):
                best = i
        if best < 0:
            break
        token, parent = waiting[best, 0], waiting[best, 1]
        waiting[best, 1] = -1
        picked[filled, 0], picked[filled, 1] = token, parent
        picked[filled, 2] = picked[parent, 2] + 1
        scores[filled] = waiting_scores[best]
        children[parent] += 1
        for source in range(2):
            contexts[filled, 0, source] = contexts[0, 0, source]
            for n in range(1, orders):
                above = contexts[parent, n - 1, source]
                contexts[filled, n, source] = find(nodes, buckets, above, token) if above else 0
        filled += 1
    return filled


@kernel
def draft(trie, finished, roots, texts, lengths, counted, slots, depth, topk, max_depth, tree):
    """A tree for each request of ``slots`` [b] int64.

    trie: nodes, buckets, state. finished: the root of the n-grams of finished requests; roots,
    lengths, counted [R] int64, texts [R, positions] int32. The part of each text that was not
    counted yet is counted first, or of long ones as much as may be in a step.
    Out: tree, the fields of a Tree, [b, T] and ancestors [b, T, T].
    """
    nodes, buckets, state = trie
    out_tokens, out_parents, out_depths, out_ancestors, out_scores = tree
    b, T = out_tokens.shape
    contexts = np.empty((T, depth, 2), np.int64)
    picked, place = np.empty((T, 3), np.int64), np.empty(T, np.int64)
    scores, children = np.empty(T, np.float64), np.empty(T, np.int64)
    behind = 0
    for r in range(b):
        behind += lengths[slots[r]] - counted[slots[r]] > MIN_COUNTED
    most = max(MAX_COUNTED // max(behind, 1), MIN_COUNTED)
    for r in range(b):
        slot = slots[r]
        text, end = texts[slot], lengths[slot]
        until = min(end, counted[slot] + most)
        count(nodes, buckets, state, roots[slot], text, counted[slot], until, depth)
        counted[slot] = until
        _match(nodes, buckets, roots[slot], text, end, contexts[0], 0)
        _match(nodes, buckets, finished, text, end, contexts[0], 1)
        picked[0, 0], picked[0, 1], picked[0, 2] = text[end - 1], 0, 0
        scores[0] = 0.0
        children[:] = 0
        filled = _grow(nodes, buckets, contexts, topk, max_depth, picked, scores, children)
        _fill(picked, scores, children, filled, topk, max_depth)
        node, level = 0, 0
        while node < T:
            for i in range(T):
                if picked[i, 2] == level:
                    place[i] = node
                    above = place[picked[i, 1]]
                    out_tokens[r, node], out_parents[r, node] = picked[i, 0], above
                    out_depths[r, node], out_scores[r, node] = level, scores[i]
                    for j in range(T):
                        out_ancestors[r, node, j] = node > 0 and out_ancestors[r, above, j]
                    out_ancestors[r, node, node] = True
                    node += 1
            level += 1
