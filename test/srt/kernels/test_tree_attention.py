"""masked_attention, in both of its forms, against a loop in float64."""

from __future__ import annotations

import pytest
import torch

from mamba_eagle.kernels.tree_attention.torch import masked_attention

torch.set_num_threads(1)

NOT_SEEN = 1e4  # in keys and values that nobody may look at


@pytest.mark.parametrize("as_bool", [False, True], ids=["additive", "bool"])
@pytest.mark.parametrize("heads, kv_heads", [(4, 2), (4, 1), (3, 3)])
@pytest.mark.parametrize("queries", [1, 12, 40])
def test_each_query_attends_to_what_its_mask_shows(
    queries: int, heads: int, kv_heads: int, as_bool: bool
) -> None:
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
    for row in range(b):
        for i in range(queries):
            at = seen[row, i]
            for head in range(heads):
                keys = k[row, at, head * kv_heads // heads].double()
                values = v[row, at, head * kv_heads // heads].double()
                weights = (keys @ q[row, i, head].double() * 0.3).softmax(0)
                expected = weights @ values
                torch.testing.assert_close(
                    out[row, i, head].double(), expected, rtol=1e-4, atol=1e-5
                )
