"""What a verify step leaves in the request table: which tokens stay, and where they are."""

from __future__ import annotations

import torch
from torch import Tensor

from mamba_eagle.kernels import gpu, numba_math
from mamba_eagle.kernels.accept import cpu
from mamba_eagle.message import DecodeResult, StepTrace
from mamba_eagle.runner.pools import RequestTable
from mamba_eagle.tree.accept import Truncated, accept, truncate
from mamba_eagle.tree.tree import Tree


def accept_tokens(
    table: RequestTable, slots: Tensor, tree: Tree, target: Tensor, max_depth: int
) -> Truncated:
    """What each request accepts of its tree, up to its own end. target [b, T]."""
    on_cpu, device = numba_math.usable(target.device), target.device
    if not on_cpu and not gpu.usable(device):
        walked = accept(tree, target, max_depth)
        return truncate(walked, table.stop_tokens[slots], table.remaining[slots])
    b, D = len(slots), max_depth + 1
    accepted = Truncated(
        torch.empty(b, D, dtype=torch.int64, device=device),
        torch.empty(b, D, dtype=torch.int64, device=device),
        torch.empty(b, dtype=torch.int64, device=device),
        torch.empty(b, dtype=torch.bool, device=device),
    )
    inputs = (tree.tokens, tree.parents, target, table.stop_tokens, table.remaining, slots)
    if on_cpu:
        cpu.accept_and_truncate(*(part.numpy() for part in (*inputs, *accepted)))
    else:
        from mamba_eagle.kernels.accept import triton  # needs triton

        triton.accept_and_truncate(*inputs, *accepted)
    return accepted


def commit_tokens(
    table: RequestTable, slots: Tensor, kv_slots: Tensor, accepted: Truncated
) -> None:
    """The accepted nodes become part of the sequence: indices only. kv_slots [b, T], the nodes'."""
    changed = (table.kv_slots, table.processed, table.last_token, table.remaining)
    if numba_math.usable(slots.device):
        cpu.commit(*(part.numpy() for part in (slots, kv_slots, *accepted, *changed)))
        return
    if gpu.usable(slots.device):
        from mamba_eagle.kernels.accept import triton  # needs triton

        triton.commit(slots, kv_slots, *accepted, *changed)
        return
    count = accepted.count
    offsets = torch.arange(accepted.nodes.shape[1], device=slots.device)
    table.kv_slots[slots[:, None], table.processed[slots][:, None] + offsets] = kv_slots.gather(
        1, accepted.nodes
    )
    table.processed[slots] += count
    last = accepted.tokens.gather(1, (count - 1).clamp(min=0)[:, None])[:, 0]
    table.last_token[slots] = torch.where(count > 0, last, table.last_token[slots])
    table.remaining[slots] = torch.where(accepted.finished, 0, table.remaining[slots] - count)


def step_trace(tree: Tree, row: int, result: DecodeResult) -> StepTrace:
    """A row of the step's trees and what became of it, for a request that asks to see them."""
    return StepTrace(
        tokens=tree.tokens[row].tolist(),
        parents=tree.parents[row].tolist(),
        scores=tree.scores[row].tolist(),
        accepted=result.nodes,
        bonus=result.tokens[-1],
    )
