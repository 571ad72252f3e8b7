"""Answers in batches: which of them a step trains on, and how a process works them off.

Step ``i`` of a run depends on the seed and ``i`` alone. So a run that goes on has its place in the
data by its step, and each of several processes knows the whole batch without asking the others.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mamba_eagle.train.drafter.answers import Answered

LENGTH_STEP = 8  # a GPU's attention copies a mask whose rows do not begin at multiples of 16 bytes


class Answer(NamedTuple):
    """One sequence: tokens[prompt_len:] is the answer."""

    tokens: list[int]
    prompt_len: int

    @property
    def roots(self) -> int:
        """Places where a draft may begin: answer tokens that another one follows. The first answer
        token comes with the prompt, so no draft is made for it."""
        return len(self.tokens) - 1 - self.prompt_len

    def guesses(self, depth: int) -> int:
        """Drafts of the answer that reach ``depth`` + 1 tokens."""
        return max(self.roots - depth, 0)


class Places(NamedTuple):
    """Where rows hold a draft's token at one depth (0: the root) whose successor is known. Numbers
    and no mask: a GPU asked for the marked places of a mask makes the host wait."""

    flat: Tensor  # [n] int64, among the b * l tokens of the rows, rising
    among_roots: Tensor  # [n] int64: the same ones, numbered among the places at depth 0


class Rows(NamedTuple):
    """Some answers side by side, padded behind their ends; all on one device."""

    tokens: Tensor  # [b, l] int64
    drafts: list[Places]  # by depth


class Step(NamedTuple):
    """What one process runs in one step, and over how many guesses the whole step is averaged."""

    passes: list[list[Answer]]
    guesses: list[int]  # at each depth, of all processes


def usable(answered: Iterable[Answered], max_length: int) -> list[Answer]:
    """Cut to ``max_length``; those in which no draft can begin are left out."""
    cut = [Answer((a.prompt + a.answer)[:max_length], len(a.prompt)) for a in answered]
    return [answer for answer in cut if answer.roots > 0]


class Batches:
    """The training part of the answers, in an order of their own in each epoch."""

    def __init__(
        self, answers: Sequence[Answer], batch_size: int, micro_tokens: int, depth: int, seed: int
    ) -> None:
        self.answers, self.batch_size, self.depth = answers, batch_size, depth
        self.micro_tokens, self.seed = micro_tokens, seed
        self._epoch, self._order = -1, list[int]()

    @property
    def steps_per_epoch(self) -> float:
        return len(self.answers) / self.batch_size

    def step(self, number: int, rank: int, size: int) -> Step:
        """The part of process ``rank`` of ``size`` in step ``number``, from 0."""
        first = number * self.batch_size
        batch = [self.answers[self._place(i)] for i in range(first, first + self.batch_size)]
        guesses = [sum(answer.guesses(d) for answer in batch) for d in range(self.depth)]
        return Step(passes(batch[rank::size], self.micro_tokens), guesses)

    def _place(self, index: int) -> int:
        """The answer that stands at ``index`` of the endless row of epochs."""
        epoch, place = divmod(index, len(self.answers))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, list(range(len(self.answers)))
            random.Random(f"{self.seed}/{epoch}").shuffle(self._order)
        return self._order[place]


def passes(answers: Sequence[Answer], most_tokens: int) -> list[list[Answer]]:
    """Answers of like length together, so that no group has more than ``most_tokens`` with its
    padding; one that is longer by itself is a group of its own."""
    groups: list[list[Answer]] = []
    for answer in sorted(answers, key=lambda a: len(a.tokens)):  # the longest of a group is last
        if groups and (len(groups[-1]) + 1) * len(answer.tokens) <= most_tokens:
            groups[-1].append(answer)
        else:
            groups.append([answer])
    return groups


def to_rows(answers: Sequence[Answer], depth: int, device: torch.device) -> Rows:
    """With the places of drafts of ``depth`` tokens. Padding repeats token 0; nothing behind an
    answer's end is looked at from inside of it. Their length is a multiple of LENGTH_STEP."""
    length = max(len(answer.tokens) for answer in answers)
    length += -length % LENGTH_STEP
    tokens = torch.tensor([a.tokens + [0] * (length - len(a.tokens)) for a in answers])
    first = torch.tensor([[answer.prompt_len] for answer in answers])
    end = torch.tensor([[len(answer.tokens) - 1] for answer in answers])  # no root
    place = torch.arange(length)
    drafts = []
    for j in range(depth):
        marked = ((place >= first + j) & (place < end)).flatten()
        if j == 0:
            number = marked.cumsum(0) - 1
        flat = marked.nonzero().flatten()
        drafts.append(Places(_sent(flat, device), _sent(number[flat], device)))
    return Rows(_sent(tokens, device), drafts)


def _sent(values: Tensor, device: torch.device) -> Tensor:
    """To a GPU from pinned memory, so that the host goes on at once."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values


class Split(NamedTuple):
    training: list[Answer]
    held_out: list[Answer]


def split(answers: Sequence[Answer], held_out: int, seed: int) -> Split:
    """``held_out`` answers, drawn by the seed, and the others; none is in both."""
    order = list(range(len(answers)))
    random.Random(f"held out/{seed}").shuffle(order)
    return Split(
        [answers[i] for i in sorted(order[held_out:])],
        [answers[i] for i in sorted(order[:held_out])],
    )
