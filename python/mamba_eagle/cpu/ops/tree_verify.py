"""torch.py's tree verification as one pass per layer on a CPU: float32.

One call does all of a Mamba2 layer except its matrix products: convolution along each node's path,
SiLU, step size, decay, and the recurrence. Rows and states are read in place, S0 once. What the
nodes feed into the recurrence is written straight into their rows, which count as free until the
nodes are accepted.

The state itself is stepped, token by token (states.py): through the journal, then through the
nodes, each from its parent's state, and a fold writes what it is on the way. So a token's output
and the state after it have the same bits however the tokens before it were drafted, accepted and
folded, where the dual form of torch.py adds up in an order that depends on all three.

Threads share out requests, then pairs of a request and a head. The order of operations depends on
nothing but the request: its outputs do not depend on the batch, or on the number of threads.
Where threads do, ``prange`` counts without a sign; np.int64 spares Numba a second form of all that
is called, as it does where it is given a number that stands in the code.

A delta rule (layers/delta_rule.py) has the same pass: its rows are keys of length 1 in place of B
and u in place of dt x, which is found on the way, and two gates per head, g and beta.

b of R request slots, T tree nodes, W rows per request, H heads of P channels, G groups, N state
size, K convolution width, C = H*P + 2*G*N convolution channels, E gates: H, or 2 H.
"""

from typing import NamedTuple

import numpy as np

from mamba_eagle.cpu import abi
from mamba_eagle.cpu.abi import reader
from mamba_eagle.cpu.ops.causal_conv import convolve_row
from mamba_eagle.cpu.ops.delta_gates import arrange, delta_gates
from mamba_eagle.cpu.threads import threaded
from mamba_eagle.cpu.vector_math import ONE, copy_row, softplus
from mamba_eagle.cpu.vectors import states
from mamba_eagle.cpu.vectors.deltas import block_room_for, step_deltas
from mamba_eagle.machine_code import CHECKED, check_within, kernel, prange

states_at, WORDS = reader(abi.States), len(abi.States._fields_)
VECTOR = 16  # numbers; sizes of states are multiples of it, or else `step_odd_states` takes them
LINE = 64  # bytes of a cache line: a vector that crosses one takes twice as long
# Rows of a journal from which on a step writes the state on its way. Writing takes as long as some
# rows do where states come from the memory.
FOLDED_FROM = 4


class LayerWeights(NamedTuple):
    """The weights that a layer's pass reads."""

    conv: np.ndarray  # [K + 1, C]: the taps, the token itself last, then the bias
    heads: np.ndarray  # [3, H]: A, bias of the step size, D
    # the step size is clamped to low … high; of a delta rule 0, and what beta is a sigmoid times
    low: np.float32
    high: np.float32


class Buffers(NamedTuple):
    """What the deferred scheme keeps of one layer."""

    conv_in: np.ndarray  # [R, K-1 + W, C] raw convolution inputs: history, then rows
    xB: np.ndarray  # [R, W, H*P + G*N] after convolution and SiLU
    dt: np.ndarray  # [R, W, E]: after softplus; or g, then beta
    decay: np.ndarray  # [R, W, H]: exp(dt A); or exp(g)
    state: np.ndarray  # [state slots, H, P, N]: S0


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
    places[0] = (history + rows[node]) * C
    for k in range(1, K):
        if node > 0:
            node = parents[node]
            places[k] = (history + rows[node]) * C
        else:
            places[k] = tail[before] * C
            before -= 1
    convolve_row(out, conv, inputs, places)


class Seen(NamedTuple):
    """What the heads of a layer share. M: rows of the longest journal there may be."""

    C: np.ndarray  # [b, T, G, N]
    rows: np.ndarray  # [b, M + T]: the journal's, then the nodes'
    order: np.ndarray  # [b, T]: of ``depth_first``, as
    kept: np.ndarray  # [b, T]


