"""A forced acceptance length, to time steps whose drafts are worth nothing: dummy weights.

Not part of serving: what it accepts is not what the target says, so the text means nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mamba_eagle.tree.accept import Accepted
from mamba_eagle.tree.tree import Tree


def simulated_walk(
    tree: Tree, target_tokens: Tensor, max_depth: int, length: float | Tensor, step: Tensor
) -> Accepted:
    """Accept a path of ``length`` nodes on average, whatever the target says.

    Step s accepts ``floor((s+1)·length) - floor(s·length)`` nodes of each request: both neighbours
    of a fraction, mixed so that s steps make ``s·length`` nodes, up to one. A tree of fewer levels
    gives what it has. The path ends at the first node of its depth, which among equals is the best.

    target_tokens: [b, T] int64, the target's token at each node. length: 1 … max_depth+1, a number
    or [] float64. step: [] int64 on the device, the step's number, counted by the caller; so a CUDA
    graph that holds this accepts another length at each replay.
    """
    before = step.double()
    wanted = ((before + 1) * length).floor() - (before * length).floor()
    depth = torch.minimum(wanted.long() - 1, tree.depths[:, -1]).clamp(0, max_depth)  # [b]
    count = depth + 1
    # depths never decrease: as many nodes as are above stand before the first of its depth
    end = (tree.depths < depth[:, None]).sum(dim=1, keepdim=True)  # [b, 1]

    b, nodes = target_tokens.shape
    index = torch.arange(nodes, device=end.device).expand(b, -1)
    on_path = tree.ancestors.gather(1, end[..., None].expand(-1, -1, nodes))[:, 0]
    # a path has one node at each depth; what is not on it goes to a column that is cut off
    columns = torch.where(on_path, tree.depths, max_depth + 1)
    path = end.expand(-1, max_depth + 2).scatter(1, columns, index)[:, :-1]  # [b, D]

    offsets = torch.arange(1, max_depth + 2, device=end.device)
    following = tree.tokens.gather(1, path.roll(-1, dims=1))
    bonus = target_tokens.gather(1, end)
    return Accepted(path, torch.where(offsets < count[:, None], following, bonus), count)
