"""Delta rules in torch against the recurrence, token by token in float64: Mamba2, gated DeltaNet
with beta up to 1 and 2, a decay per channel with bounded and unbounded gates, and GDN-2."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tensor_checks import relative_error
from torch import Tensor

from mamba_eagle.kernels.delta_rule import naive
from mamba_eagle.kernels.delta_rule.torch import (
    Rows,
    Tokens,
    chunked,
    fold,
    snapshot_verify,
    tree_verify,
)

torch.set_num_threads(1)
H, V, K = 3, 5, 8


class Draw:
    """Random tokens of a rule."""

    def __init__(self, rule: str, seed: int) -> None:
        self.rule, self.generator = rule, torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def below(self, high: int) -> int:
        return int(torch.randint(high, (), generator=self.generator))

    def tokens(self, n: int) -> naive.Tokens:
        q, v = self.normal(n, H, K), self.normal(n, H, V)
        k = F.normalize(self.normal(n, H, K), dim=-1)
        share = self.normal(n, H, K).sigmoid()
        channels = self.normal(n, H, K)
        g, beta = -F.softplus(self.normal(n, H)), share[..., 0]
        match self.rule:
            case "mamba2":
                return naive.mamba2(v, -g, -torch.ones(H), k, q)
            case "gdn":
                return naive.gated_delta(q, k, v, g, beta)
            case "gdn-beta-2":
                return naive.gated_delta(q, k, v, g, 2 * beta)
            case "kda-bounded":
                return naive.gated_delta(q, k, v, -5 * channels.sigmoid(), beta)
            case "kda-unbounded":
                return naive.gated_delta(q, k, v, -(3 * channels).exp(), beta)
            case _:
                return naive.gated_delta_2(q, k, v, -F.softplus(channels), share, v.sigmoid())

    def parents(self, n: int) -> list[int]:
        return [0] + [max(0, i - 1 - self.below(3)) for i in range(1, n)]


RULES = ["mamba2", "gdn", "gdn-beta-2", "kda-bounded", "kda-unbounded", "gdn-2"]
every_rule = pytest.mark.parametrize("rule", RULES)


def ours(tokens: naive.Tokens) -> Tokens:
    return Tokens(*(part.transpose(0, 1)[None] for part in tokens))


def rows_of(tokens: naive.Tokens, nodes: list[naive.Node], spare: int = 0) -> Rows:
    """The rows of accepted tokens, and ``spare`` ones past the journal's end."""
    u = [*(node.u.float()[:, None] for node in nodes), torch.full((H, spare, V), 7.0)]
    k, g = (F.pad(part.transpose(0, 1), (0, 0, 0, spare)) for part in (tokens.k, tokens.g))
    return Rows(k[None], torch.cat(u, dim=1)[None], g[None])


def ancestors_of(parents: list[int]) -> Tensor:
    seen = torch.eye(len(parents))
    for i, parent in enumerate(parents):
        seen[i] = torch.maximum(seen[i], seen[parent])
    return seen


@every_rule
def test_trees_below_journals_are_the_recurrence(rule: str) -> None:
    """Outputs and rows of random trees, then the fold of the journal and an accepted path."""
    for seed in range(12):
        draw = Draw(rule, seed)
        state = draw.normal(H, V, K)
        accepted, tree = draw.tokens(1 + draw.below(7)), draw.tokens(n := 1 + draw.below(20))
        journal = naive.chain(accepted, state)
        parents = draw.parents(n)
        expected = naive.tree(tree, parents, journal[-1].state)
        seen = ancestors_of(parents)
        rows = rows_of(accepted, journal, spare=seed % 3)
        o, u = tree_verify(rows, ours(tree), seen[None], state[None])
        for i, node in enumerate(expected):
            assert relative_error(o[0, :, i], node.o) < 2e-5
            assert relative_error(u[0, :, i], node.u) < 2e-5
        end = draw.below(n)
        path = seen[end].nonzero()[:, 0]
        k, g = (part[:, :, path] for part in (ours(tree).k, ours(tree).g))
        whole = rows_of(accepted, journal)
        grown = Rows(*(torch.cat(both, 2) for both in zip(whole, (k, u[:, :, path], g))))
        assert relative_error(fold(grown, state[None])[0], expected[end].state) < 1e-5


@every_rule
def test_one_node_below_a_journal_is_the_next_token(rule: str) -> None:
    draw = Draw(rule, 5)
    state, tokens = draw.normal(H, V, K), draw.tokens(30)
    expected, rows = naive.chain(tokens, state), rows_of(draw.tokens(0), [])
    for i, node in enumerate(expected):
        one = Tokens(*(part[:, :, i : i + 1] for part in ours(tokens)))
        o, u = tree_verify(rows, one, torch.ones(1, 1, 1), state[None])
        assert relative_error(o[0, :, 0], node.o) < 2e-5
        rows = Rows(*(torch.cat(both, 2) for both in zip(rows, (one.k, u, one.g))))


@every_rule
def test_snapshots_are_the_recurrence(rule: str) -> None:
    draw = Draw(rule, 3)
    state, tokens, parents = draw.normal(H, V, K), draw.tokens(14), draw.parents(14)
    expected = naive.tree(tokens, parents, state)
    o, states = snapshot_verify(ours(tokens), state[None], torch.tensor([parents]))
    for i, node in enumerate(expected):
        assert relative_error(o[0, :, i], node.o) < 1e-5
        assert relative_error(states[0, i], node.state) < 1e-5


@pytest.mark.parametrize("chunk", [1, 4, 16])
@every_rule
def test_prompts_by_chunks_are_the_recurrence(rule: str, chunk: int) -> None:
    """From any state, of any length, and in two parts as in one."""
    draw = Draw(rule, chunk)
    state, tokens = draw.normal(H, V, K), draw.tokens(37)
    expected = naive.chain(tokens, state)
    o, last = chunked(ours(tokens), state[None], chunk)
    for i, node in enumerate(expected):
        assert relative_error(o[0, :, i], node.o) < 2e-5
    assert relative_error(last[0], expected[-1].state) < 1e-5
    first, second = (
        Tokens(*(p[:, :, cut] for p in ours(tokens))) for cut in (slice(21), slice(21, None))
    )
    again = chunked(second, chunked(first, state[None], chunk).state, chunk)
    assert relative_error(again.state[0], expected[-1].state) < 1e-5


def test_nodes_off_the_path_may_have_any_decay() -> None:
    """The mask comes before the exponential: a sibling that forgot everything changes nothing."""
    draw = Draw("kda-unbounded", 1)
    tokens = ours(draw.tokens(4))
    tokens.g[:, :, 1] = -1e4
    state, parents = draw.normal(1, H, V, K), [0, 0, 0, 2]
    seen = ancestors_of(parents)[None]
    o, _ = tree_verify(
        Rows(*(part[:, :, :0] for part in (tokens.k, tokens.r, tokens.g))), tokens, seen, state
    )
    assert o.isfinite().all()
    expected = naive.tree(
        naive.Tokens(*(part[0].transpose(0, 1) for part in tokens)), parents, state[0]
    )
    assert relative_error(o[0, :, 3], expected[3].o) < 2e-5
