"""The Triton kernels that accept and commit, against the torch backend."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tensor_checks import torch_backend
from triton_rig import (
    DEVICE,
    GPU,
    needs_interpreter,
    run_in_the_interpreter,
    runs_kernels,
    triton_backend,
)
from triton_rig import to_device as moved

from mamba_eagle.backend.base import Backend
from mamba_eagle.backend.pools import RequestTable
from mamba_eagle.tree.accept import Truncated
from mamba_eagle.tree.tree import Tree, ancestor_matrix

REQUESTS, VOCAB, MAX_PROCESSED = 9, 7, 30


@needs_interpreter
def test_in_the_interpreter() -> None:
    run_in_the_interpreter(__file__)


def random_trees(b: int, nodes: int, generator: torch.Generator) -> Tree:
    """Any shape; siblings may share tokens."""
    parents = torch.zeros(b, nodes, dtype=torch.int64)
    depths = torch.zeros_like(parents)
    for node in range(1, nodes):
        parents[:, node] = torch.randint(max(0, node - 4), node, (b,), generator=generator)
        depths[:, node] = depths.gather(1, parents[:, node : node + 1])[:, 0] + 1
    tokens = torch.randint(0, VOCAB, (b, nodes), generator=generator)
    return Tree(tokens, parents, depths, ancestor_matrix(parents, nodes), torch.zeros(b, nodes))


def random_table(generator: torch.Generator, stop_tokens: int) -> RequestTable:
    """Some requests have ended, some have more stop tokens than others. The last slot is what pads
    a batch."""
    table = RequestTable(REQUESTS, MAX_PROCESSED + 70, torch.device("cpu"))
    table.remaining = torch.randint(-1, 6, (REQUESTS,), generator=generator) * 2
    table.processed = torch.randint(0, MAX_PROCESSED, (REQUESTS,), generator=generator)
    table.last_token = torch.randint(0, VOCAB, (REQUESTS,), generator=generator)
    table.stop_tokens = torch.randint(0, VOCAB, (REQUESTS, stop_tokens), generator=generator)
    table.stop_tokens[:, 1:] = -1
    table.remaining[-1] = table.processed[-1] = 0
    return table


def copied(table: RequestTable, device: torch.device) -> RequestTable:
    other = RequestTable(1, 1, device)
    for name in ("remaining", "processed", "last_token", "stop_tokens", "kv_slots"):
        setattr(other, name, getattr(table, name).clone().to(device))
    return other


def cases(nodes: int) -> Iterator[tuple[RequestTable, Tensor, Tree, Tensor, Tensor]]:
    """Tables, slots, trees, the target's tokens, which often agree with a child, and KV slots."""
    generator = torch.Generator().manual_seed(nodes)
    for stop_tokens in (1, 3, 8):
        table = random_table(generator, stop_tokens)
        slots = torch.randperm(REQUESTS - 1, generator=generator)[:5]
        slots = torch.cat([slots, torch.tensor([REQUESTS - 1] * 2)])
        tree = random_trees(len(slots), nodes, generator)
        target = torch.randint(0, VOCAB, tree.tokens.shape, generator=generator)
        follow = torch.rand(target.shape, generator=generator) < 0.7
        target.scatter_(1, tree.parents, torch.where(follow, tree.tokens, VOCAB - 1))
        target[torch.rand(target.shape, generator=generator) < 0.1] = -1  # no token there
        yield table, slots, tree, target, torch.randperm(tree.tokens.numel()).view_as(target) + 50


def run_step(
    backend: Backend,
    table: RequestTable,
    slots: Tensor,
    tree: Tree,
    target: Tensor,
    kv_slots: Tensor,
    deep: int,
) -> Truncated:
    accepted = backend.accept_tokens(table, slots, tree, target, deep)
    backend.commit_tokens(table, slots, kv_slots, accepted)
    return accepted


@runs_kernels
@pytest.mark.parametrize("nodes", [1, 2, 8, 40])
def test_a_step_is_accepted_as_in_torch(nodes: int) -> None:
    """With requests that have ended, and those that pad the batch."""
    triton, plain = triton_backend(), torch_backend()
    counts = set()
    for table, slots, tree, target, kv_slots in cases(nodes):
        ours, deep = copied(table, DEVICE), int(tree.depths.max())
        expected = run_step(plain, table, slots, tree, target, kv_slots, deep)
        inputs = (slots.to(DEVICE), moved(tree), target.to(DEVICE), kv_slots.to(DEVICE))
        found = run_step(triton, ours, *inputs, deep)
        for part, wanted in zip(found, expected):
            assert part.dtype == wanted.dtype
            assert torch.equal(part.cpu(), wanted)
        for name in ("remaining", "processed", "last_token"):
            assert torch.equal(getattr(ours, name).cpu(), getattr(table, name)), name
        for slot in slots.tolist():  # behind what is run the torch path leaves rejected ones
            end = int(table.processed[slot])
            assert torch.equal(ours.kv_slots[slot, :end].cpu(), table.kv_slots[slot, :end])
            assert not ours.kv_slots[slot, end:].any()
        counts |= set(expected.count.tolist())
    assert nodes < 8 or len(counts) > 2, "the cases are all alike"


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="no CUDA device")
def test_a_graph_accepts_other_trees() -> None:
    triton, reference = triton_backend(), torch_backend()
    (table, slots, tree, target, kv_slots), *others = cases(8)
    ours = copied(table, DEVICE)
    ours.stop_tokens = torch.full((REQUESTS, 8), -1, device=DEVICE)
    inputs = [slots.to(DEVICE), moved(tree), target.to(DEVICE), kv_slots.to(DEVICE)]
    run_step(triton, ours, *inputs, 5)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run_step(triton, ours, *inputs, 5)
    for plain, slots, tree, target, kv_slots in others:
        for name in ("remaining", "processed", "last_token", "kv_slots"):
            getattr(ours, name).copy_(getattr(plain, name))
        ours.stop_tokens.fill_(-1)[:, : plain.stop_tokens.shape[1]] = plain.stop_tokens.to(DEVICE)
        for part, new in zip(
            (inputs[0], *inputs[1], *inputs[2:]), (slots, *tree, target, kv_slots)
        ):
            part.copy_(new)
        graph.replay()
        expected = run_step(reference, plain, slots, tree, target, kv_slots, 5)
        for part, wanted in zip(found, expected):
            assert torch.equal(part.cpu(), wanted)
        for name in ("remaining", "processed", "last_token"):
            assert torch.equal(getattr(ours, name).cpu(), getattr(plain, name)), name
