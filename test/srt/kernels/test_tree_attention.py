"""Attention of tree nodes in torch and on a CPU against naive.py; Triton's is in
test_triton_tree_attention.py."""

from __future__ import annotations

import pytest
import torch
from forms import needs_numba
from verify_rig import random_tree

from mamba_eagle.kernels.tree_attention import cpu, naive
from mamba_eagle.kernels.tree_attention.torch import masked_attention

torch.set_num_threads(1)

NOT_SEEN = 1e4  # in keys and values that must not be read


def test_attention_worked_out_by_hand() -> None:
    """Scores 0 and log 3: weights 1/4 and 3/4."""
    keys = torch.tensor([[0.0, 5.0], [1.0, 7.0]])
    query = torch.tensor([2 * torch.tensor(3.0).log().item(), 0.0])
    found = naive.attention(query, keys, torch.tensor([[8.0], [4.0]]), 0.5)
    torch.testing.assert_close(found, torch.tensor([5.0], dtype=torch.float64))


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


@needs_numba
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
        *(part.flatten(0, 1).contiguous().numpy() for part in new),
        *pools.numpy(),
        *(part.numpy() for part in (table, slots, prefix, own, parents)),
        0.3,
        out.numpy(),
    )
    assert torch.equal(pools[:, own.flatten()], kv.flatten(1, 2)), "new nodes are in the pool"
    for r in range(b):
        before = pools[:, table[slots[r], : prefix[r]]]
        exact = naive.tree_attention(q[r], *kv[:, r], *before, parents[r].tolist(), 0.3)
        found = out.view(b, T, heads, D)[r]
        torch.testing.assert_close(found.double(), exact[old:], rtol=1e-4, atol=1e-5)
