"""Bit masks of trees and lanes by Triton, against those of torch."""

from __future__ import annotations

import pytest
import torch
from forms import DEVICE, in_the_interpreter, runs_kernels

pytest.importorskip("triton")

from benchmark.lib.ancestors import pack_ancestors
from mamba_eagle.backend.torch.attention import seen_by_next
from mamba_eagle.kernels.tree_attention.triton_masks import continue_lanes, pack_paths

test_in_the_interpreter = in_the_interpreter


@runs_kernels
@pytest.mark.parametrize("nodes, members", [(1, 1), (9, 9), (64, 64), (3, 70), (5, 150)])
def test_masks_are_those_of_torch(nodes: int, members: int) -> None:
    generator = torch.Generator().manual_seed(members)
    seen = torch.rand(3, nodes, members, generator=generator) < 0.5
    seen[..., -1] = True
    assert torch.equal(pack_paths(seen.to(DEVICE)).cpu(), pack_ancestors(seen))
    chain = torch.ones(nodes, members).tril().bool().expand(3, -1, -1)  # of one matrix
    assert torch.equal(pack_paths(chain.to(DEVICE)).cpu(), pack_ancestors(chain))


@runs_kernels
@pytest.mark.parametrize("topk, steps", [(1, 5), (3, 4), (16, 8)])
def test_lanes_see_what_the_lanes_above_saw(topk: int, steps: int) -> None:
    b, room = 3, topk * steps + 2
    generator = torch.Generator().manual_seed(topk)
    seen, masks, above = None, None, torch.zeros(b, topk, dtype=torch.int64)
    for step in range(steps):
        seen = seen_by_next(seen, above)
        own, masks = continue_lanes(above.to(DEVICE), masks, step * topk, 100, room)
        assert torch.equal(masks.cpu(), pack_ancestors(seen))
        slots = 100 + torch.arange(b * room).view(b, room)
        assert torch.equal(own.cpu(), slots[:, : topk * (step + 1)])
        above = torch.randint(0, topk, (b, topk), generator=generator)
