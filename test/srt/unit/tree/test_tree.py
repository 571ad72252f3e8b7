"""Draft trees against a plain reference of EAGLE-2 in dicts."""

from __future__ import annotations

import pytest
import torch

from mamba_eagle.kernels.top_log_probs.torch import TopTokens
from mamba_eagle.tree.candidates import Candidates, Frontier
from mamba_eagle.tree.tree import (
    Tree,
    ancestor_matrix,
    chain_prefix,
    chain_tree,
    single_node_tree,
)

torch.set_num_threads(1)
VOCAB = 50

SHAPES = [
    pytest.param(1, 1, 2, id="one-step-chain"),
    pytest.param(1, 5, 6, id="whole-chain"),
    pytest.param(1, 5, 3, id="cut-chain"),
    pytest.param(2, 1, 3, id="star"),
    pytest.param(2, 3, 6, id="small"),
    pytest.param(4, 4, 12, id="default"),
    pytest.param(4, 4, 53, id="all-candidates"),
    pytest.param(8, 6, 64, id="large"),
]


def peaked_log_probs(step: int, lanes: int, batch: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step * 1000 + batch)
    return (3 * torch.randn(batch, lanes, VOCAB, generator=generator)).log_softmax(-1)


def tied_log_probs(step: int, lanes: int, batch: int) -> torch.Tensor:
    """Few distinct values, 0.0 among them: many equal scores, children as good as their parent."""
    generator = torch.Generator().manual_seed(step * 1000 + batch)
    return -torch.randint(0, 3, (batch, lanes, VOCAB), generator=generator).float() / 2


def certain_log_probs(step: int, lanes: int, batch: int) -> torch.Tensor:
    """Everything has log-probability 0.0."""
    return torch.zeros(batch, lanes, VOCAB)


def hopeless_log_probs(step: int, lanes: int, batch: int) -> torch.Tensor:
    """One possible token; the other children have probability 0."""
    log_probs = torch.full((batch, lanes, VOCAB), -torch.inf)
    log_probs[..., 7] = 0.0
    return log_probs


def rounded_log_probs(step: int, lanes: int, batch: int) -> torch.Tensor:
    """A log-probability that a sloppy log_softmax left above 0."""
    return peaked_log_probs(step, lanes, batch).clamp(min=-1.0) + 1.001


SOURCES = [
    peaked_log_probs,
    tied_log_probs,
    certain_log_probs,
    hopeless_log_probs,
    rounded_log_probs,
]


def best_of(log_probs: torch.Tensor, topk: int) -> TopTokens:
    return TopTokens(*log_probs.topk(topk, dim=-1))


def build(source, topk: int, steps: int, nodes: int, batch: int) -> tuple[Tree, list[Frontier]]:
    candidates = Candidates(torch.arange(batch), topk)
    frontiers = [
        candidates.expand(best_of(source(step, 1 if step == 0 else topk, batch), topk))
        for step in range(steps)
    ]
    return candidates.select(nodes), frontiers


def reference(source, topk: int, steps: int, nodes: int, batch: int, row: int) -> list[dict]:
    """EAGLE-2 for one request, one candidate after the other."""
    root = {"token": row, "parent": None, "depth": 0, "score": 0.0, "number": 0}
    seen, frontier = [root], [root]
    for step in range(steps):
        log_probs = source(step, len(frontier), batch)[row]
        children = []
        for lane, parent in enumerate(frontier):
            values, tokens = log_probs[lane].topk(topk)
            for value, token in zip(values.tolist(), tokens.tolist()):
                # in float32, as the tree's own sums are
                score = torch.tensor(parent["score"]) + torch.tensor(min(value, 0.0))
                child = {
                    "token": token,
                    "parent": parent,
                    "depth": step + 1,
                    "score": score.item(),
                    "number": len(seen),
                }
                children.append(child)
                seen.append(child)
        frontier = sorted(children, key=lambda c: (-c["score"], c["number"]))[:topk]
    best = sorted(seen, key=lambda c: (-c["score"], c["number"]))[:nodes]
    return sorted(best, key=lambda c: (c["depth"], -c["score"], c["number"]))


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(("topk", "steps", "nodes"), SHAPES)
def test_tree_equals_the_reference(source, topk: int, steps: int, nodes: int) -> None:
    batch = 3
    tree, _ = build(source, topk, steps, nodes, batch)
    for row in range(batch):
        expected = reference(source, topk, steps, nodes, batch, row)
        place = {node["number"]: index for index, node in enumerate(expected)}
        assert all(node["parent"] is None or node["parent"]["number"] in place for node in expected)
        assert tree.tokens[row].tolist() == [node["token"] for node in expected]
        assert tree.depths[row].tolist() == [node["depth"] for node in expected]
        assert tree.scores[row].tolist() == [node["score"] for node in expected]
        assert tree.parents[row].tolist() == [
            0 if node["parent"] is None else place[node["parent"]["number"]] for node in expected
        ]


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(("topk", "steps", "nodes"), SHAPES)
def test_parents_come_first_and_siblings_differ(source, topk: int, steps: int, nodes: int) -> None:
    tree, _ = build(source, topk, steps, nodes, batch=2)
    for parents, depths, tokens in zip(tree.parents, tree.depths, tree.tokens):
        assert depths[0] == 0
        children = set()
        for node in range(1, nodes):
            parent = int(parents[node])
            assert parent < node
            assert depths[node] == depths[parent] + 1
            assert (parent, int(tokens[node])) not in children
            children.add((parent, int(tokens[node])))


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(("topk", "steps", "nodes"), SHAPES)
def test_ancestors_are_the_path_to_the_root(source, topk: int, steps: int, nodes: int) -> None:
    tree, _ = build(source, topk, steps, nodes, batch=2)
    for parents, ancestors in zip(tree.parents.tolist(), tree.ancestors):
        for node in range(nodes):
            path = {node, 0}
            above = node
            while above:
                above = parents[above]
                path.add(above)
            assert set(ancestors[node].nonzero()[:, 0].tolist()) == path


