"""A forced acceptance length, for timing steps with dummy weights, whose drafts are useless.

Not part of serving: the accepted tokens are not the target's, so the text is meaningless.
"""

import torch
from torch import Tensor

from mamba_eagle.tree.accept import Accepted
from mamba_eagle.tree.tree import Tree


def simulated_walk(
    tree: Tree, target_tokens: Tensor, max_depth: int, length: float | Tensor, step: Tensor
) -> Accepted:
    """Accept a path of ``length`` nodes on average, whatever the target's tokens are.

    Step s accepts ``floor((s+1)·length) - floor(s·length)`` nodes of each request. If length is not
    a whole number, steps alternate between its two neighbours so that s steps accept ``s·length``
    nodes, rounded down. A tree with fewer levels limits the path. The path ends at the first node
    of its depth, which has the best score there.

    target_tokens: [b, T] int64, the target's token at each node. length: from 1 to max_depth+1, a
    number or a [] float64 tensor. step: [] int64 on the device, the step's number, which the caller
    increments; so a captured graph accepts a different length at each replay.
    """
    before = step.double()
    accepts = ((before + 1) * length).floor() - (before * length).floor()
    depth = torch.minimum(accepts.long() - 1, tree.depths[:, -1]).clamp(0, max_depth)  # [b]
    count = depth + 1
    # depths never decrease, so the index of the first node of a depth is the number of nodes above
    end = (tree.depths < depth[:, None]).sum(dim=1, keepdim=True)  # [b, 1]

    b, nodes = target_tokens.shape
    index = torch.arange(nodes, device=end.device).expand(b, -1)
    on_path = tree.ancestors.gather(1, end[..., None].expand(-1, -1, nodes))[:, 0]
    # a path has one node per depth; all other nodes go to a last column, which is cut off
    columns = torch.where(on_path, tree.depths, max_depth + 1)
    path = end.expand(-1, max_depth + 2).scatter(1, columns, index)[:, :-1]  # [b, D]

    offsets = torch.arange(1, max_depth + 2, device=end.device)
    following = tree.tokens.gather(1, path.roll(-1, dims=1))
    bonus = target_tokens.gather(1, end).clamp(min=0)  # weights that are noise sample no token
    return Accepted(path, torch.where(offsets < count[:, None], following, bonus), count)
