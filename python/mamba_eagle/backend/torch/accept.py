"""Accepting nodes in torch, and entering them into the request table."""

from __future__ import annotations

import torch
from torch import Tensor

from mamba_eagle.backend.pools import RequestTable
from mamba_eagle.tree.accept import Truncated, accept, truncate
from mamba_eagle.tree.tree import Tree


def accept_tokens(
    table: RequestTable, slots: Tensor, tree: Tree, target: Tensor, max_depth: int
) -> Truncated:
    """The accepted path of each tree, cut where its request ends; see ``Backend``."""
    path = accept(tree, target, max_depth)
    return truncate(path, table.stop_tokens[slots], table.remaining[slots])


def commit_tokens(
    table: RequestTable, slots: Tensor, kv_slots: Tensor, accepted: Truncated
) -> None:
    """Make the accepted nodes part of the sequences; only indices change. See ``Backend``."""
    count = accepted.count
    offsets = torch.arange(accepted.nodes.shape[1], device=slots.device)
    columns = table.processed[slots][:, None] + offsets
    table.kv_slots[slots[:, None], columns] = kv_slots.gather(1, accepted.nodes)
    table.processed[slots] += count
    last = accepted.tokens.gather(1, (count - 1).clamp(min=0)[:, None])[:, 0]
    table.last_token[slots] = torch.where(count > 0, last, table.last_token[slots])
    table.remaining[slots] = torch.where(accepted.finished, 0, table.remaining[slots] - count)


def empty_truncated(b: int, max_depth: int, device: torch.device) -> Truncated:
    """Uninitialized tensors for b paths of up to max_depth + 1 nodes, for kernels to write to."""
    return Truncated(
        torch.empty(b, max_depth + 1, dtype=torch.int64, device=device),
        torch.empty(b, max_depth + 1, dtype=torch.int64, device=device),
        torch.empty(b, dtype=torch.int64, device=device),
        torch.empty(b, dtype=torch.bool, device=device),
    )
