"""Accepting on a CPU: tree/accept.py and ``Backend.commit_tokens`` as one loop each. In torch it is
forty small operations on a handful of integers, which cost more than a layer."""

from mamba_eagle.machine_code import kernel


@kernel
def accept_and_truncate(
    tree_tokens, parents, target, stop_tokens, remaining, slots, nodes, tokens, count, finished
):
    """Walk down each tree and cut the walk where the request ends.

    tree_tokens, parents [b, T]; target [b, T], negative where no token could be sampled; slots [b];
    by request slot: stop_tokens [R, S], remaining [R]. Out: nodes, tokens [b, D]; count, finished
    [b].
    """
    b, T = parents.shape
    for r in range(b):
        slot, left = slots[r], max(remaining[slots[r]], 0)
        node, kept, cut = 0, 0, False
        last = False  # the walk has ended
        for step in range(nodes.shape[1]):
            token = target[r, node]
            nodes[r, step], tokens[r, step] = node, max(token, 0)
            last = last or token < 0
            if last or cut:
                continue
            if kept < left:
                kept += 1
                for stop in stop_tokens[slot]:
                    cut = cut or token == stop
            last = True
            for child in range(node + 1, T):
                if parents[r, child] == node and tree_tokens[r, child] == token:
                    node, last = child, False
                    break
        count[r] = kept
        finished[r] = cut or kept >= remaining[slot]


@kernel
def commit(slots, own, nodes, tokens, count, finished, kv_slots, processed, last_token, remaining):
    """The accepted nodes become part of each request's sequence.

    slots, count, finished [b]; own [b, T], the nodes' KV slots; nodes, tokens [b, D]. Changed, by
    request slot: kv_slots [R, positions]; processed, last_token, remaining [R].
    """
    for r in range(slots.shape[0]):
        slot, kept = slots[r], count[r]
        for step in range(kept):
            kv_slots[slot, processed[slot] + step] = own[r, nodes[r, step]]
        processed[slot] += kept
        if kept > 0:
            last_token[slot] = tokens[r, kept - 1]
        remaining[slot] = 0 if finished[r] else remaining[slot] - kept


@kernel
def append_pending(slots, nodes, tokens, count, entries, waiting_tokens, waiting_entries, waiting):
    """Accepted nodes join the entries that wait for the drafter.

    slots, count [b]; nodes, tokens [b, D]; entries [b, T, F], of all nodes. Changed, by request
    slot: waiting_tokens [R, E], waiting_entries [R, E, F], waiting [R]; nothing where ``waiting``
    is negative.
    """
    for r in range(slots.shape[0]):
        slot = slots[r]
        first = waiting[slot]
        if first < 0:
            continue
        for step in range(count[r]):
            waiting_tokens[slot, first + step] = tokens[r, step]
            waiting_entries[slot, first + step] = entries[r, nodes[r, step]]
        waiting[slot] = first + count[r]
