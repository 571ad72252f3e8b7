"""Accepting on a GPU: tree/accept.py and ``Backend.commit_tokens``, one program per request."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mamba_eagle.kernels.gpu import next_power_of_2


@triton.jit
def _is_stop(token, stop_tokens, S, SP: tl.constexpr):
    """Whether a token is one of a request's, [S], which are padded with negative ones."""
    found = tl.zeros([], tl.int32)
    first = tl.zeros([], tl.int32)
    more = S > 0
    while more:
        stop = first + tl.arange(0, SP)
        stops = tl.load(stop_tokens + stop, mask=stop < S, other=-1)
        found += tl.sum((stops == token).to(tl.int32), 0)
        first += SP
        more = (first < S) & (tl.min(stops, 0) >= 0)
    return found > 0


# not specialized: other numbers of nodes or stop tokens should not need new machine code
@triton.jit(do_not_specialize=["T", "S"])
def _accept_kernel(
    tree_tokens,  # [b, T]
    parents,  # [b, T]
    target,  # [b, T]; negative: no token could be sampled
    stop_tokens,  # [R, S]
    remaining,  # [R]
    slots,  # [b]
    nodes,  # [b, D]
    tokens,  # [b, D]
    count,  # [b]
    finished,  # [b] uint8
    depths,  # [b, T], read if there is a length
    length,  # [] float64, nodes to accept on average, whatever the target's tokens are; or None
    number,  # [], of the step
    T,
    S,
    D: tl.constexpr,
    TP: tl.constexpr,  # nodes, padded
    SP: tl.constexpr,  # stop tokens looked at together
):
    request = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + request)
    left = tl.load(remaining + slot)
    index = tl.arange(0, TP)
    is_child = (index > 0) & (index < T)  # the root has no parent
    token_of = tl.load(tree_tokens + request * T + index, mask=is_child, other=-1)
    parent_of = tl.load(parents + request * T + index, mask=is_child, other=-1)
    if length is not None:  # tree/simulate.py: children are those above the first node of a depth
        mean, past = tl.load(length), tl.load(number).to(tl.float64)
        asked = (tl.floor((past + 1) * mean) - tl.floor(past * mean)).to(tl.int64) - 1
        depth = tl.load(depths + request * T + index, mask=index < T, other=D)
        deepest = tl.load(depths + request * T + T - 1)
        end = tl.minimum(tl.maximum(tl.minimum(asked, deepest), 0), D - 1)
        above = tl.sum((depth < end).to(tl.int64), 0)
        on_path = index == above
        for _ in tl.static_range(D):  # the root is its own parent
            above = tl.load(parents + request * T + above)
            on_path |= index == above
        is_child &= on_path
    node = tl.zeros([], tl.int32)
    kept = tl.zeros([], tl.int64)
    walking = left > 0
    stopped = tl.zeros([], tl.int1)
    for step in tl.static_range(D):
        token = tl.load(target + request * T + node)
        if length is not None:
            agreed = tl.max(tl.where(is_child & (parent_of == node), token_of, -1), 0)
            token = tl.where(agreed < 0, tl.maximum(token, 0), agreed)
        tl.store(nodes + request * D + step, node.to(tl.int64))
        tl.store(tokens + request * D + step, tl.maximum(token, 0))
        walking &= token >= 0
        kept += walking.to(tl.int64)
        stopped |= walking & _is_stop(token, stop_tokens + slot * S, S, SP)
        follows = is_child & (parent_of == node) & (token_of == token)
        child = tl.min(tl.where(follows, index, TP), 0)
        walking &= (child < TP) & (kept < left) & (stopped == 0)
        node = tl.where(child < TP, child, node)
    tl.store(count + request, kept)
    tl.store(finished + request, (stopped | (kept >= left)).to(tl.uint8))


def accept_and_truncate(
    tree_tokens: Tensor,
    parents: Tensor,
    target: Tensor,
    stop_tokens: Tensor,
    remaining: Tensor,
    slots: Tensor,
    nodes: Tensor,
    tokens: Tensor,
    count: Tensor,
    finished: Tensor,
    depths: Tensor | None = None,
    length: Tensor | None = None,
    number: Tensor | None = None,
) -> None:
    """Walk down each tree and cut the walk where the request ends. The last three are of a forced
    path (tree/simulate.py), for which torch's dozens of launches would be timed as a step's own.

    Args:
        tree_tokens, parents, target: [b, T]; stop_tokens: [R, S]; remaining: [R]; slots: [b];
            depths: [b, T]; length: [] float64; number: [].
        Out: nodes, tokens: [b, D]; count: [b]; finished: [b] bool. All others are int64.
    """
    b, T = parents.shape
    width = stop_tokens.shape[1]
    _accept_kernel[(b,)](
        *(tree_tokens.contiguous(), parents.contiguous(), target.contiguous(), stop_tokens),
        *(remaining, slots, nodes, tokens, count, finished.view(torch.uint8)),
        *(depths, length, number, T, width),
        D=nodes.shape[1],
        TP=next_power_of_2(T),
        SP=32,
        num_warps=1,
    )


@triton.jit(do_not_specialize=["T"])
def _commit_kernel(
    slots,  # [b]
    own,  # [b, T]
    nodes,  # [b, D]
    tokens,  # [b, D]
    count,  # [b]
    finished,  # [b] uint8
    kv_slots,  # [R, positions]
    processed,  # [R]
    last_token,  # [R]
    remaining,  # [R]
    T,
    positions,
    D: tl.constexpr,
    DP: tl.constexpr,  # D, padded
):
    request = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + request)
    kept = tl.load(count + request)
    first = tl.load(processed + slot)
    left = tl.load(remaining + slot)
    over = tl.load(finished + request) != 0
    step = tl.arange(0, DP)
    accepted = step < kept
    node = tl.load(nodes + request * D + step, mask=accepted, other=0)
    placed = tl.load(own + request * T + node, mask=accepted, other=0)
    tl.debug_barrier()  # read everything before writing anything
    tl.store(kv_slots + slot * positions + first + step, placed, mask=accepted)
    tl.store(processed + slot, first + kept)
    tl.store(remaining + slot, tl.where(over, 0, left - kept))
    if kept > 0:
        tl.store(last_token + slot, tl.load(tokens + request * D + kept - 1))


def commit(
    slots: Tensor,
    own: Tensor,
    nodes: Tensor,
    tokens: Tensor,
    count: Tensor,
    finished: Tensor,
    kv_slots: Tensor,
    processed: Tensor,
    last_token: Tensor,
    remaining: Tensor,
) -> None:
    """The accepted nodes become part of each request's sequence.

    Args:
        slots, count: [b]; finished: [b] bool; own: [b, T], the nodes' KV slots; nodes, tokens:
            [b, D].
        Changed, by request slot: kv_slots [R, positions]; processed, last_token, remaining [R].
    """
    b, D = nodes.shape
    _commit_kernel[(b,)](
        *(slots, own.contiguous(), nodes, tokens, count, finished.view(torch.uint8), kv_slots),
        *(processed, last_token, remaining),
        *(own.shape[1], kv_slots.shape[1]),
        D=D,
        DP=next_power_of_2(D),
        num_warps=1,
    )
