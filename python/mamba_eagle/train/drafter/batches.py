"""Answers in batches: which of them a step trains on, and how a process works them off.

Step ``i`` of a run depends on the seed and ``i`` alone. So a run that goes on has its place in the
data by its step, and each of several processes knows the whole batch without asking the others.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mamba_eagle.train.drafter.answers import Answered

POOL = 8  # batches
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
            self._epoch, self._order = epoch, self._make_order(epoch)
        return self._order[place]

    def _make_order(self, epoch: int) -> list[int]:
        """All answers, drawn by the seed; of POOL batches each has answers of like length, which
        spares padding."""
        luck, count, size = (
            random.Random(f"{self.seed}/{epoch}"),
            len(self.answers),
            self.batch_size,
        )
        order = list(range(count))
        luck.shuffle(order)
        begun = -epoch * count % size  # so many end the batch that the epoch before began
        batches = []
        for first in range(begun, count, POOL * size):
            pool = order[first : first + POOL * size]
            pool.sort(key=lambda i: len(self.answers[i].tokens))
            batches += [pool[i : i + size] for i in range(0, len(pool), size)]
        last = batches.pop() if batches else []  # the one that may be short
        luck.shuffle(batches)
        return order[:begun] + [i for batch in batches for i in batch] + last


def passes(answers: Sequence[Answer], max_tokens_left: int) -> list[list[Answer]]:
    """Answers of like length together, so that no group has more than ``max_tokens_left`` with its
    padding; one that is longer by itself is a group of its own."""
    groups: list[list[Answer]] = []
    for answer in sorted(answers, key=lambda a: len(a.tokens)):  # the longest of a group is last
        if groups and (len(groups[-1]) + 1) * len(answer.tokens) <= max_tokens_left:
            groups[-1].append(answer)
        else:
            groups.append([answer])
    return groups


def to_rows(answers: Sequence[Answer], depth: int, device: torch.device) -> Rows:
    """With the places of drafts of ``depth`` tokens. Padding repeats token 0; nothing behind an
    answer's end is looked at from inside of it. Their length is a multiple of LENGTH_STEP."""
    length = max(len(answer.tokens) for answer in answers)
    length += -length % LENGTH_STEP
    tokens = np.zeros((len(answers), length), dtype=np.int64)
    for row, answer in enumerate(answers):
        tokens[row, : len(answer.tokens)] = answer.tokens
    first = np.array([[answer.prompt_len] for answer in answers])
    end = np.array([[len(answer.tokens) - 1] for answer in answers])  # no root
    place = np.arange(length)
    marked = [((place >= first + j) & (place < end)).ravel() for j in range(depth)]
    number = marked[0].cumsum() - 1
    flat = [each.nonzero()[0] for each in marked]
    drafts = [Places(_sent(each, device), _sent(number[each], device)) for each in flat]
    return Rows(_sent(tokens, device), drafts)


def _sent(values: np.ndarray, device: torch.device) -> Tensor:
    """To a GPU from pinned memory, so that the host goes on at once."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


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
