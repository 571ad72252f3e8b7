"""Ancestor sets of lanes as bit masks, continued in one launch."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mamba_eagle.kernels.gpu import cdiv, next_power_of_2

WORD = tl.constexpr(64)  # nodes of one integer of a bit mask


@triton.jit(do_not_specialize=["old", "first_slot", "lanes"])
def _continue_kernel(
    above,  # [b, K]
    seen,  # [b, K, OLD_WORDS]
    own,  # [b, old + K]
    masks,  # [b, K, WORDS]
    old,
    first_slot,
    lanes,
    K: tl.constexpr,
    KP: tl.constexpr,  # K, padded
    OLD_WORDS: tl.constexpr,
    WORDS: tl.constexpr,
    EP: tl.constexpr,  # old + K, padded
):
    request = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, KP)
    valid = lane < K
    parent = tl.load(above + request * K + lane, mask=valid, other=0)
    member = old + lane
    for word in tl.static_range(WORDS):
        mask = tl.where(member // WORD == word, 1, 0).to(tl.int64) << (member % WORD).to(tl.int64)
        if word < OLD_WORDS:
            mask |= tl.load(seen + (request * K + parent) * OLD_WORDS + word, mask=valid, other=0)
        tl.store(masks + (request * K + lane) * WORDS + word, mask, mask=valid)
    entry = tl.arange(0, EP)
    slot = first_slot + request * lanes + entry
    tl.store(own + request * (old + K) + entry, slot, mask=entry < old + K)


class LaneNodes(NamedTuple):
    """The newest lanes, as paged_tree_attention takes them."""

    own: Tensor  # [b, lanes so far] int64: KV slots
    masks: Tensor  # [b, k, words] int64: what the newest lanes see


def continue_lanes(
    above: Tensor, seen: Tensor | None, old: int, first_slot: int, lanes: int
) -> LaneNodes:
    """The next lanes see themselves and what the lanes that they continue saw.

    Args:
        above: [b, k] int64, the lane that each one continues.
        seen: [b, k, words] int64, which of the ``old`` lanes so far those see; None for the first
            lanes.
        first_slot: of b times ``lanes`` KV slots: each request has ``lanes`` of them for its lanes
            of all depths.
    """
    b, k = above.shape
    words = cdiv(old + k, 64)
    nodes = LaneNodes(
        torch.empty(b, old + k, dtype=torch.int64, device=above.device),
        torch.empty(b, k, words, dtype=torch.int64, device=above.device),
    )
    _continue_kernel[(b,)](
        *(above.contiguous(), seen, *nodes, old, first_slot, lanes),
        K=k,
        KP=next_power_of_2(k),
        OLD_WORDS=0 if seen is None else seen.shape[2],
        WORDS=words,
        EP=next_power_of_2(old + k),
        num_warps=1,
    )
    return nodes
