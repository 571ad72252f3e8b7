"""The fused Candidates against the readable ones."""

from __future__ import annotations

import pytest
import torch

from mamba_eagle.backend.cpu.candidates import CpuCandidates
from mamba_eagle.kernels import numba_math
from mamba_eagle.kernels.top_log_probs.torch import TopTokens
from mamba_eagle.tree.candidates import Candidates

pytestmark = pytest.mark.skipif(numba_math.numba is None, reason="numba is not installed")


@pytest.mark.parametrize("b", [1, 3])
@pytest.mark.parametrize(
    "steps, topk, nodes", [(1, 1, 2), (7, 1, 8), (4, 4, 12), (3, 5, 1), (3, 2, 9)]
)
def test_fused_candidates_grow_the_same_tree(steps: int, topk: int, nodes: int, b: int) -> None:
    generator = torch.Generator().manual_seed(steps * topk + b)
    for peak in (0.5, 4.0):  # flat and sharp: wide and deep trees
        roots = torch.randint(0, 50, (b,), generator=generator)
        both = [kind(roots, topk) for kind in (Candidates, CpuCandidates)]
        for step in range(steps):
            logits = peak * torch.randn(b, topk if step else 1, 50, generator=generator)
            best = TopTokens(*logits.log_softmax(-1).topk(topk))
            ours, theirs = (grown.expand(best) for grown in both)
            for part, expected in zip(ours, theirs):
                assert torch.equal(part, expected)
        for part, expected in zip(*(grown.select(nodes) for grown in both)):
            assert torch.equal(part, expected)


def test_equal_scores_keep_parents_before_children() -> None:
    """Children that are certain score as their parents do."""
    both = [kind(torch.tensor([3]), 2) for kind in (Candidates, CpuCandidates)]
    for step in range(3):
        log_probs = torch.tensor([1e-7, -1.0]).repeat(1, 2 if step else 1, 1)
        for grown in both:
            grown.expand(TopTokens(log_probs, torch.tensor([4, 6]).expand_as(log_probs)))
    for part, expected in zip(*(grown.select(6) for grown in both)):
        assert torch.equal(part, expected)


def test_more_nodes_than_candidates_are_refused() -> None:
    with pytest.raises(ValueError, match="must be between 1 and 1"):
        CpuCandidates(torch.tensor([3]), 2).select(2)
