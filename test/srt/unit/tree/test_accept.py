"""Accepting and cutting against walks in plain Python."""

from __future__ import annotations

import pytest
import torch
from tensor_checks import torch_backend

from mamba_eagle.backend.pools import RequestTable
from mamba_eagle.tree.accept import Accepted, accept, truncate
from mamba_eagle.tree.tree import Tree, ancestor_matrix, single_node_tree

torch.set_num_threads(1)


def random_tree(batch: int, nodes: int, vocab: int, generator: torch.Generator) -> Tree:
    """Any shape; siblings have different tokens."""
    parents = torch.zeros(batch, nodes, dtype=torch.int64)
    tokens = torch.randint(0, vocab, (batch, nodes), generator=generator)
    depths = torch.zeros_like(parents)
    for row in range(batch):
        taken: set[tuple[int, int]] = set()
        for node in range(1, nodes):
            parent = int(torch.randint(max(0, node - 4), node, (), generator=generator))
            while (parent, int(tokens[row, node])) in taken:
                tokens[row, node] = (tokens[row, node] + 1) % vocab
            taken.add((parent, int(tokens[row, node])))
            parents[row, node] = parent
            depths[row, node] = depths[row, parent] + 1
    return Tree(tokens, parents, depths, ancestor_matrix(parents, nodes), torch.zeros(batch, nodes))


def walk(tokens: list[int], parents: list[int], targets: list[int]) -> tuple[list[int], list[int]]:
    path = [0]
    while True:
        follows = [
            node
            for node in range(1, len(tokens))
            if parents[node] == path[-1] and tokens[node] == targets[path[-1]]
        ]
        if not follows:
            return path, [targets[node] for node in path]
        path.append(follows[0])


@pytest.mark.parametrize("nodes", [1, 2, 5, 12, 40])
@pytest.mark.parametrize("vocab", [9, 12], ids="vocab{}".format)
def test_accept_equals_a_walk(nodes: int, vocab: int) -> None:
    generator = torch.Generator().manual_seed(nodes)
    lengths = set()
    for _ in range(20):
        tree = random_tree(4, nodes, vocab, generator)
        # targets that often agree with one of the children
        targets = torch.randint(0, vocab, (4, nodes), generator=generator)
        follow = torch.rand(4, nodes, generator=generator) < 0.8
        targets.scatter_(1, tree.parents, torch.where(follow, tree.tokens, vocab - 1))
        max_depth = int(tree.depths.max())
        accepted = accept(tree, targets, max_depth)
        assert accepted.nodes.shape == accepted.tokens.shape == (4, max_depth + 1)
        for row in range(4):
            path, new = walk(
                tree.tokens[row].tolist(), tree.parents[row].tolist(), targets[row].tolist()
            )
            count = int(accepted.count[row])
            lengths.add(count)
            assert count == len(path)
            assert accepted.nodes[row].tolist() == path + path[-1:] * (max_depth + 1 - count)
            assert accepted.tokens[row, :count].tolist() == new
            assert new[:-1] == tree.tokens[row, path[1:]].tolist()
    assert nodes == 1 or len(lengths) > 1, "the case never accepted a draft"


def test_one_node_gives_the_target_token() -> None:
    accepted = accept(single_node_tree(torch.tensor([3, 4])), torch.tensor([[7], [8]]), 0)
    assert accepted.nodes.tolist() == [[0], [0]]
    assert accepted.tokens.tolist() == [[7], [8]]
    assert accepted.count.tolist() == [1, 1]


def test_a_root_that_repeats_itself_is_not_its_own_child() -> None:
    """The root's parent index is 0, and the target's token at 0 may be the root's token."""
    accepted = accept(single_node_tree(torch.tensor([3])), torch.tensor([[3]]), 0)
    assert accepted.count.tolist() == [1]
    chain = Tree(
        torch.tensor([[3, 9]]),
        torch.tensor([[0, 0]]),
        torch.tensor([[0, 1]]),
        torch.ones(1, 2, 2).tril().bool(),
        torch.zeros(1, 2),
    )
    assert accept(chain, torch.tensor([[3, 1]]), 1).count.tolist() == [1]


def test_of_equal_siblings_the_first_wins() -> None:
    parents = torch.tensor([[0, 0, 0, 1, 2]])
    tokens = torch.tensor([[0, 5, 5, 6, 6]])
    tree = Tree(tokens, parents, torch.tensor([[0, 1, 1, 2, 2]]), parents, parents)
    accepted = accept(tree, torch.tensor([[5, 6, 6, 1, 2]]), 2)
    assert accepted.nodes.tolist() == [[0, 1, 3]]
    assert accepted.tokens.tolist() == [[5, 6, 1]]


