"""Growing a draft tree and keeping its best nodes, in each form against naive.py.

Scores are multiples of 1/1024, so that their sums are exact and equal ones are equal in any
precision.
"""

from __future__ import annotations

import pytest
import torch
from forms import DEVICE, GPU, backend_of, device_of, every_form, in_the_interpreter, runs_kernels
from torch import Tensor

from mamba_eagle.kernels.draft_tree import naive
from mamba_eagle.kernels.top_log_probs.torch import TopTokens
from mamba_eagle.tree.candidates import Candidates
from mamba_eagle.tree.tree import Tree, single_node_tree

torch.set_num_threads(1)

SHAPES = [(1, 1, 2), (7, 1, 8), (5, 1, 3), (1, 3, 4), (5, 3, 8), (4, 4, 21), (3, 5, 1), (3, 2, 9)]
GPU_SHAPES = [(5, 3, 8), (8, 8, 64)]

test_in_the_interpreter = in_the_interpreter


def named(shapes: list[tuple[int, int, int]]) -> list[str]:
    return [f"depth{depth}-topk{topk}-nodes{nodes}" for depth, topk, nodes in shapes]


def make(form: str, roots: Tensor, topk: int, depth: int) -> Candidates:
    grown = backend_of(form).candidates(roots.to(device_of(form)), topk, depth)
    kinds = {"torch": "Candidates", "cpu": "CpuCandidates", "triton": "TritonCandidates"}
    assert type(grown).__name__ == kinds[form]
    return grown


def best_of(kind: str, b: int, lanes: int, topk: int, seed: int) -> TopTokens:
    """Falling log-probabilities of different tokens."""
    generator = torch.Generator().manual_seed(seed)
    values = -torch.randint(0, 3072, (b, lanes, topk), generator=generator) / 1024
    if kind == "sharp":  # trees are deep
        values[..., 1:] -= 8
    elif kind == "ties":
        values = (values * 2).round() / 2
    elif kind == "certain":  # as good as their parents, and what rounding left above 0
        values[:] = 1e-7
    elif kind == "hopeless":
        values[..., 1:] = -torch.inf
    elif kind == "overflown":  # one request has none, others miss some
        values[0] = torch.nan
        values[1:, :, 0] = torch.nan
        values[1:, 0] = torch.inf
    tokens = torch.rand(b, lanes, 50, generator=generator).argsort(dim=2)[..., :topk]
    return TopTokens(values.sort(dim=2, descending=True).values, tokens)


def in_python(best: TopTokens, r: int) -> list[list[tuple[int, float]]]:
    """Request r: each lane's tokens and log-probabilities."""
    return [list(zip(*lane)) for lane in zip(best.tokens[r].tolist(), best.log_probs[r].tolist())]


def assert_tree(found: Tree, r: int, wanted: naive.DraftTree) -> None:
    for name, part in found._asdict().items():
        assert part[r].tolist() == getattr(wanted, name), name


def check(form: str, depth: int, topk: int, nodes: int, b: int, kind: str) -> None:
    roots = torch.arange(7, 7 + b)
    grown = make(form, roots, topk, depth)
    wanted = [naive.Candidates(root, topk) for root in roots.tolist()]
    for level in range(depth):
        best = best_of(kind, b, topk if level else 1, topk, seed=level)
        frontier = grown.expand(TopTokens(*(part.to(device_of(form)) for part in best)))
        for r, plain in enumerate(wanted):
            lanes = plain.expand(in_python(best, r))
            assert frontier.tokens[r].tolist() == [lane.token for lane in lanes]
            assert frontier.lanes[r].tolist() == [lane.lane for lane in lanes]
            assert frontier.scores[r].tolist() == [lane.score for lane in lanes]
    tree = grown.select(nodes)
    assert tree.ancestors.dtype == torch.bool and tree.scores.dtype == torch.float32
    for r, plain in enumerate(wanted):
        assert_tree(tree, r, plain.select(nodes))


@every_form
@pytest.mark.parametrize("kind", ["flat", "sharp", "ties", "certain", "hopeless", "overflown"])
@pytest.mark.parametrize("depth, topk, nodes", SHAPES, ids=named(SHAPES))
def test_trees_are_the_best_candidates(
    form: str, depth: int, topk: int, nodes: int, kind: str
) -> None:
    check(form, depth, topk, nodes, b=3, kind=kind)