@kernel
def _enter(r, xbc, dt_raw, nodes, weights, buffers, seen):
    """The nodes of request r: their rows, and what all heads share."""
    conv_in, xB, dt, decay, state = buffers
    conv, heads, low, high = weights
    A, dt_bias = heads[0], heads[1]
    T = nodes.rows.shape[1]
    history, H, N = conv.shape[0] - 2, state.shape[1], state.shape[3]
    width, G = xB.shape[2], seen.C.shape[2]
    slot, first, length = nodes.slots[r], r * T, nodes.journal_len[r]
    inputs, slot_rows, above = conv_in[slot], nodes.rows[r], nodes.parents[r]
    convolved, rows = np.empty(xbc.shape[1], np.float32), seen.rows[r]
    is_delta = dt.shape[2] > H
    states.depth_first(above, seen.order[r], seen.kept[r])
    for k in range(length):
        rows[k] = nodes.journal[r, k]
    for i in range(T):
        row = slot_rows[i]
        rows[length + i] = row
        copy_row(xbc[first + i], inputs[history + row])
        _convolve(convolved, conv, inputs, slot_rows, above, nodes.tail[r], i)
        own, C = xB[slot, row], seen.C[r, i]
        if is_delta:
            arrange(convolved, N, own, C.reshape(G * N))
            delta_gates(dt_raw[first + i], heads, high, dt[slot, row], decay[slot, row])
            continue
        copy_row(convolved, own)
        for g in range(G):
            for n in range(N):
                C[g, n] = convolved[width + g * N + n]
        for h in range(H):
            step = min(max(softplus(dt_raw[first + i, h] + dt_bias[h]), low), high)
            dt[slot, row, h] = step
            decay[slot, row, h] = states.decay_of(step, A[h])


class Rows(NamedTuple):
    """Where a pass over a state reads its inputs: of a request slot, or of a replay."""

    xB: np.ndarray  # [W, H*P + G*N or more]
    dt: np.ndarray  # [W, E]
    decay: np.ndarray  # [W, H]


class Nodes(NamedTuple):
    """What a pass computes for the nodes of a request."""

    parents: np.ndarray  # [T]
    order: np.ndarray  # [T], as in Seen
    kept: np.ndarray  # [T]
    C: np.ndarray  # [T, G*N]
    skip: np.ndarray  # [H]: D
    y: np.ndarray  # [T, H*P]


