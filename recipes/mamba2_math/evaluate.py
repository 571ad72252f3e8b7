"""How well a model under training solves problems, measured with plain full-length passes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from mamba2_math.data import Encoded, ProblemEncoder
from mamba2_math.draft import Problem
from mamba2_math.skills.chat import READ, WRITTEN
from mamba2_math.tokenizer import EOS_ID, PAD_ID
from mamba2_math.training_context import TrainingContext
from mamba_eagle.models.nemotron_h import NemotronHForCausalLM

MAX_TOKENS_PER_PASS = 65_536
LENGTH_MULTIPLE = 64


class Question(NamedTuple):
    """A prompt, perhaps with solved examples before it, and the reference answer."""

    prompt: list[int]
    answer: list[int]  # the last token is </s>


def make_questions(
    problems: Iterable[Problem], encoder: ProblemEncoder, shots: Iterable[Problem] = ()
) -> list[Question]:
    """Prompts of the problems, each preceded by the same solved ``shots``."""

    def encode(items: Iterable[Problem]) -> list[Encoded]:
        return encoder.encode([(p.question, p.answer) for p in items])

    prefix: list[int] = []
    for shot in encode(shots):
        prefix += [*shot.prompt, *shot.answer, *encoder.blank_line]
    return [Question(prefix + e.prompt, [*e.answer, EOS_ID]) for e in encode(problems)]


def _pad(sequences: list[list[int]], length: int, device: torch.device) -> Tensor:
    length += -length % LENGTH_MULTIPLE
    return torch.tensor([ids + [PAD_ID] * (length - len(ids)) for ids in sequences], device=device)


def _groups(questions: list[Question], room: int) -> Iterable[list[Question]]:
    longest = max(len(q.prompt) + len(q.answer) for q in questions) + room + LENGTH_MULTIPLE
    size = max(1, MAX_TOKENS_PER_PASS // longest)
    for i in range(0, len(questions), size):
        yield questions[i : i + size]


@torch.no_grad()
def share_written(
    model: NemotronHForCausalLM, sequences: list[tuple[list[int], list[int]]]
) -> float:
    """Share of sequences (tokens, kinds) of which greedy decoding writes all that is WRITTEN, given
    the rest: what a grammar, a tool and a user add."""
    device = model.lm_head.weight.device
    right = 0
    size = max(1, MAX_TOKENS_PER_PASS // (max(len(s[0]) for s in sequences) + LENGTH_MULTIPLE))
    for at in range(0, len(sequences), size):
        group = sequences[at : at + size]
        ids = _pad([tokens for tokens, _ in group], max(len(s[0]) for s in group), device)
        hidden = model(ids.view(-1), TrainingContext(*ids.shape)).view(*ids.shape, -1)
        best = model.compute_logits(hidden.flatten(0, 1)).argmax(-1).view_as(ids).tolist()
        for (tokens, kinds), guesses in zip(group, best):
            following = zip(tokens[1:], kinds[1:], guesses)
            right += all(t == guess for t, kind, guess in following if kind == WRITTEN)
    return right / len(sequences)


def exact_match(model: NemotronHForCausalLM, questions: list[Question]) -> float:
    """Share of questions whose greedy text would equal the reference, from one pass each.

    When the argmax at every answer position is the reference's next token, greedy decoding writes
    exactly the reference. A lower bound of the accuracy.
    """
    kinds = [[READ] * len(q.prompt) + [WRITTEN] * len(q.answer) for q in questions]
    return share_written(model, [(q.prompt + q.answer, k) for q, k in zip(questions, kinds)])


@torch.no_grad()
def greedy(
    model: NemotronHForCausalLM, questions: list[Question], max_tokens: int = 224
) -> list[list[int]]:
    """Greedy continuations, without </s>, by recomputing the whole text for each token."""
    device = model.lm_head.weight.device
    answers: list[list[int]] = []
    for group in _groups(questions, max_tokens):
        lengths = [len(q.prompt) for q in group]
        ids = _pad([q.prompt for q in group], max(lengths) + max_tokens, device)
        place = torch.tensor(lengths, device=device)
        index = torch.arange(len(group), device=device)
        done = torch.zeros(len(group), dtype=torch.bool, device=device)
        for step in range(max_tokens):
            used = max(lengths) + step
            used += -used % LENGTH_MULTIPLE
            view = ids[:, :used].contiguous()
            hidden = model(view.view(-1), TrainingContext(*view.shape)).view(*view.shape, -1)
            token = model.compute_logits(hidden[index, place - 1]).argmax(-1)
            done |= token == EOS_ID
            if done.all():
                break
            ids[index, place] = torch.where(done, PAD_ID, token)
            place = torch.where(done, place, place + 1)
        for tokens, start, end in zip(ids.tolist(), lengths, place.tolist()):
            answers.append(tokens[start:end])
    return answers


def last_integer(text: str) -> str | None:
    """The answer of a worked solution: its last integer, without thousands separators."""
    found = re.findall(r"-?\d+", text.replace(",", ""))
    return found[-1] if found else None


def accuracy(
    model: NemotronHForCausalLM,
    questions: list[Question],
    encoder: ProblemEncoder,
    max_tokens: int = 224,
) -> float:
    """Share of questions whose greedy answer ends with the right number."""
    answers = greedy(model, questions, max_tokens)
    right = sum(
        last_integer(encoder.decode(answer)) == last_integer(encoder.decode(q.answer))
        for answer, q in zip(answers, questions)
    )
    return right / len(questions)