@every_form
def test_lanes_may_share_their_rows(form: str) -> None:
    """As those of a block, in which each depth has one distribution."""
    device, topk = device_of(form), 3
    rows = best_of("flat", 2, 2, topk, seed=5)  # [b, depths, k]
    shared, apart = (make(form, torch.tensor([4, 9]), topk, 2) for _ in range(2))
    for depth, lanes in enumerate((1, topk)):
        row = [part.to(device)[:, depth : depth + 1].expand(-1, lanes, -1) for part in rows]
        found = shared.expand(TopTokens(*row))
        wanted = apart.expand(TopTokens(*(part.contiguous() for part in row)))
        assert all(map(torch.equal, found, wanted))
    assert all(map(torch.equal, shared.select(8), apart.select(8)))


@every_form
@pytest.mark.parametrize("kind", ["flat", "ties"])
def test_large_trees_are_the_best_candidates(form: str, kind: str) -> None:
    check(form, depth=4, topk=16, nodes=64, b=1, kind=kind)


def test_a_tree_worked_out_by_hand() -> None:
    """root 3 → 4 (-1), 5 (-2); 4 → 6 (-1-0.5), 7 (-1-4); 5 → 8 (-2-0.25), 9 (-2-1)."""
    grown = naive.Candidates(3, 2)
    assert grown.expand([[(4, -1.0), (5, -2.0)]]) == [(4, 0, 1, -1.0), (5, 0, 2, -2.0)]
    lanes = grown.expand([[(6, -0.5), (7, -4.0)], [(8, -0.25), (9, -1.0)]])
    assert lanes == [(6, 0, 3, -1.5), (8, 1, 5, -2.25)]
    tree = grown.select(5)
    assert tree.tokens == [3, 4, 5, 6, 8]
    assert (tree.parents, tree.depths) == ([0, 0, 0, 1, 2], [0, 1, 1, 2, 2])
    assert tree.scores == [0.0, -1.0, -2.0, -1.5, -2.25]
    assert tree.ancestors[4] == [True, False, True, False, True]


@every_form
def test_without_an_expansion_a_tree_is_its_root(form: str) -> None:
    roots = torch.tensor([5, 9])
    for part, expected in zip(make(form, roots, 4, 3).select(1), single_node_tree(roots)):
        assert torch.equal(part.cpu(), expected)


@every_form
def test_more_nodes_than_candidates_are_refused(form: str) -> None:
    with pytest.raises(ValueError, match="must be between 1 and 1"):
        make(form, torch.tensor([3]), 2, 4).select(2)


@runs_kernels
def test_torch_takes_over_where_lanes_are_many() -> None:
    backend, root = backend_of("triton"), torch.tensor([3], device=DEVICE)
    kinds = [type(backend.candidates(root, k, 2)) for k in (16, 17)]
    assert [kind.__name__ for kind in kinds] == ["TritonCandidates", "Candidates"]
    assert backend.top_log_probs(torch.randn(2, 40, device=DEVICE), 17).tokens.shape == (2, 17)


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="no CUDA device")
@pytest.mark.parametrize("depth, topk, nodes", GPU_SHAPES, ids=named(GPU_SHAPES))
def test_a_graph_grows_other_trees(depth: int, topk: int, nodes: int) -> None:
    b = 32
    roots = torch.arange(b, device=DEVICE)
    given = [
        TopTokens(*(part.to(DEVICE) for part in best_of("flat", b, n, topk, seed)))
        for seed, n in enumerate([1, *[topk] * (depth - 1)])
    ]

    def grow() -> Tree:
        grown = make("triton", roots, topk, depth)
        for best in given:
            grown.expand(best)
        return grown.select(nodes)

    grow()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tree = grow()
    for kind in ("ties", "flat"):
        wanted = [naive.Candidates(root, topk) for root in roots.tolist()]
        for seed, best in enumerate(given):
            other = best_of(kind, b, best.tokens.shape[1], topk, seed + 100)
            for part, new in zip(best, other):
                part.copy_(new)
            for r, plain in enumerate(wanted):
                plain.expand(in_python(other, r))
        graph.replay()
        for r, plain in enumerate(wanted):
            assert_tree(tree, r, plain.select(nodes))
