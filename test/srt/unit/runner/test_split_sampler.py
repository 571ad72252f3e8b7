"""Ranks with a part of the vocabulary each sample the token that one rank samples, bit for bit.

MAMBA_EAGLE_CASES gives the number of random batches (CI: 60); each has 24 rows at least.
"""

from __future__ import annotations

import os
import random

import pytest
import torch
from tensor_checks import host_backend
from thread_ranks import ThreadGroup, ThreadRanks
from torch import Tensor

from mamba_eagle.backend.token_ops import TokenLogprobs
from mamba_eagle.core import SamplingParams
from mamba_eagle.kernels.best_token.torch import NO_TOKEN
from mamba_eagle.kernels.top_parts.torch import score_of
from mamba_eagle.parallel.vocabulary import Columns
from mamba_eagle.runner.chooser import Chooser, ShardedChooser
from mamba_eagle.runner.sampler import Scored
from mamba_eagle.runner.sampling_state import SamplingState
from mamba_eagle.tree.tree import Tree, ancestor_matrix

torch.set_num_threads(1)
CASES = int(os.environ.get("MAMBA_EAGLE_CASES", "60"))
REQUESTS, NODES = 6, 5


def random_params(rng: random.Random, vocab: int) -> SamplingParams:
    values = {
        "temperature": rng.choice([0.0, 0.3, 1.0, 1.7, 4.0]),
        "top_k": rng.choice([-1, -1, 1, 2, 7, vocab - 1, vocab]),
        "top_p": rng.choice([1.0, 1.0, 0.2, 0.7, 0.95, 0.9999]),
        "min_p": rng.choice([0.0, 0.0, 0.01, 0.3]),
        "frequency_penalty": rng.choice([0.0, 0.0, 0.7]),
        "presence_penalty": rng.choice([0.0, 0.0, -0.4]),
        "repetition_penalty": rng.choice([1.0, 1.0, 1.3]),
        "min_new_tokens": rng.choice([0, 0, 8]),
        "stop_token_ids": rng.sample(range(vocab), 2),
        "logit_bias": rng.choice([{}, {rng.randrange(vocab): 5.0}]),
        "seed": rng.randrange(2**62),
        "max_new_tokens": 10,
    }
    return SamplingParams(**values)


def random_logits(rng: random.Random, generator: torch.Generator, vocab: int) -> Tensor:
    """With ties between tokens of different ranks, rows of one value, and a few that are broken."""
    logits = torch.randn(REQUESTS, NODES, vocab, generator=generator) * rng.choice([0.1, 3, 30])
    if rng.random() < 0.5:
        logits = (logits * 4).round() / 4  # also -0.0 beside 0.0
    if rng.random() < 0.2:
        logits[0, 0] = 1.5
    if rng.random() < 0.1:
        logits[1, 1, rng.randrange(vocab)] = rng.choice([float("nan"), float("inf")])
    if rng.random() < 0.1:
        logits[2, 2] = -torch.inf
    return logits


def random_tree(rng: random.Random, vocab: int) -> Tree:
    tokens = torch.tensor([[rng.randrange(vocab) for _ in range(NODES)] for _ in range(REQUESTS)])
    parents = [[0, *(rng.randrange(i) for i in range(1, NODES))] for _ in range(REQUESTS)]
    parent = torch.tensor(parents)
    depths = torch.zeros_like(parent)
    for i in range(1, NODES):
        depths[:, i] = depths.gather(1, parent[:, i : i + 1])[:, 0] + 1
    return Tree(tokens, parent, depths, ancestor_matrix(parent, NODES), torch.zeros(parent.shape))


def states(rng: random.Random, vocab: int) -> SamplingState:
    state = SamplingState(REQUESTS, vocab, (0,), host_backend())
    history = [rng.randrange(vocab) for _ in range(12)]
    for slot in range(REQUESTS):
        params = random_params(rng, vocab)
        state.set(slot, params, prompt_len=8, history=history if params.needs_history else [])
    return state


