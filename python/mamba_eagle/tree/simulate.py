"""A forced acceptance length, for timing steps with dummy weights, whose drafts are useless.

Not part of serving: the accepted tokens are not the target's, so the text is meaningless.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from mamba_eagle.tree.tree import Tree


class Forced(NamedTuple):
    """The last two of ``forced_path``, on the device."""

    length: Tensor  # [] float64
    step: Tensor  # [] int64


def forced_path(
    tree: Tree, target_tokens: Tensor, max_depth: int, length: float | Tensor, step: Tensor
) -> tuple[Tree, Tensor]:
    """A tree and its target's tokens, of which ``accept`` takes a path of ``length`` nodes on
    average, whatever the target's tokens are.

    Step s accepts ``floor((s+1)·length) - floor(s·length)`` nodes of each request. If length is not
    a whole number, steps alternate between its two neighbours so that s steps accept ``s·length``
    nodes, rounded down. A tree with fewer levels limits the path. The path ends at the first node
    of its depth, which has the best score there.

    target_tokens: [b, T] int64, the target's token at each node. length: from 1 to max_depth+1, a
    number or a [] float64 tensor. step: [] int64 on the device, the step's number, which the caller
    increments; so a captured graph accepts a different length at each replay.
    """
    steps = step + torch.arange(2, dtype=torch.float64, device=step.device)
    before, after = (steps * length).floor().long().unbind()
    depth = torch.minimum(after - before - 1, tree.depths[:, -1]).clamp(0, max_depth)[:, None]
    # depths never decrease, so the index of the first node of a depth is the number of nodes above
    above = tree.depths < depth
    end = above.sum(dim=1, keepdim=True)  # [b, 1]

    b, nodes = target_tokens.shape
    on_path = tree.ancestors.gather(1, end[..., None].expand(-1, -1, nodes))[:, 0]
    # a path has one node per depth; all other nodes go to a last column
    columns = torch.where(on_path, tree.depths, max_depth + 1)
    path = columns.new_zeros(b, max_depth + 2).scatter_(1, columns, tree.tokens)
    following = torch.where(above, path.gather(1, tree.depths + 1), target_tokens)
    # no child of the end has a token; weights that are noise may sample none
    tokens = tree.tokens.where(on_path, -1)
    return tree._replace(tokens=tokens), following.clamp(min=0)
