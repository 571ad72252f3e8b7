"""Bit masks of trees, and of lanes by Triton."""

from __future__ import annotations

import pytest
import torch
from forms import DEVICE, in_the_interpreter, runs_kernels

pytest.importorskip("triton")

from mamba_eagle.backend.torch.attention import seen_by_next
from mamba_eagle.kernels.tree_attention.torch import pack_paths
from mamba_eagle.kernels.tree_attention.triton_masks import continue_lanes

test_in_the_interpreter = in_the_interpreter


@pytest.mark.parametrize("nodes, members", [(1, 1), (9, 9), (64, 64), (3, 70), (5, 150)])
def test_masks_have_a_bit_for_each_node(nodes: int, members: int) -> None:
    generator = torch.Generator().manual_seed(members)
    seen = torch.rand(nodes, members, generator=generator) < 0.5
    seen[:, -1] = True
    for row, words in zip(seen.tolist(), pack_paths(seen.to(DEVICE)[None])[0].tolist()):
        number = sum((word % 2**64) << 64 * i for i, word in enumerate(words))
        assert [number >> node & 1 for node in range(members)] == row


@runs_kernels
@pytest.mark.parametrize("topk, steps", [(1, 5), (3, 4), (16, 8)])
def test_lanes_see_what_the_lanes_above_saw(topk: int, steps: int) -> None:
    b, room = 3, topk * steps + 2
    generator = torch.Generator().manual_seed(topk)
    seen, masks, above = None, None, torch.zeros(b, topk, dtype=torch.int64)
    for step in range(steps):
        seen = seen_by_next(seen, above)
        own, masks = continue_lanes(above.to(DEVICE), masks, step * topk, 100, room)
        assert torch.equal(masks.cpu(), pack_paths(seen))
        slots = 100 + torch.arange(b * room).view(b, room)
        assert torch.equal(own.cpu(), slots[:, : topk * (step + 1)])
        above = torch.randint(0, topk, (b, topk), generator=generator)
