"""Which drafted nodes the target accepts, and where a request's output ends.

Shapes: b requests, T tree nodes, D = max_depth + 1, S stop tokens. Nothing here waits for the
device.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from mamba_eagle.tree.tree import Tree


class Accepted(NamedTuple):
    """A path from the root per request: the first ``count`` nodes, and as many new tokens.

    ``tokens[:, i]`` is the target's token at ``nodes[:, i]``: first the tokens of ``nodes[:, 1:]``,
    then the bonus. Tokens from ``count`` on are arbitrary.
    """

    nodes: Tensor  # [b, D] int64; node indices, the root (0) first, padded with the last one
    tokens: Tensor  # [b, D] int64
    count: Tensor  # type: ignore[assignment]  # [b] int64, 1 to D; hides tuple.count


class Truncated(NamedTuple):
    """An ``Accepted``, cut where its request ends or where no token could be sampled."""

    nodes: Tensor  # [b, D] int64
    tokens: Tensor  # [b, D] int64; valid token ids even after ``count``
    # [b] int64, 0 to D; 0 if the request had ended before, or if no token could be sampled
    count: Tensor  # type: ignore[assignment]
    finished: Tensor  # [b] bool; a stop token was kept, or the token budget is used up


def accept(tree: Tree, target_tokens: Tensor, max_depth: int) -> Accepted:
    """Walk from the root, at each node to the child whose token is the target's token there.

    The walk ends where there is no such child; the target's token there is the bonus. Since the
    target's tokens are samples from its own distribution, so is the result, at any temperature.

    target_tokens: [b, T] int64, the target's token at each node. Siblings do not share tokens; if
    they did, the one with the lowest index would win. max_depth: the tree's depth, D - 1.
    """
    nodes = target_tokens.shape[1]
    index = torch.arange(nodes, device=target_tokens.device).expand_as(target_tokens)
    agrees = tree.tokens == target_tokens.gather(1, tree.parents)
    agrees[:, 0].fill_(False)  # the root is not a child
    none = torch.full_like(index, nodes)
    child = none.scatter_reduce(1, tree.parents, torch.where(agrees, index, nodes), "amin")
    following = torch.where(child == nodes, index, child)  # [b, T]; the end of a walk: itself

    walk = [torch.zeros_like(index[:, :1])]
    for _ in range(max_depth):
        walk.append(following.gather(1, walk[-1]))
    path = torch.cat(walk, dim=1)
    count = (path[:, 1:] != path[:, :-1]).sum(dim=1) + 1
    return Accepted(path, target_tokens.gather(1, path), count)


def truncate(accepted: Accepted, stop_tokens: Tensor, remaining: Tensor) -> Truncated:
    """Cut each path after the first stop token (which is kept), after ``remaining`` tokens, and
    before the first negative token, where none could be sampled.

    stop_tokens: [b, S] int64, padded with -1. remaining: [b] int64, the tokens that each request
    may still generate; 0 if it has ended.
    """
    tokens, count = accepted.tokens, accepted.count
    index = torch.arange(tokens.shape[1], device=tokens.device)
    stops = (tokens.unsqueeze(2) == stop_tokens.unsqueeze(1)).any(dim=2)  # [b, D]
    stops_before = stops.cumsum(dim=1) - stops.long()
    until_stop = (stops_before == 0).sum(dim=1)
    sampled = (tokens >= 0).long().cumprod(dim=1).sum(dim=1)
    count = torch.minimum(torch.minimum(count, until_stop), remaining.clamp(min=0))
    count = torch.minimum(count, sampled)
    stopped = (stops & (index < count.unsqueeze(1))).any(dim=1)
    finished = stopped | (count >= remaining)
    return Truncated(accepted.nodes, tokens.clamp(min=0), count, finished)


def empty_truncated(b: int, max_depth: int, device: torch.device) -> Truncated:
    """Uninitialized tensors for b paths of up to max_depth + 1 nodes, for kernels to write to."""
    return Truncated(
        torch.empty(b, max_depth + 1, dtype=torch.int64, device=device),
        torch.empty(b, max_depth + 1, dtype=torch.int64, device=device),
        torch.empty(b, dtype=torch.int64, device=device),
        torch.empty(b, dtype=torch.bool, device=device),
    )