@kernel
def _room(rows, nodes, P, block):
    """What passes over ``rows`` rows and ``nodes`` nodes of heads of P channels write to on their
    way, one after the other: ``abi.States``, then float32 numbers. block: N of a delta rule, or 0.
    """
    count = rows + nodes
    numbers = count * (2 + P) + LINE // 4
    numbers += states.room_for(nodes) if block == 0 else block_room_for(nodes, block)
    return np.empty(WORDS + numbers // 2 + 1, np.int64)


@kernel
def _pass(S, h, inputs, ids, journal, writes, nodes, room):
    """A head's state S [P, N] over ``journal`` rows, and the outputs of the nodes behind them. ids:
    the rows of both. writes: when the state is written, as in vectors/states.py.

    Of a delta rule, the nodes' rows have values in place of u until then."""
    (P, N), (xB, dt, decay), T = S.shape, inputs, nodes.parents.shape[0]
    numbers = room[WORDS:].view(np.float32)
    H, count, of_x = decay.shape[1], journal + T, h * P
    is_delta, of_C = dt.shape[1] > H, h // (H * N // nodes.C.shape[1]) * N
    of_B = H * P + of_C
    if CHECKED:
        check_within(ids[:count], xB.shape[0])
        check_within(nodes.parents, T)
        check_within(nodes.order, T)
    read, added = numbers[count : 2 * count if is_delta else count], numbers[2 * count :]
    for k in range(count):
        row, share = ids[k], ONE
        if not is_delta:
            share = dt[row, h]
        elif k >= journal:
            share = dt[row, H + h]
        numbers[k] = decay[row, h]
        if is_delta:
            read[k] = -share * decay[row, h]
        for p in range(P):
            added[k * P + p] = share * xB[row, of_x + p]
    if P % VECTOR != 0 or N % VECTOR != 0:
        states.step_odd_states(
            S, numbers, added, read, xB, of_x, of_B, ids, journal, writes, nodes.parents,
            nodes.C[:, of_C : of_C + N], nodes.skip[h], nodes.y[:, of_x : of_x + P],
        )  # fmt: skip
    else:
        own = states_at(room.ctypes.data)
        own.state, own.N, own.P, own.J, own.T = S.ctypes.data, N, P, journal, T
        own.decay, own.added, own.read = numbers.ctypes.data, added.ctypes.data, read.ctypes.data
        own.rows, own.row, own.of_x, own.of_B = xB.ctypes.data, xB.shape[1], of_x, of_B
        own.ids, own.writes, own.parents = ids.ctypes.data, writes, nodes.parents.ctypes.data
        own.order, own.kept = nodes.order.ctypes.data, nodes.kept.ctypes.data
        own.skip = nodes.skip.ctypes.data + 4 * h
        own.C, own.C_row = nodes.C.ctypes.data + 4 * of_C, nodes.C.strides[0] // 4
        own.out, own.out_row = nodes.y.ctypes.data + 4 * of_x, nodes.y.shape[1]
        own.sums = -(-(own.added + 4 * count * P) // LINE) * LINE
        own.tiles = own.sums + 4 * VECTOR * (N if is_delta else T * VECTOR)
        if is_delta:
            step_deltas(room.ctypes.data, P)
        else:
            states.step_states(room.ctypes.data, P, N)
    if is_delta:
        for k in range(journal, count):
            for p in range(P):
                xB[ids[k], of_x + p] = added[k * P + p]


@kernel
def _block_of(N, gates, H):
    """As ``_room`` takes it."""
    return N if gates > H else 0


@kernel
def _head(r, h, nodes, skip, buffers, seen, y, room):
    """The outputs of one head for the nodes of request r, once ``_enter`` has seen them."""
    slot, T = nodes.slots[r], nodes.rows.shape[1]
    inputs = Rows(buffers.xB[slot], buffers.dt[slot], buffers.decay[slot])
    C = seen.C[r].reshape(T, seen.C.shape[2] * seen.C.shape[3])
    own = Nodes(nodes.parents[r], seen.order[r], seen.kept[r], C, skip, y[r * T : (r + 1) * T])
    S, journal = buffers.state[nodes.state_slots[r], h], nodes.journal_len[r]
    _pass(S, h, inputs, seen.rows[r], journal, states.BEFORE if nodes.fold[r] else 0, own, room)


@threaded
def deferred_verify(xbc, dt_raw, nodes, weights, buffers, y):
    """All nodes of b trees in one layer: convolution, torch.py's tree_verify, and D x; and the
    state after the journal, where ``nodes.fold`` asks for it.

    Args:
        xbc: [b*T, C], before the convolution; dt_raw: [b*T, E]; nodes: TreeLayout of arrays;
            weights: LayerWeights; buffers: Buffers, in which the nodes' rows are written.
        Out: y [b*T, H*P].
    """
    b, T = nodes.rows.shape
    H, P, N = buffers.state.shape[1:]
    G = (buffers.xB.shape[2] - H * P) // N
    seen = Seen(
        np.empty((b, T, G, N), np.float32),
        np.empty((b, nodes.journal.shape[1] + T), np.int64),
        np.empty((b, T), np.int64),
        np.empty((b, T), np.int64),
    )
    skip = weights.heads[2]
    for r in prange(b):
        _enter(np.int64(r), xbc, dt_raw, nodes, weights, buffers, seen)
    for task in prange(b * H):
        r, h = np.int64(task) // H, np.int64(task) % H
        room = _room(nodes.journal_len[r], T, P, _block_of(N, buffers.dt.shape[2], H))
        _head(r, h, nodes, skip, buffers, seen, y, room)


@kernel
def _no_nodes(H, P, G, N):
    none = np.empty(0, np.int64)
    C, y = np.empty((0, G * N), np.float32), np.empty((0, H * P), np.float32)
    return Nodes(none, none, none, C, np.zeros(H, np.float32), y)


@kernel
def _fold_head(slot, rows, S, h, buffers):
    """One head of a request: its state S [P, N] becomes that after ``rows`` of its journal."""
    H, P, N = buffers.state.shape[1:]
    inputs = Rows(buffers.xB[slot], buffers.dt[slot], buffers.decay[slot])
    none = _no_nodes(H, P, (buffers.xB.shape[2] - H * P) // N, N)
    room = _room(len(rows), 0, P, _block_of(N, buffers.dt.shape[2], H))
    _pass(S, h, inputs, rows, len(rows), states.BEFORE, none, room)


@threaded
def fold(slots, lengths, path, state_slots, history, buffers):
    """torch.py's fold of one layer, in place: S0 becomes the state after ``lengths[f]`` rows.

    slots, lengths, state_slots [f]; path [R, …].
    """
    H = buffers.state.shape[1]
    for task in prange(slots.shape[0] * H):
        f, h = np.int64(task) // H, np.int64(task) % H
        length = lengths[f]
        if length > 0:
            rows = path[slots[f], history : history + length] - history
            _fold_head(slots[f], rows, buffers.state[state_slots[f], h], h, buffers)


@kernel
def _enter_again(k, raw, parents, tail, steps, weights, inputs, N):
    """Row k of a replay; raw [K-1 + count, C], parents [count], tail [K-1], steps [E]."""
    xB, dt, decay = inputs
    convolved, rates = np.empty(raw.shape[1], np.float32), weights.heads[0]
    _convolve(convolved, weights.conv, raw, np.arange(len(parents)), parents, tail, k)
    own, H = xB[k], decay.shape[1]
    if len(steps) > H:
        for h in range(2 * H):
            dt[k, h] = steps[h]
        for h in range(H):
            decay[k, h] = states.decay_of(steps[h], ONE)
        arrange(convolved, N, own, np.empty((len(convolved) - own.shape[0]), np.float32))
        return
    copy_row(convolved, own)
    for h in range(H):
        dt[k, h], decay[k, h] = steps[h], states.decay_of(steps[h], rates[h])


@kernel
def _replay_head(S, h, inputs, rows, y, G):
    """u of a delta rule is not kept with saved journals, so there its rows are nodes, whose outputs
    y [count, H*P] are not read."""
    (P, N), H, count = S.shape, inputs.decay.shape[1], len(rows)
    if len(y) == 0:
        _pass(
            S, h, inputs, rows, count, states.BEFORE, _no_nodes(H, P, G, N), _room(count, 0, P, 0)
        )
        return
    above, kept = np.maximum(rows - 1, 0), np.zeros(count, np.int64)
    C, skip = np.zeros((count, G * N), np.float32), np.zeros(H, np.float32)
    chain = Nodes(above, rows, kept, C, skip, y)
    _pass(S, h, inputs, rows, np.int64(0), states.AFTER, chain, _room(0, count, P, N))


@threaded
def replay(first, count, weights, conv_in, dt, history, state):
    """The state after ``count`` rows of a journal slot, of which the first is row ``first``, and
    its history, in one layer and in place.

    weights: LayerWeights; conv_in [S, C], dt [S, E]: a journal slot; history [K-1, C]; state
    [H, P, N].
    """
    (size, C), (H, P, N), before = conv_in.shape, state.shape, history.shape[0]
    raw, parents = np.empty((before + count, C), np.float32), np.arange(count) - 1
    rows, tail = np.arange(count), np.arange(before)
    for k in range(before + count):
        copy_row(history[k] if k < before else conv_in[(first + k - before) % size], raw[k])
    G = (C - H * P) // (2 * N)
    inputs = Rows(
        np.empty((count, H * P + G * N), np.float32),
        np.empty((count, dt.shape[1]), np.float32),
        np.empty((count, H), np.float32),
    )
    for k in prange(count):
        row = np.int64(k)
        _enter_again(row, raw, parents, tail, dt[(first + row) % size], weights, inputs, N)
    y = np.empty((count if dt.shape[1] > H else 0, H * P), np.float32)
    for h in prange(H):
        _replay_head(state[h], np.int64(h), inputs, rows, y, G)
    for k in range(before):
        copy_row(raw[count + k], history[k])


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
                    copy_row(inputs[place], inputs[k])


@kernel
def empty_journals(slots, lengths, state_slot, path, journal_len, history, conv_in, feature, kept):
    """After journals of ``lengths`` [f] rows were folded, or before a step that folds them: their
    features and convolution inputs are the state's. 0: a journal stays.

    slots [f]; by request slot: state_slot [R], path [R, places], journal_len [R]; conv_in [layers,
    R, K-1 + W, C]; feature [R, W, F]; kept [state slots, F].
    """
    for f in range(slots.shape[0]):
        length, slot = lengths[f], slots[f]
        if length > 0:
            row = path[slot, history + length - 1] - history
            copy_row(feature[slot, row], kept[state_slot[slot]])
            move_history(slots[f : f + 1], lengths[f : f + 1], path, history, conv_in)
            journal_len[slot] = 0


@kernel
def fold_in_step(nodes, state_slot, path, journal_len, history, conv_in, feature, kept):
    """Which journals a step folds on its way: their states are read and stepped anyway, so that
    saves all later steps these rows. nodes: TreeLayout; others as for ``empty_journals``."""
    lengths = np.empty(nodes.slots.shape[0], np.int64)
    for r in range(lengths.shape[0]):
        length = nodes.journal_len[r]
        nodes.fold[r] = length >= FOLDED_FROM
        lengths[r] = length if nodes.fold[r] else 0
        if nodes.fold[r]:
            for k in range(history):
                nodes.tail[r, k] = k
    empty_journals(
        nodes.slots, lengths, state_slot, path, journal_len, history, conv_in, feature, kept
    )


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
            copy_row(hidden[r * rows.shape[1] + node], feature[slot, row])
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
            copy_row(features[r, nodes[r, k]], feature[journal, row])
            for layer in range(conv_in.shape[0]):
                copy_row(own_conv_in[layer, slot, place], conv_in[layer, journal, row])
                copy_row(own_dt[layer, slot, place - history], dt[layer, journal, row])
