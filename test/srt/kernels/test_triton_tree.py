"""The Triton kernels that grow and cut a draft tree, against tree/candidates.py in torch."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from triton_rig import (
    DEVICE,
    GPU,
    needs_interpreter,
    run_in_the_interpreter,
    runs_kernels,
    triton_backend,
)

from mamba_eagle.backend.triton.candidates import TritonCandidates
from mamba_eagle.kernels.top_log_probs.torch import TopTokens
from mamba_eagle.tree.candidates import Candidates
from mamba_eagle.tree.tree import single_node_tree

on_gpu = pytest.mark.skipif(not GPU, reason="no CUDA device")


@needs_interpreter
def test_in_the_interpreter() -> None:
    run_in_the_interpreter(__file__)


def best_of(kind: str, b: int, lanes: int, topk: int, seed: int) -> TopTokens:
    """Falling log-probabilities of different tokens."""
    generator = torch.Generator().manual_seed(seed)
    values = -3 * torch.rand(b, lanes, topk, generator=generator)
    if kind == "ties":
        values = (values * 2).round() / 2
    elif kind == "certain":  # as good as their parents, and what rounding left above 0
        values[:] = 1e-7
    elif kind == "hopeless":
        values[..., 1:] = -torch.inf
    tokens = torch.rand(b, lanes, 50, generator=generator).argsort(dim=2)[..., :topk]
    return TopTokens(values.sort(dim=2, descending=True).values, tokens)


def assert_same_trees(steps: int, topk: int, nodes: int, b: int, kind: str) -> None:
    roots = torch.arange(7, 7 + b)
    plain = Candidates(roots, topk)
    ours = TritonCandidates(roots.to(DEVICE), topk, steps)
    for step in range(steps):
        best = best_of(kind, b, topk if step else 1, topk, seed=step)
        expected = plain.expand(best)
        for part, wanted in zip(ours.expand(TopTokens(*(p.to(DEVICE) for p in best))), expected):
            assert torch.equal(part.cpu(), wanted)
    for part, wanted in zip(ours.select(nodes), plain.select(nodes)):
        assert part.dtype == wanted.dtype
        assert torch.equal(part.cpu(), wanted)


@runs_kernels
@pytest.mark.parametrize("kind", ["random", "ties", "certain", "hopeless"])
@pytest.mark.parametrize(
    "steps, topk, nodes",
    [(1, 1, 2), (5, 1, 6), (5, 1, 3), (1, 3, 4), (5, 3, 8), (3, 4, 21), (3, 2, 1)],
)
def test_trees_are_those_of_torch(steps: int, topk: int, nodes: int, kind: str) -> None:
    assert_same_trees(steps, topk, nodes, b=3, kind=kind)


@runs_kernels
@pytest.mark.parametrize("kind", ["random", "ties"])
def test_large_trees_are_those_of_torch(kind: str) -> None:
    assert_same_trees(steps=4, topk=16, nodes=64, b=1, kind=kind)


@runs_kernels
def test_torch_takes_over_where_lanes_are_many() -> None:
    backend, root = triton_backend(), torch.tensor([3], device=DEVICE)
    kinds = [type(backend.candidates(root, k, 2)) for k in (16, 17)]
    assert kinds == [TritonCandidates, Candidates]
    assert backend.top_log_probs(torch.randn(2, 40, device=DEVICE), 17).tokens.shape == (2, 17)


@runs_kernels
def test_without_an_expansion_a_tree_is_its_root() -> None:
    roots = torch.tensor([5, 9], device=DEVICE)
    for part, expected in zip(TritonCandidates(roots, 4, 3).select(1), single_node_tree(roots)):
        assert torch.equal(part, expected)


@runs_kernels
def test_more_nodes_than_candidates_are_refused() -> None:
    with pytest.raises(ValueError, match="must be between 1 and 1"):
        TritonCandidates(torch.tensor([3], device=DEVICE), 2, 4).select(2)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("topk, steps, nodes", [(3, 5, 8), (8, 8, 64)])
def test_a_graph_grows_other_trees(topk: int, steps: int, nodes: int) -> None:
    b = 32
    roots = torch.arange(b, device=DEVICE)
    given = [
        TopTokens(*(part.to(DEVICE) for part in best_of("random", b, n, topk, seed)))
        for seed, n in enumerate([1, *[topk] * (steps - 1)])
    ]

    def grow():  # noqa: ANN202
        grown = TritonCandidates(roots, topk, steps)
        for best in given:
            grown.expand(best)
        return grown.select(nodes)

    grow()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tree = grow()
    for kind in ("ties", "random"):
        plain = Candidates(roots.cpu(), topk)
        for seed, best in enumerate(given):
            other = best_of(kind, b, best.tokens.shape[1], topk, seed + 100)
            for part, new in zip(best, other):
                part.copy_(new)
            plain.expand(other)
        graph.replay()
        for part, expected in zip(tree, plain.select(nodes)):
            assert torch.equal(part.cpu(), expected)
