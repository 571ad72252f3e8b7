"""In which columns of a block the nodes of a tree stand, one launch for all layers.

A sum over a block of 64 positions is one over four *steps* of 16, in order; within a step, places
are free, and numbers that are zero do not count. In a chain a step holds 16 positions. In a tree
several nodes share a position, so the columns of a step hold what there is of the prefix in it,
then nodes of its positions, and each row masks those that it does not see:

    positions      … 14   15 | 16   17   18 …           root at 14, two branches
    columns        … 14   15   15' | 16  16' 17  17' …

Where a step has more nodes than columns, the tree takes several *pages*. Each has whole paths, from
the root to a leaf, and each node has one page in which its row takes part; there is at most one for
each leaf, and rarely more than one or two for 16 nodes. A tree of 64 nodes reaches no further than
the block after its root's.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mamba_eagle.kernels.gpu import next_power_of_2, overlapping
from mamba_eagle.kernels.triton_math import previous_done

BLOCK = tl.constexpr(64)  # positions
STEP = tl.constexpr(16)  # positions that a tensor core adds at once
COLUMNS = tl.constexpr(128)  # of a page: the block of the root, and the next one


class Pages(NamedTuple):
    """b trees of T nodes."""

    count: Tensor  # [b] int32
    of_node: Tensor  # [b, T] int32: in which page a node's row takes part
    columns: Tensor  # [b, T, 128] int32: the node in each column of each page; -1: none


@triton.jit(do_not_specialize=["T"])
def _pages_kernel(
    masks,  # [b, T] int64
    prefix,  # [b]
    count,  # [b]
    of_node,  # [b, T]
    columns,  # [b, T, COLUMNS]
    T,
    NODES: tl.constexpr,  # T, padded
    OVERLAP: tl.constexpr,
):
    previous_done(OVERLAP)
    request = tl.program_id(0).to(tl.int64)
    begun = tl.load(prefix + request).to(tl.int32) % BLOCK  # positions of the prefix in the block
    node = tl.arange(0, NODES)
    exists = node < T
    mask = tl.load(masks + request * T + node, mask=exists, other=0)
    above = ((mask[:, None] >> node.to(tl.int64)[None, :]) & 1).to(tl.int32)  # [node, ancestor]
    step = (begun + tl.sum(above, 1) - 1) // STEP
    is_leaf = (tl.sum(above, 0) == 1) & exists
    beside = (step[:, None] == step[None, :]) & exists[:, None]
    room = STEP - tl.where(step == begun // STEP, begun % STEP, 0)  # for nodes, in a node's step
    column = tl.arange(0, COLUMNS)

    # masks that are no tree's, as in padding, get a page without nodes
    nothing = column < COLUMNS * (1 - tl.max(is_leaf.to(tl.int32)))
    tl.store(columns + request * T * COLUMNS + column, -1, mask=nothing)
    page = 0
    mine = tl.full([NODES], -1, tl.int32)  # the page of each node
    inside = tl.zeros([NODES], tl.int32)  # which nodes the page has
    for leaf in range(T):
        if tl.sum((is_leaf & (node == leaf)).to(tl.int32)) > 0:
            path = tl.sum(tl.where((node == leaf)[:, None], above, 0), 0)
            wider = inside | path
            crowd = tl.sum(tl.where(beside, wider[:, None], 0), 0)
            if tl.max(tl.where(wider > 0, crowd - room, 0)) > 0:
                page += 1
                wider = path
            inside = wider
            mine = tl.where((path > 0) & (mine < 0), page, mine)
            earlier = beside & (node[:, None] < node[None, :])
            rank = tl.sum(tl.where(earlier, inside[:, None], 0), 0)
            at = step * STEP + STEP - room + rank
            here = (column[:, None] == at[None, :]) & (inside > 0)[None, :]
            found = tl.sum(tl.where(here, node[None, :] + 1, 0), 1) - 1
            tl.store(columns + (request * T + page) * COLUMNS + column, found)
    tl.store(of_node + request * T + node, mine, mask=exists)
    tl.store(count + request, page + 1)


def lay_out(masks: Tensor, prefix: Tensor) -> Pages:
    """masks: [b, T] int64, contiguous: bit j is set if node j is node i or above it; prefix: [b]
    integer, position of the root. Raises: ValueError if T is above 64."""
    b, T = masks.shape
    if T > 64:
        raise ValueError(f"exact attention of trees of {T} nodes: at most 64")
    shapes = ((b,), (b, T), (b, T, COLUMNS.value))
    pages = Pages(*(torch.empty(s, dtype=torch.int32, device=masks.device) for s in shapes))
    _pages_kernel[(b,)](
        *(masks, prefix, *pages, T),
        NODES=max(2, next_power_of_2(T)),
        num_warps=1 if T <= 16 else 4,
        **overlapping(masks.device),
    )
    return pages
