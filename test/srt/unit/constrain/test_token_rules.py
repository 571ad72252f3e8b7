"""Tokens and sequences of them that an output may not have."""

from __future__ import annotations

import random

import numpy as np

from mamba_eagle.constrain.place import bits, is_allowed
from mamba_eagle.constrain.token_rules import TokenRules
from mamba_eagle.core import SamplingParams

VOCAB = 64


class Output(list):
    """Counts how often a part of it is read."""

    reads = 0

    def __getitem__(self, place):
        self.reads += 1
        return super().__getitem__(place)


def test_what_may_follow_is_what_completes_no_sequence() -> None:
    dice = random.Random(5)
    for _ in range(200):
        banned = [[dice.randrange(3) for _ in range(dice.randrange(1, 5))] for _ in range(6)]
        rules = TokenRules(SamplingParams(bad_word_ids=banned), VOCAB // 32)
        output = [dice.randrange(3) for _ in range(dice.randrange(6))]
        mask = np.full(VOCAB // 32, ~np.uint32(0))
        rules.restrict(mask, output)
        for token in range(VOCAB):
            whole = [*output, token]
            allowed = not any(whole[-len(ids) :] == ids for ids in banned)
            assert rules.allows(token, output) == is_allowed(mask, token) == allowed


def test_an_output_is_not_compared_with_each_of_many_sequences() -> None:
    """65,536 that begin alike took 35 ms for each token of a tree, and 126 for each mask."""
    banned = [[1, 2, 3 + i % 50] for i in range(1000)]
    rules, output = TokenRules(SamplingParams(bad_word_ids=banned), VOCAB // 32), Output([1, 2])
    assert rules.allows(60, output) and not rules.allows(3, output)
    rules.restrict(bits(range(VOCAB), VOCAB // 32), output)
    assert output.reads < 10
