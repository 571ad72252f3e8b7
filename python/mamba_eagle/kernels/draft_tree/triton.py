"""Growing and pruning a draft tree on a GPU: tree/candidates.py, one launch per depth and
one to prune.

One program per request. Scores are ranked by distinct keys (top_log_probs/triton.py), which put the
lower candidate number first among equals. Nothing here waits for the device.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mamba_eagle.kernels.gpu import next_power_of_2
from mamba_eagle.kernels.top_log_probs.triton import NO_KEY, key_number, key_value, ranking_key


class Grown(NamedTuple):
    """All candidates by number; there is room for C of them."""

    tokens: Tensor  # [b, C] int64
    parents: Tensor  # [b, C] int64, numbers
    scores: Tensor  # [b, C] float32


class Lanes(NamedTuple):
    """The best of the newest candidates, to draft from next."""

    tokens: Tensor  # [b, k] int64
    lanes: Tensor  # [b, k] int64: the parent's, among the previous lanes
    numbers: Tensor  # [b, k] int64
    scores: Tensor  # [b, k] float32


@triton.jit(do_not_specialize=["C", "seen", "request_stride", "lane_stride"])
def _expand_kernel(
    log_probs,  # [b, LANES, K], rows of requests and lanes request_stride and lane_stride apart
    tokens,  # [b, LANES, K]
    roots,  # [b]
    lane_numbers,  # [b, LANES]; None: the only lane is the root
    lane_scores,  # [b, LANES]
    all_tokens,  # [b, C]
    all_parents,  # [b, C]
    all_scores,  # [b, C]
    next_tokens,  # [b, K]
    next_lanes,  # [b, K]
    next_numbers,  # [b, K]
    next_scores,  # [b, K]
    seen,
    C,
    request_stride,
    lane_stride,
    LANES: tl.constexpr,
    K: tl.constexpr,
    PADDED: tl.constexpr,  # LANES * K
):
    request = tl.program_id(0).to(tl.int64)
    child = tl.arange(0, PADDED)
    valid = child < LANES * K
    first = request * request_stride
    given = first + child // K * lane_stride + child % K
    token = tl.load(tokens + given, mask=valid, other=0)
    score = tl.load(log_probs + given, mask=valid, other=0.0)
    # no child may score above its parent, nor one whose score is not a number above any other
    score = tl.where(score > 0.0, 0.0, tl.where(score <= 0.0, score, float("-inf")))
    at = request * C + seen + child
    if lane_numbers is None:
        tl.store(all_tokens + request * C, tl.load(roots + request))
        tl.store(all_parents + request * C, 0)
        tl.store(all_scores + request * C, 0.0)
        tl.store(all_parents + at, tl.zeros([PADDED], tl.int64), mask=valid)
    else:
        lane = request * LANES + child // K
        score += tl.load(lane_scores + lane, mask=valid, other=0.0)
        number = tl.load(lane_numbers + lane, mask=valid, other=0)
        tl.store(all_parents + at, number, mask=valid)
    tl.store(all_tokens + at, token, mask=valid)
    tl.store(all_scores + at, score, mask=valid)

    key = tl.where(valid, ranking_key(score, child), NO_KEY)
    for rank in tl.static_range(K):
        best = tl.max(key, 0)
        place = key_number(best)
        to = request * K + rank
        tl.store(next_tokens + to, tl.load(tokens + first + place // K * lane_stride + place % K))
        tl.store(next_lanes + to, place // K)
        tl.store(next_numbers + to, place + seen)
        tl.store(next_scores + to, key_value(best))
        key = tl.where(key == best, NO_KEY, key)


def expand(
    log_probs: Tensor, tokens: Tensor, roots: Tensor, above: Lanes | None, grown: Grown, seen: int
) -> Lanes:
    """Append the children of all lanes to ``grown``, and choose the next lanes.

    Args:
        log_probs, tokens: [b, n, k], of n lanes, which may share their rows; roots: [b, 1].
        above: the n lanes; None: the roots.
        seen: how many candidates there are already, including the root.
    """
    b, n, k = tokens.shape
    integers = (tokens.new_empty(b, k) for _ in range(3))
    lanes = Lanes(*integers, torch.empty(b, k, device=tokens.device))
    padded = next_power_of_2(n * k)
    chosen = (None, None) if above is None else (above.numbers, above.scores)
    if log_probs.stride() != tokens.stride() or tokens.stride(2) != 1:
        log_probs, tokens = log_probs.contiguous(), tokens.contiguous()
    _expand_kernel[(b,)](
        *(log_probs, tokens, roots.contiguous(), *chosen, *grown, *lanes),
        *(seen, grown.tokens.shape[1], tokens.stride(0), tokens.stride(1)),
        LANES=n,
        K=k,
        PADDED=padded,
        num_warps=1,
    )
    return lanes


@triton.jit(do_not_specialize=["T", "C", "seen"])
def _select_kernel(
    all_tokens,  # [b, C]
    all_parents,  # [b, C]
    all_scores,  # [b, C]
    chosen,  # [b, T], numbers by rank: scratch
    tokens,  # [b, T]
    parents,  # [b, T]
    depths,  # [b, T]
    ancestors,  # [b, T, T] uint8
    scores,  # [b, T]
    T,
    C,
    seen,
    TOPK: tl.constexpr,
    MAX_DEPTH: tl.constexpr,
    CP: tl.constexpr,  # candidates, padded
    TP: tl.constexpr,  # nodes, padded
    CHUNK: tl.constexpr,  # candidates to compare all others with at once
):
    request = tl.program_id(0).to(tl.int64)
    all_tokens += request * C
    all_parents += request * C
    all_scores += request * C
    first_node = request * T

    number = tl.arange(0, CP)
    valid = number < seen
    score = tl.load(all_scores + number, mask=valid, other=0.0)
    key = tl.where(valid, ranking_key(score, number), NO_KEY)
    rank = tl.zeros([CP], tl.int32)
    for first in range(0, seen, CHUNK):
        other = first + tl.arange(0, CHUNK)
        other_score = tl.load(all_scores + other, mask=other < seen, other=0.0)
        other_key = tl.where(other < seen, ranking_key(other_score, other), NO_KEY)
        rank += tl.sum((other_key[None, :] > key[:, None]).to(tl.int32), 1)
    tl.store(chosen + first_node + rank, number.to(tl.int64), mask=valid & (rank < T))
    tl.debug_barrier()  # other threads read it

    by_rank = tl.arange(0, TP)
    exists = by_rank < T
    picked = tl.load(chosen + first_node + by_rank, mask=exists, other=-1)
    # numbers are dense: the root, k of depth 1, then k² per depth
    depth = tl.where(picked > TOPK, (picked - TOPK - 1) // (TOPK * TOPK) + 2, 1)
    depth = tl.where(picked == 0, 0, depth)
    order = tl.where(exists, depth * TP + by_rank, MAX_DEPTH * TP + TP)
    node = tl.sum((order[None, :] < order[:, None]).to(tl.int64), 1)
    above = tl.load(all_parents + picked, mask=exists, other=-1)
    is_above = (picked[None, :] == above[:, None]) & exists[None, :]
    parent = tl.sum(tl.where(is_above, node[None, :], 0), 1)
    to = first_node + node
    tl.store(tokens + to, tl.load(all_tokens + picked, mask=exists, other=0), mask=exists)
    tl.store(scores + to, tl.load(all_scores + picked, mask=exists, other=0.0), mask=exists)
    tl.store(depths + to, depth, mask=exists)
    tl.store(parents + to, parent, mask=exists)
    tl.debug_barrier()

    row = tl.arange(0, TP).to(tl.int64)
    inside = row < T
    climbed = tl.where(inside, row, 0)
    path = (row[None, :] == row[:, None]).to(tl.uint8)
    for _ in tl.static_range(MAX_DEPTH):
        climbed = tl.load(parents + first_node + climbed)
        path = tl.where(row[None, :] == climbed[:, None], 1, path)
    within = inside[:, None] & inside[None, :]
    tl.store(ancestors + (first_node + row[:, None]) * T + row[None, :], path, mask=within)


def select(
    grown: Grown,
    seen: int,
    topk: int,
    max_depth: int,
    tokens: Tensor,
    parents: Tensor,
    depths: Tensor,
    ancestors: Tensor,
    scores: Tensor,
) -> None:
    """The root and the best T - 1 of ``seen`` candidates, by depth, then by score.

    max_depth: of the candidates. Out: the fields of a Tree, [b, T] and ancestors [b, T, T] bool.
    """
    b, T = tokens.shape
    padded = next_power_of_2(seen)
    warps = 1 if padded <= 64 else 4 if padded <= 512 else 8
    _select_kernel[(b,)](
        *(*grown, torch.empty_like(tokens), tokens, parents, depths, ancestors.view(torch.uint8)),
        *(scores, T, grown.tokens.shape[1], seen),
        TOPK=topk,
        MAX_DEPTH=max_depth,
        CP=padded,
        TP=next_power_of_2(T),
        CHUNK=max(1, warps * 512 // padded),
        num_warps=warps,
    )