def accepted_rows(rows: list[list[int]], width: int = 4) -> Accepted:
    """Accepted tokens, padded with a stop token (2) that must not be read."""
    padded = [row + [2] * (width - len(row)) for row in rows]
    nodes = torch.arange(width).repeat(len(rows), 1)
    return Accepted(nodes, torch.tensor(padded), torch.tensor([len(row) for row in rows]))


@pytest.mark.parametrize(
    ("tokens", "remaining", "count", "finished"),
    [
        pytest.param([5, 6, 7], 9, 3, False, id="goes-on"),
        pytest.param([5, 6, 7, 8], 9, 4, False, id="goes-on-full"),
        pytest.param([5, 2, 7], 9, 2, True, id="stops-in-between"),
        pytest.param([2, 6, 7], 9, 1, True, id="stops-at-the-first"),
        pytest.param([5, 6, 2], 9, 3, True, id="stops-at-the-bonus"),
        pytest.param([5, 2, 3], 9, 2, True, id="two-stops"),
        pytest.param([5, 6, 3], 9, 3, True, id="second-stop-token"),
        pytest.param([5, 6, 7], 3, 3, True, id="exactly-used-up"),
        pytest.param([5, 6, 7], 2, 2, True, id="used-up-within"),
        pytest.param([5, 6, 2], 2, 2, True, id="used-up-before-the-stop"),
        pytest.param([5, 2, 7], 2, 2, True, id="used-up-at-the-stop"),
        pytest.param([5, 6, 7], 0, 0, True, id="was-over"),
        pytest.param([2, 6, 7], 0, 0, True, id="was-over-and-stops"),
        pytest.param([5, 6, 7], -3, 0, True, id="overdrawn"),
        pytest.param([-1, 6, 7], 9, 0, False, id="no-token"),
        pytest.param([5, -1, 7], 9, 1, False, id="no-token-in-between"),
        pytest.param([5, 6, -1], 9, 2, False, id="no-token-as-the-bonus"),
        pytest.param([2, -1, 7], 9, 1, True, id="stops-before-no-token"),
        pytest.param([5, -1, 2], 9, 1, False, id="no-token-before-the-stop"),
        pytest.param([5, -1, 7], 1, 1, True, id="used-up-before-no-token"),
    ],
)
def test_truncate(tokens: list[int], remaining: int, count: int, finished: bool) -> None:
    # beside a request that goes on, and whose stop tokens are other ones
    cut = truncate(
        accepted_rows([tokens, [2, 3, 4]]),
        torch.tensor([[2, 3, -1], [9, -1, -1]]),
        torch.tensor([remaining, 100]),
    )
    assert cut.count.tolist() == [count, 3]
    assert cut.finished.tolist() == [finished, False]
    assert cut.tokens[0, :count].tolist() == tokens[:count]
    assert cut.tokens.min() >= 0, "tables of later steps are looked up with them"


def test_truncate_without_stop_tokens() -> None:
    cut = truncate(accepted_rows([[5, 2]]), torch.empty(1, 0, dtype=torch.int64), torch.tensor([8]))
    assert (cut.count.tolist(), cut.finished.tolist()) == ([2], [False])


def test_from_draft_to_commit_no_value_is_read_on_the_host() -> None:
    """On the meta device there are none: reading one (int, bool, a mask as an index) raises."""
    meta, requests, topk, nodes = torch.device("meta"), 3, 2, 6
    table = RequestTable(5, 40, meta)
    table.stop_tokens = torch.full((5, 2), -1, device=meta)
    slots = torch.arange(requests, device=meta)
    backend = torch_backend()
    grown = backend.candidates(table.last_token[slots], topk, depth=3)
    for lanes in (1, topk, topk):
        logits = torch.zeros(requests * lanes, 50, device=meta)
        grown.expand(backend.top_log_probs(logits, topk).unflatten((requests, lanes)))
    tree = grown.select(nodes)
    targets = kv_slots = torch.zeros_like(tree.tokens)
    accepted = backend.accept_tokens(table, slots, tree, targets, max_depth=3)
    backend.commit_tokens(table, slots, kv_slots, accepted)
    assert accepted.tokens.shape == (requests, 4)
    with pytest.raises(RuntimeError):
        int(accepted.count[0])