def test_shards_sample_what_one_rank_samples() -> None:
    found: dict[str, int] = {"rows": 0, "no token": 0}
    ranks = {size: ThreadRanks(size) for size in (2, 3, 4)}
    for case in range(CASES):
        rng, generator = random.Random(case), torch.Generator().manual_seed(case)
        vocab, size = rng.choice([5, 97, 512]), rng.choice([2, 3, 4])
        state, logits = states(rng, vocab), random_logits(rng, generator, vocab)
        tree, slots = random_tree(rng, vocab), rng.sample(range(REQUESTS), REQUESTS)
        positions = 8 + tree.depths + rng.randrange(12)
        expected = Chooser(state).sample(Scored(slots, logits.clone(), positions, tree))

        def work(group: ThreadGroup, args=(slots, logits, positions, tree), state=state) -> Tensor:
            chooser = ShardedChooser(state, group)
            slots, logits, positions, tree = args
            own = chooser.columns.of(logits).clone()
            return chooser.sample(Scored(slots, own, positions, tree))

        for got in ranks[size].run(work):
            assert torch.equal(got, expected), f"case {case}"
        found["rows"] += expected.numel()
        found["no token"] += int((expected == NO_TOKEN).sum())
    assert found["rows"] >= 24 * CASES and found["no token"] > 0


@pytest.mark.parametrize("size, top", [(2, 0), (2, 3), (4, 7), (4, 20)])
def test_logprobs_of_shards_are_those_of_one_rank(size: int, top: int) -> None:
    """Also where more of the best are asked for than a rank has tokens."""
    vocab, generator = 33, torch.Generator().manual_seed(1)
    logits = torch.randn(7, vocab, generator=generator) * 4
    tokens = torch.randint(0, vocab, (7, 2), generator=generator)
    state = SamplingState(1, vocab, (), host_backend())
    expected = Chooser(state).logprobs(logits, tokens, top)

    def work(group: ThreadGroup) -> TokenLogprobs:
        chooser = ShardedChooser(state, group)
        return chooser.logprobs(chooser.columns.of(logits), tokens, top)

    for got in ThreadRanks(size).run(work):
        assert torch.allclose(got.logprob, expected.logprob, atol=1e-5)
        assert torch.allclose(got.top_values, expected.top_values, atol=1e-5)
        assert torch.equal(got.top_ids, expected.top_ids)


def test_trees_are_those_of_the_first_rank() -> None:
    """Even if another rank drafted something else: then ranks would accept different paths."""
    state = SamplingState(1, 50, (), host_backend())
    trees = [random_tree(random.Random(seed), 50) for seed in range(3)]

    def work(group: ThreadGroup) -> Tree:
        return ShardedChooser(state, group).agree(trees[group.rank])

    for got in ThreadRanks(3).run(work):
        for part, expected in zip(got[:4], trees[0][:4]):
            assert torch.equal(part, expected)


def test_what_a_grammar_forbids_is_forbidden_on_every_rank() -> None:
    """Whether or not a rank's tokens begin at a word of the mask."""
    vocab, generator = 101, torch.Generator().manual_seed(2)
    scores = torch.randn(6, vocab, generator=generator)
    rows = torch.tensor([4, 0, 5])
    is_allowed = torch.rand(3, vocab, generator=generator) < 0.3
    masks = torch.zeros(3, 4, dtype=torch.int64)
    for token in range(vocab):
        masks[:, token // 32] |= is_allowed[:, token].long() << (token % 32)
    words = masks.to(torch.int32)  # the highest bit becomes the sign
    expected = scores.clone()
    expected[rows] = scores[rows].masked_fill(~is_allowed, -torch.inf)

    def work(group: ThreadGroup) -> Tensor:
        columns = Columns(group, vocab)
        return columns.whole(columns.forbid(columns.of(scores), rows, words))

    for size in (2, 3):
        for got in ThreadRanks(size).run(work):
            assert torch.equal(got, expected)


def test_keys_order_scores_and_give_them_back() -> None:
    scores = torch.tensor([[-torch.inf, -3.5, -0.0, 0.0, 1e-40, 2.0, 2.0, torch.inf]])

    def work(group: ThreadGroup) -> Tensor:
        columns = Columns(group, 8)
        return columns.whole(columns.keys(columns.of(scores)))

    keys = ThreadRanks(3).run(work)[0]
    assert torch.equal(score_of(keys), scores + 0.0)
    order = keys[0].argsort(descending=True).tolist()
    assert order == [7, 5, 6, 4, 2, 3, 1, 0]  # equal scores: the lower id first