@pytest.mark.parametrize("depth", [1, 2, 3, 7, 63])
def test_ancestors_of_a_chain_are_the_causal_mask(depth: int) -> None:
    parents = torch.arange(-1, depth).clamp(min=0).unsqueeze(0)
    causal = torch.ones(depth + 1, depth + 1).tril().bool()
    assert torch.equal(ancestor_matrix(parents, depth)[0], causal)


def test_the_head_of_a_chain_is_a_shorter_chain() -> None:
    tokens = torch.randint(0, VOCAB, (3, 4))
    for part, expected in zip(
        chain_prefix(chain_tree(torch.zeros(1, 9, dtype=torch.int64)), tokens), chain_tree(tokens)
    ):
        assert torch.equal(part, expected)


def test_topk_one_is_a_chain() -> None:
    tree, _ = build(peaked_log_probs, 1, 5, 6, batch=2)
    assert tree.parents.tolist() == [[0, 0, 1, 2, 3, 4]] * 2
    assert tree.depths.tolist() == [[0, 1, 2, 3, 4, 5]] * 2


def test_frontier_says_which_lane_each_token_extends() -> None:
    topk, steps, batch = 3, 4, 2
    _, frontiers = build(peaked_log_probs, topk, steps, 10, batch)
    previous = torch.zeros(batch, 1)
    for step, frontier in enumerate(frontiers):
        log_probs = peaked_log_probs(step, previous.shape[1], batch)
        assert frontier.tokens.shape == frontier.lanes.shape == frontier.scores.shape
        for row in range(batch):
            for lane in range(topk):
                parent, token = int(frontier.lanes[row, lane]), int(frontier.tokens[row, lane])
                expected = previous[row, parent] + log_probs[row, parent, token]
                assert frontier.scores[row, lane] == expected
        assert torch.equal(frontier.scores, frontier.scores.sort(dim=1, descending=True).values)
        previous = frontier.scores


def test_a_tree_does_not_depend_on_its_batch() -> None:
    log_probs = [peaked_log_probs(step, 1 if step == 0 else 4, 5) for step in range(4)]
    together, alone = Candidates(torch.arange(5), 4), Candidates(torch.tensor([3]), 4)
    for step in log_probs:
        together.expand(best_of(step, 4))
        alone.expand(best_of(step[3:4], 4))
    for all_rows, one_row in zip(together.select(12), alone.select(12)):
        assert torch.equal(all_rows[3:4], one_row)


def test_single_node_tree_is_only_the_root() -> None:
    tree = single_node_tree(torch.tensor([5, 9]))
    selected = Candidates(torch.tensor([5, 9]), 4).select(1)
    for single, expected in zip(tree, selected):
        assert torch.equal(single, expected)
        assert single.dtype == expected.dtype


@pytest.mark.parametrize("nodes", [0, 8])
def test_a_tree_larger_than_its_candidates_is_refused(nodes: int) -> None:
    candidates = Candidates(torch.tensor([0]), 2)
    candidates.expand(best_of(peaked_log_probs(0, 1, 1), 2))
    candidates.expand(best_of(peaked_log_probs(1, 2, 1), 2))
    with pytest.raises(ValueError, match=f"num_nodes = {nodes}: must be between 1 and 7"):
        candidates.select(nodes)
