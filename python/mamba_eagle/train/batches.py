"""Answers in batches: which of them a training step uses, and how a process runs its share.

Step ``i`` of a run depends only on the seed and ``i``. So a resumed run finds its place in the data
by its step number, and each of several processes knows the whole batch without communication.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mamba_eagle.train.prompts import Example

POOL_BATCHES = 8  # batches are filled with answers of similar length from a pool of this many
LENGTH_MULTIPLE = 8  # GPU attention copies a mask whose rows are not aligned to 16 bytes


class Answer(NamedTuple):
    """One sequence: tokens[prompt_len:] is the answer."""

    tokens: list[int]
    prompt_len: int
    anchors: tuple[int, ...] | None = None  # ascending: the roots that are drafted from; None: all

    @property
    def num_roots(self) -> int:
        """Positions where a draft can start: answer tokens that are followed by another one. The
        first answer token is sampled by the prompt's pass, so it is never drafted."""
        return len(self.tokens) - 1 - self.prompt_len

    def num_drafts(self, depth: int) -> int:
        """Drafts of this answer with at least ``depth`` + 1 tokens."""
        if self.anchors is None:
            return max(self.num_roots - depth, 0)
        return sum(anchor + depth + 1 < len(self.tokens) for anchor in self.anchors)

    def draw_anchors(self, count: int, rng: random.Random) -> Answer:
        """The same answer, drafted from at most ``count`` of its roots."""
        roots = range(self.prompt_len, self.prompt_len + self.num_roots)
        chosen = roots if len(roots) <= count else sorted(rng.sample(roots, count))
        return self._replace(anchors=tuple(chosen))


class DraftPositions(NamedTuple):
    """Positions of draft tokens at one depth (the root: 0) that are followed by an answer token.

    They are indices rather than a mask: selecting by a mask makes the host wait for the GPU.
    """

    flat: Tensor  # [n] int64, indices into the b * l tokens of the batch, ascending
    among_roots: Tensor  # [n] int64, indices of the same positions among those at depth 0


class BlockSlots(NamedTuple):
    """Places of drafted blocks that are followed by an answer token; k drafts per block.

    A block with its anchor at position a drafts token a + 1 + j in place j, which is compared with
    the target's distribution after position a + j, a root.
    """

    anchors: Tensor  # [b, A] int64: positions, ascending; padded with -1
    flat: Tensor  # [n] int64, indices into the b * A * k places, ascending
    among_roots: Tensor  # [n] int64, as in DraftPositions
    sources: Tensor  # [n] int64, indices of positions a + j into the b * l tokens


class PaddedAnswers(NamedTuple):
    """Answers padded at their ends to one length; all tensors on one device."""

    tokens: Tensor  # [b, l] int64
    drafts: list[DraftPositions]  # by depth, from all roots
    blocks: BlockSlots  # of as many drafts as there are depths


class StepShare(NamedTuple):
    """What one process runs in one training step."""

    passes: list[list[Answer]]
    num_drafts: list[int]  # at each depth, over all processes: the loss is averaged over these


def usable_answers(answered: Iterable[Example], max_length: int) -> list[Answer]:
    """Cuts answers to ``max_length`` and drops those in which no draft can start."""
    cut = [Answer((a.prompt + a.answer)[:max_length], len(a.prompt)) for a in answered]
    return [answer for answer in cut if answer.num_roots > 0]


class Batches:
    """The training answers, in a different order in each epoch."""

    def __init__(
        self,
        answers: Sequence[Answer],
        batch_size: int,
        micro_tokens: int,
        depth: int,
        seed: int,
        max_anchors: int = 0,
    ) -> None:
        """max_anchors: of an answer in a step; 0: drafts begin at all roots."""
        self.answers, self.batch_size, self.depth = answers, batch_size, depth
        self.max_anchors = max_anchors
        self.micro_tokens, self.seed = micro_tokens, seed
        self._epoch, self._order = -1, list[int]()

    @property
    def steps_per_epoch(self) -> float:
        return len(self.answers) / self.batch_size

    def step(self, number: int, rank: int, size: int) -> StepShare:
        """The share of process ``rank`` of ``size`` in step ``number``, counted from 0."""
        first = number * self.batch_size
        batch = [self._answer(i) for i in range(first, first + self.batch_size)]
        if self.max_anchors:
            rng = random.Random(f"anchors/{self.seed}/{number}")
            batch = [answer.draw_anchors(self.max_anchors, rng) for answer in batch]
        num_drafts = [sum(answer.num_drafts(d) for answer in batch) for d in range(self.depth)]
        return StepShare(group_into_passes(batch[rank::size], self.micro_tokens), num_drafts)

    def _answer(self, index: int) -> Answer:
        """The answer at ``index`` of the endless sequence of epochs."""
        epoch, place = divmod(index, len(self.answers))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self._make_order(epoch)
        return self.answers[self._order[place]]

    def _make_order(self, epoch: int) -> list[int]:
        """All answers in random order, except that each batch takes answers of similar length from
        a pool of POOL_BATCHES batches, which saves padding."""
        rng = random.Random(f"{self.seed}/{epoch}")
        count, size = len(self.answers), self.batch_size
        order = list(range(count))
        rng.shuffle(order)
        carried = -epoch * count % size  # answers that complete the previous epoch's last batch
        batches = []
        for first in range(carried, count, POOL_BATCHES * size):
            pool = order[first : first + POOL_BATCHES * size]
            pool.sort(key=lambda i: len(self.answers[i].tokens))
            batches += [pool[i : i + size] for i in range(0, len(pool), size)]
        last = batches.pop() if batches else []  # may be shorter than the others
        rng.shuffle(batches)
        return order[:carried] + [i for batch in batches for i in batch] + last


