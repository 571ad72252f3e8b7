"""Which answers a step trains on, and what is counted in them."""

from __future__ import annotations

import random

import torch

from mamba_eagle.train.batches import (
    LENGTH_MULTIPLE,
    Answer,
    Batches,
    group_into_passes,
    pad_answers,
    split_held_out,
    usable_answers,
)
from mamba_eagle.train.prompts import Example
from mamba_eagle.train.trainer import LR_FLOOR, WARM_UP, cosine

CPU = torch.device("cpu")


def some_answers(count: int) -> list[Answer]:
    """Each of tokens of its own, so that they can be told apart."""
    rng = random.Random(1)
    sizes = [(rng.randint(1, 9), rng.randint(2, 30)) for _ in range(count)]
    return [Answer([i] * (prompt + answer), prompt) for i, (prompt, answer) in enumerate(sizes)]


def test_an_epoch_shows_each_answer_once_whatever_the_number_of_processes() -> None:
    answers = some_answers(24)
    batches = Batches(answers, batch_size=6, micro_tokens=80, depth=2, seed=0)
    epochs = []
    for epoch in range(2):
        seen = []
        for step in range(epoch * 4, epoch * 4 + 4):
            parts = [batches.step(step, rank, 3).passes for rank in range(3)]
            shown = [a.tokens[0] for part in parts for group in part for a in group]
            alone = [a.tokens[0] for group in batches.step(step, 0, 1).passes for a in group]
            assert sorted(shown) == sorted(alone) and len(shown) == 6
            seen += shown
        assert sorted(seen) == list(range(24))
        epochs.append(seen)
    assert epochs[0] != epochs[1]


def test_batches_have_answers_of_like_length() -> None:
    """Of whole epochs, whose number of answers is no multiple of the batch's."""
    batches = Batches(some_answers(400), batch_size=6, micro_tokens=1000, depth=2, seed=0)
    tokens = padded = 0
    for number in range(400):
        (batch,) = batches.step(number, 0, 1).passes
        tokens += sum(len(answer.tokens) for answer in batch)
        padded += len(batch) * max(len(answer.tokens) for answer in batch)
    assert padded < 1.25 * tokens  # 1.6 of batches drawn one by one


def test_a_pass_has_no_more_tokens_than_allowed_unless_one_answer_is_longer() -> None:
    answers = some_answers(40)
    groups = group_into_passes(answers, 60)
    assert sorted(a.tokens[0] for group in groups for a in group) == list(range(40))
    assert all(len(group) * max(len(a.tokens) for a in group) <= 60 for group in groups)
    assert [len(group) for group in group_into_passes(answers, 1)] == [1] * 40


def test_guesses_are_the_marked_places() -> None:
    answers = some_answers(10)
    padded = pad_answers(answers, 4, CPU)
    length = padded.tokens.shape[1]
    assert length % LENGTH_MULTIPLE == 0
    roots = padded.drafts[0].flat
    for depth, places in enumerate(padded.drafts):
        # the root is the first answer token at the earliest, and the last token follows a guess
        wanted = [
            i * length + place
            for i, answer in enumerate(answers)
            for place in range(answer.prompt_len + depth, len(answer.tokens) - 1)
        ]
        assert places.flat.tolist() == wanted
        assert len(wanted) == sum(answer.num_drafts(depth) for answer in answers)
        assert torch.equal(roots[places.among_roots], places.flat)


def test_answers_without_a_place_for_a_draft_are_left_out() -> None:
    made = [(1, [5, 6], [7]), (2, [5], [7, 8, 9]), (3, [5] * 9, [7, 7])]
    assert usable_answers((Example(*each) for each in made), 3) == [Answer([5, 7, 8], 1)]


def test_held_out_answers_are_not_trained_on() -> None:
    answers = some_answers(20)
    data = split_held_out(answers, 6, seed=3)
    assert len(data.held_out) == 6
    assert sorted(a.tokens[0] for a in data.training + data.held_out) == list(range(20))
    assert data.held_out != split_held_out(answers, 6, seed=4).held_out


def test_the_learning_rate_rises_then_falls_to_a_hundredth() -> None:
    rates = [cosine(step / 1000) for step in range(1001)]
    peak = rates.index(max(rates))
    assert peak == round(1000 * WARM_UP) and rates[peak] == 1.0
    assert rates[: peak + 1] == sorted(rates[: peak + 1])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    assert abs(rates[-1] - LR_FLOOR) < 1e-9
