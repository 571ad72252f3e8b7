"""Forced acceptance: paths of the tree, as long as was asked for."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch

from mamba_eagle.kernels.top_log_probs.torch import TopTokens
from mamba_eagle.tree.accept import Accepted, accept
from mamba_eagle.tree.candidates import Candidates
from mamba_eagle.tree.simulate import forced_path
from mamba_eagle.tree.tree import Tree, chain_tree, single_node_tree

STEPS, TOPK, NODES, VOCABULARY = 5, 3, 12, 50


def random_trees(batch: int, seed: int = 0) -> Tree:
    generator = torch.Generator().manual_seed(seed)
    grown = Candidates(torch.arange(batch), TOPK)
    for depth in range(STEPS):
        logits = 4 * torch.randn(batch, TOPK if depth else 1, VOCABULARY, generator=generator)
        grown.expand(TopTokens(*logits.log_softmax(-1).topk(TOPK)))
    return grown.select(NODES)


def targets(tree: Tree) -> torch.Tensor:
    """Tokens that no drafted node has: accept() would accept nothing but the root."""
    return 1000 + torch.arange(tree.tokens.numel()).view(tree.tokens.shape)


def forced(
    tree: Tree, target: torch.Tensor, max_depth: int, length: float | torch.Tensor, step: int
) -> Accepted:
    number = torch.tensor(step).to(target.device)
    return accept(*forced_path(tree, target, max_depth, length, number), max_depth)


def walk(tree: Tree, length: float, step: int) -> Accepted:
    return forced(tree, targets(tree), STEPS, length, step)


@pytest.mark.parametrize("length", [1, 2.5, 3.0, 6])
def test_it_accepts_what_accept_would_if_the_target_agreed_on_the_path(length: float) -> None:
    tree = random_trees(batch=16)
    assert len(set(tree.depths[:, -1].tolist())) > 1  # shallow and deep ones
    for step in range(4):
        made = walk(tree, length, step)
        target = targets(tree)
        for row in range(16):  # the target says what follows on the path, and nothing else
            nodes = made.nodes[row, : made.count[row]]
            target[row, nodes[:-1]] = tree.tokens[row, nodes[1:]]
        honest = accept(tree, target, STEPS)
        assert made.nodes.shape == (16, STEPS + 1)
        for found, expected in zip(made, honest):
            assert torch.equal(found, expected)


@pytest.mark.parametrize("length", [1.0, 2.5, 2.97, 3.0, 10 / 3, 5.9, 6.0])
def test_the_mean_is_what_was_asked_for(length: float) -> None:
    tree = chain_tree(torch.arange(12).view(2, 6))
    counts = [walk(tree, length, step).count.tolist() for step in range(300)]
    assert all(first == second for first, second in counts)
    lengths = [first for first, _ in counts]
    low = int(length)
    assert set(lengths) <= {low, low + 1}
    for steps in range(1, 301):
        assert abs(sum(lengths[:steps]) - steps * Fraction(length)) < 1
    assert walk(tree, length, 7).count.tolist() == counts[7]  # of the step's number alone


def test_a_shallow_tree_gives_what_it_has() -> None:
    tree = random_trees(batch=16)
    assert torch.equal(walk(tree, 6, 0).count, tree.depths[:, -1] + 1)
    root = single_node_tree(torch.tensor([7, 8]))
    made = walk(root, 3.0, 0)
    assert made.count.tolist() == [1, 1] and made.tokens[:, 0].tolist() == [1000, 1001]
    plain = forced(root, targets(root), 0, 1.0, 3)
    assert plain.nodes.tolist() == [[0], [0]] and plain.tokens.tolist() == [[1000], [1001]]


def test_a_length_on_the_device_is_as_good_as_a_number() -> None:
    tree = random_trees(batch=4)
    length = torch.tensor(2.3, dtype=torch.float64)
    made = forced(tree, targets(tree), STEPS, length, 5)
    for found, expected in zip(made, walk(tree, 2.3, 5)):
        assert torch.equal(found, expected)


def test_nothing_of_it_is_read_on_the_host() -> None:
    # shapes are all that is known of a meta tensor: reading a value of one raises
    tree = Tree(*(part.to("meta") for part in random_trees(batch=4)))
    target = tree.tokens.clone()
    made = forced(tree, target, STEPS, 2.5, 0)
    assert made.nodes.shape == made.tokens.shape == (4, STEPS + 1) and made.count.shape == (4,)


def test_no_token_of_the_target_shortens_nothing() -> None:
    """Dummy weights can give logits that sample no token (-1); the length stays as asked."""
    tree = random_trees(batch=4)
    none = torch.full_like(tree.tokens, -1)
    made = forced(tree, none, STEPS, 3.0, 0)
    assert torch.equal(made.count, walk(tree, 3.0, 0).count)
    assert made.tokens.min() >= 0
