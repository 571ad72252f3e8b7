"""Attention of tree nodes and of drafted blocks in torch and on a CPU against naive.py; Triton's is
in test_triton_tree_attention.py."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from verify_rig import random_tree

from mamba_eagle.cpu.ops import tree_attention as cpu
from mamba_eagle.kernels.tree_attention import naive
from mamba_eagle.kernels.tree_attention.torch import masked_attention, sink_attention
from mamba_eagle.layers.block_attention import block_mask

torch.set_num_threads(1)

NOT_SEEN = 1e4  # in keys and values that must not be read


def test_attention_worked_out_by_hand() -> None:
    """Scores 0 and log 3: weights 1/4 and 3/4."""
    keys = torch.tensor([[0.0, 5.0], [1.0, 7.0]])
    query = torch.tensor([2 * torch.tensor(3.0).log().item(), 0.0])
    found = naive.attention(query, keys, torch.tensor([[8.0], [4.0]]), 0.5)
    torch.testing.assert_close(found, torch.tensor([5.0], dtype=torch.float64))


def test_a_sink_worked_out_by_hand() -> None:
    """Scores 0 and log 3 beside a sink of log 4: weights 1/8, 3/8, and 1/2 of nothing."""
    keys = torch.tensor([[0.0], [1.0]])
    query, values = torch.tensor([3.0]).log(), torch.tensor([[8.0], [4.0]])
    found = naive.attention(query, keys, values, 1.0, math.log(4.0))
    torch.testing.assert_close(found, torch.tensor([2.5], dtype=torch.float64))


@pytest.mark.parametrize("as_bool", [False, True], ids=["additive", "bool"])
@pytest.mark.parametrize("heads, kv_heads", [(4, 2), (4, 1), (3, 3)])
@pytest.mark.parametrize("queries", [1, 12, 40])
def test_each_query_attends_to_what_its_mask_shows(
    queries: int, heads: int, kv_heads: int, as_bool: bool
) -> None:
    """In both forms that torch's has: few queries and many."""
    generator = torch.Generator().manual_seed(queries * heads)
    b, S, D = 3, 50, 20
    q = torch.randn(b, queries, heads, D, generator=generator)
    k, v = (torch.randn(b, S, kv_heads, D, generator=generator) for _ in range(2))
    seen = torch.rand(b, queries, S, generator=generator) < 0.4
    seen[:, :, 7] = True
    seen[:, :, 11:20] = False
    k[:, 11:20], v[:, 11:20] = NOT_SEEN, -NOT_SEEN
    mask = seen if as_bool else torch.zeros(seen.shape).masked_fill(~seen, float("-inf"))
    out = masked_attention(q, k, v, mask, scale=0.3)
    for r in range(b):
        exact = naive.masked_attention(q[r], k[r], v[r], seen[r], 0.3)
        torch.testing.assert_close(out[r].double(), exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("heads, kv_heads, D", [(4, 2, 64), (3, 1, 20), (3, 3, 7)])
@pytest.mark.parametrize("b, T", [(1, 1), (1, 12), (2, 5), (3, 1), (4, 16)])
@pytest.mark.parametrize(
    "old, roots", [(0, 1), (3, 1), (3, 3)], ids=["all-new", "some-in-the-pool", "forest"]
)
def test_nodes_attend_to_prefix_and_path(
    b: int, T: int, heads: int, kv_heads: int, D: int, old: int, roots: int
) -> None:
    """On a CPU, from a paged pool whose other slots hold huge values. ``old`` nodes of a tree were
    written by a call before."""
    generator = torch.Generator().manual_seed(heads)
    E, kv_slots = T + old, 300
    parents = random_tree(b, E, 5, generator).parents
    parents[:, :roots] = torch.arange(roots)
    order = torch.randperm(kv_slots, generator=generator)
    prefix = torch.tensor([17, 0, 1, 20])[:b].contiguous()
    slots = torch.tensor([4, 0, 2, 1])[:b].contiguous()
    table = torch.zeros(5, 20, dtype=torch.int64)
    own = order[: b * E].view(b, E).contiguous()
    table[slots] = order[b * E : b * E + 20 * b].view(b, 20)
    pools = torch.full((2, kv_slots, kv_heads, D), NOT_SEEN)
    for r in range(b):
        seen = table[slots[r], : prefix[r]]
        pools[:, seen] = torch.randn(2, len(seen), kv_heads, D, generator=generator)
    q = torch.randn(b, E, heads, D, generator=generator)
    kv = torch.randn(2, b, E, kv_heads, D, generator=generator)
    pools[:, own[:, :old].flatten()] = kv[:, :, :old].flatten(1, 2)

    out = torch.empty(b * T, heads, D)
    new = (q[:, old:], kv[0, :, old:], kv[1, :, old:])
    cpu.paged_tree_attention(
        0,
        tuple(part.flatten(0, 1).contiguous().numpy() for part in new),
        tuple(pools.numpy()),
        tuple(part.numpy() for part in (table, slots, prefix)),
        *(part.numpy() for part in (own, parents)),
        np.float32(0.3),
        out.numpy(),
    )
    assert torch.equal(pools[:, own.flatten()], kv.flatten(1, 2)), "new nodes are in the pool"
    for r in range(b):
        before = pools[:, table[slots[r], : prefix[r]]]
        exact = naive.tree_attention(q[r], *kv[:, r], *before, parents[r].tolist(), 0.3)
        found = out.view(b, T, heads, D)[r]
        torch.testing.assert_close(found.double(), exact[old:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("causal", [False, True], ids=["both-ways", "causal"])
@pytest.mark.parametrize("window", [0, 1, 4, 11, 100])
@pytest.mark.parametrize("with_sinks", [False, True], ids=["", "sinks"])
def test_rows_of_a_block_attend_to_context_and_block(
    window: int, causal: bool, with_sinks: bool
) -> None:
    """On a CPU, from a paged pool whose other slots hold huge values, and in torch."""
    generator = torch.Generator().manual_seed(window)
    (b, T, heads, kv_heads, D), kv_slots = (3, 6, 6, 2, 20), 200
    order = torch.randperm(kv_slots, generator=generator)
    prefix, slots = torch.tensor([17, 0, 3]), torch.tensor([4, 0, 2])
    table = torch.zeros(5, 20, dtype=torch.int64)
    own = order[: b * T].view(b, T).contiguous()
    table[slots] = order[b * T : b * T + 20 * b].view(b, 20)
    pools = torch.full((2, kv_slots, kv_heads, D), NOT_SEEN)
    for r in range(b):
        seen = table[slots[r], : prefix[r]]
        pools[:, seen] = torch.randn(2, len(seen), kv_heads, D, generator=generator)
    q = torch.randn(b * T, heads, D, generator=generator)
    k, v = torch.randn(2, b * T, kv_heads, D, generator=generator)
    sinks = torch.randn(heads if with_sinks else 0, generator=generator)
    out = torch.empty(b * T, heads, D)
    cpu.paged_block_attention(
        0,
        tuple(part.numpy() for part in (q, k, v)),
        tuple(pools.numpy()),
        tuple(part.numpy() for part in (table, slots, prefix)),
        own.numpy(),
        window,
        causal,
        sinks.numpy(),
        np.float32(0.3),
        out.numpy(),
    )
    assert torch.equal(pools[:, own.flatten()], torch.stack([k, v])), "the rows are in the pool"
    for r in range(b):
        rows, before = slice(r * T, r * T + T), pools[:, table[slots[r], : prefix[r]]]
        new = (q[rows], k[rows], v[rows])
        exact = naive.block_attention(
            *new, *before, window, causal, 0.3, sinks.tolist() if with_sinks else None
        )
        torch.testing.assert_close(out[rows].double(), exact, rtol=1e-4, atol=1e-5)
        if with_sinks and not window:
            keys, values = (torch.cat(pair)[None] for pair in zip(before, new[1:]))
            context = torch.ones(T, prefix[r], dtype=torch.bool)
            mask = torch.cat([context, block_mask(T, window, causal)], dim=1)[None]
            found = sink_attention(new[0][None], keys, values, mask, 0.3, sinks)[0]
            torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-5)


def test_threads_change_no_bit_of_attention() -> None:
    """In the parallel form of the kernel, which shares out requests and key heads."""
    generator = torch.Generator().manual_seed(2)
    (b, T, heads, kv_heads, D), kv_slots = (2, 5, 6, 3, 16), 60
    order = torch.randperm(kv_slots, generator=generator)
    table, own = order[:40].view(2, 20), order[40 : 40 + b * T].view(b, T)
    sequences = (table, torch.tensor([1, 0]), torch.tensor([20, 7]))
    parents = random_tree(b, T, 3, generator).parents
    new = [torch.randn(b * T, n, D, generator=generator) for n in (heads, kv_heads, kv_heads)]
    stored = torch.randn(2, kv_slots, kv_heads, D, generator=generator)
    found = []
    for form in (cpu.paged_tree_attention.serial, cpu.paged_tree_attention.parallel):
        pools, out = stored.clone(), torch.empty(b * T, heads, D)
        form(
            tuple(part.numpy() for part in new),
            tuple(pools.numpy()),
            tuple(part.numpy() for part in sequences),
            *(part.contiguous().numpy() for part in (own, parents)),
            np.float32(0.3),
            out.numpy(),
        )
        found.append((out, pools))
    assert all(torch.equal(one, two) for one, two in zip(*found))