def group_into_passes(answers: Sequence[Answer], max_tokens: int) -> list[list[Answer]]:
    """Groups answers of similar length so that no group exceeds ``max_tokens`` including padding.
    An answer that is longer by itself forms a group of its own."""
    groups: list[list[Answer]] = []
    for answer in sorted(answers, key=lambda a: len(a.tokens)):  # a group's longest comes last
        if groups and (len(groups[-1]) + 1) * len(answer.tokens) <= max_tokens:
            groups[-1].append(answer)
        else:
            groups.append([answer])
    return groups


def pad_answers(answers: Sequence[Answer], depth: int, device: torch.device) -> PaddedAnswers:
    """Pads ``answers`` and finds the positions of drafts of ``depth`` tokens.

    Padding is token 0; no position inside an answer attends to it. The length is a multiple of
    LENGTH_MULTIPLE.
    """
    length = max(len(answer.tokens) for answer in answers)
    length += -length % LENGTH_MULTIPLE
    tokens = np.zeros((len(answers), length), dtype=np.int64)
    for i, answer in enumerate(answers):
        tokens[i, : len(answer.tokens)] = answer.tokens
    first = np.array([[answer.prompt_len] for answer in answers])
    end = np.array([[len(answer.tokens) - 1] for answer in answers])  # the last token is not a root
    place = np.arange(length)
    masks = [((place >= first + j) & (place < end)).ravel() for j in range(depth)]
    number = masks[0].cumsum() - 1  # of a position among those at depth 0
    drafts = [
        DraftPositions(_to(device, mask.nonzero()[0]), _to(device, number[mask])) for mask in masks
    ]
    blocks = _block_slots(_pad_anchors(answers), depth, masks[0], number)
    return PaddedAnswers(
        _to(device, tokens), drafts, BlockSlots(*(_to(device, part) for part in blocks))
    )


def _block_slots(
    anchors: np.ndarray, depth: int, is_root: np.ndarray, number: np.ndarray
) -> tuple[np.ndarray, ...]:
    """The parts of BlockSlots. is_root, number: [b * l], and how many roots lie before."""
    b, length = len(anchors), len(is_root) // len(anchors)
    positions = anchors[:, :, None] + np.arange(depth)  # [b, A, k]
    inside = (anchors[:, :, None] >= 0) & (positions < length)
    sources = np.arange(b)[:, None, None] * length + np.minimum(positions, length - 1)
    flat = (inside & is_root[sources]).ravel().nonzero()[0]
    sources = sources.ravel()[flat]
    return anchors, flat, number[sources], sources


def _pad_anchors(answers: Sequence[Answer]) -> np.ndarray:
    """[b, A] int64, padded with -1; without anchors of their own, all roots."""
    lists = [
        answer.anchors
        if answer.anchors is not None
        else range(answer.prompt_len, answer.prompt_len + answer.num_roots)
        for answer in answers
    ]
    padded = np.full((len(answers), max(map(len, lists))), -1, dtype=np.int64)
    for row, anchors in zip(padded, lists, strict=True):
        row[: len(anchors)] = anchors
    return padded


def _to(device: torch.device, values: np.ndarray) -> Tensor:
    """Copies to a GPU through pinned memory, so that the host does not wait."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


class Split(NamedTuple):
    training: list[Answer]
    held_out: list[Answer]


def split_held_out(answers: Sequence[Answer], held_out: int, seed: int) -> Split:
    """Sets ``held_out`` randomly chosen answers apart; the others are for training."""
    order = list(range(len(answers)))
    random.Random(f"held out/{seed}").shuffle(order)
    return Split(
        [answers[i] for i in sorted(order[held_out:])],
        [answers[i] for i in sorted(order[:held_out])],
    )
