"""Grade-school word problems with worked steps, in the form of GSM8K, made by rule.

A problem is ``{"question": str, "answer": str}``; the answer spells every operation with a
calculator annotation, ``48 / 2 = <<48/2=24>>24``, and ends with ``#### 24``. Two sources make them:
:mod:`mamba_eagle.train.scenarios`, whole problems, and :mod:`mamba_eagle.train.stories`, problems
put together from parts. This module holds what they are written with, the generator and the
held-out set.

Every operation is binary and every number small, because the model that learns from this text has
six million parameters: it must be able to do each line without a scratch pad.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from mamba_eagle.train import words

HELD_OUT_SEED = 20_250_607
HELD_OUT_COUNT = 200
SINGLE_SHARE = 0.55  # of the documents hold one problem
MAX_PROBLEMS = 8  # in a document
STORY_SHARE = 0.62  # of the problems are stories, shorter than the scenarios: half of the tokens
HELD_OUT_PATH = Path(__file__).resolve().parent.parent / "assets" / "gsm8k_style_test.jsonl"

_OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a // b,
}


class Problem(NamedTuple):
    """One problem and what identifies it apart from its wording."""

    question: str
    answer: str
    template: str
    key: str  # template and its arithmetic: equal keys mean the same problem in other words


class Draft:
    """What a scenario writes one problem with: random draws, the question, the worked steps."""

    __slots__ = ("_people", "_rng", "lines", "operations", "question", "result")

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._people: list[words.Person] = []
        self.question = ""
        self.lines: list[str] = []
        self.operations: list[str] = []
        self.result = 0

    def number(self, low: int, high: int, step: int = 1) -> int:
        """A number of ``low, low + step, ... <= high``."""
        return low + step * int(self._rng.random() * ((high - low) // step + 1))

    def pick(self, *options):
        return options[int(self._rng.random() * len(options))]

    def of(self, options):
        """One element of a sequence."""
        return options[int(self._rng.random() * len(options))]

    def two(self, options):
        """Two different elements of a sequence."""
        return self._rng.sample(options, 2)

    def chance(self, probability: float) -> bool:
        return self._rng.random() < probability

    def person(self) -> words.Person:
        """Someone who has not appeared in this problem yet."""
        while True:
            person = self.of(words.PEOPLE)
            if person not in self._people:
                self._people.append(person)
                return person

    def share(self) -> tuple[str, int]:
        """A part of a whole and its divisor: ``("a third", 3)``, ``("20%", 5)``."""
        return self.of(words.SHARES)

    def times(self) -> tuple[str, int]:
        """A multiple and its factor: ``("twice", 2)``."""
        return self.of(words.MULTIPLES)

    def ask(self, *sentences, shuffle: int = 0) -> None:
        """Sets the question. A tuple among the sentences is a choice of wordings; the first
        ``shuffle`` sentences are independent facts, told in any order."""
        chosen = [s if type(s) is str else self.of(s) for s in sentences]
        if shuffle:
            facts = chosen[:shuffle]
            self._rng.shuffle(facts)
            chosen[:shuffle] = facts
        self.question = " ".join(chosen)

    def step(self, text, left: int, op: str, right: int) -> int:
        """Adds the line ``text`` (or one of a tuple of wordings), in which ``@`` stands for the
        operation ("$@" for one in dollars), and returns its result."""
        if op == "/" and left % right:
            raise ValueError(f"{left} / {right} is not exact in {text!r}")
        value = _OPERATIONS[op](left, right)
        if value < 0:
            raise ValueError(f"{left} {op} {right} is negative in {text!r}")
        if type(text) is not str:
            text = self.of(text)
        operation = f"{left}{op}{right}"
        self.operations.append(operation)
        sign = ""
        if "$@" in text:
            text = text.replace("$@", "@")
            sign = "$"
        self.lines.append(
            text.replace("@", f"{left} {op} {right} = {sign}<<{operation}={value}>>{value}")
        )
        self.result = value
        return value

    def finish(self, template: str) -> Problem:
        answer = "\n".join([*self.lines, f"#### {self.result}"])
        key = "|".join([template, *sorted(self.operations)])
        return Problem(self.question, answer, template, key)


def _stream(seed: int) -> Iterator[Problem]:
    from mamba_eagle.train import stories
    from mamba_eagle.train.scenarios import SCENARIOS

    rng = random.Random(seed)
    names = list(SCENARIOS)
    while True:
        try:
            if rng.random() < STORY_SHARE:
                problem = stories.make(rng)
            else:
                name = names[int(rng.random() * len(names))]
                draft = Draft(rng)
                SCENARIOS[name](draft)
                problem = draft.finish(name)
        except ValueError:
            continue  # numbers that do not work out, such as a loss on a sale: draw again
        yield problem


@functools.cache
def held_out() -> tuple[Problem, ...]:
    """The problems that no training run may see: the same ones for every seed and machine."""
    problems: dict[str, Problem] = {}
    for problem in _stream(HELD_OUT_SEED):
        problems.setdefault(problem.key, problem)
        if len(problems) == HELD_OUT_COUNT:
            return tuple(problems.values())
    raise AssertionError("the stream of problems does not end")


def stream(seed: int) -> Iterator[Problem]:
    """An endless stream of problems, none of which is held out: neither the same text nor the
    same scenario with the same arithmetic in other words."""
    keys = {problem.key for problem in held_out()}
    questions = {problem.question for problem in held_out()}
    for problem in _stream(seed):
        if problem.key not in keys and problem.question not in questions:
            yield problem


def generate(seed: int, count: int) -> list[dict[str, str]]:
    """``count`` training problems as GSM8K records; the same for the same seed."""
    problems = stream(seed)
    return [{"question": p.question, "answer": p.answer} for p, _ in zip(problems, range(count))]


def generate_documents(seed: int, count: int) -> list[dict[str, str]]:
    """As :func:`generate`, but answers go on with further problems as often as in the text that the
    embedded model was trained on, and as it does itself when it is sampled."""
    rng, problems = random.Random(seed), stream(seed)
    records = []
    for first in itertools.islice(problems, count):
        more = 0 if rng.random() < SINGLE_SHARE else rng.randint(1, MAX_PROBLEMS - 1)
        rest = [document(p.question, p.answer) for p in itertools.islice(problems, more)]
        records.append({"question": first.question, "answer": "\n\n".join([first.answer, *rest])})
    return records


def document(question: str, answer: str) -> str:
    """A solved problem as the model reads it; few-shot prompts join these by blank lines."""
    return f"Question: {question}\nAnswer: {answer}"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="make problems, or write the held-out ones")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=5)
    parser.add_argument("--output", type=Path, help="jsonl file for them, else they are printed")
    parser.add_argument(
        "--documents", action="store_true", help="let answers go on with further problems"
    )
    parser.add_argument("--write-held-out", action="store_true")
    args = parser.parse_args(argv)
    make = generate_documents if args.documents else generate
    if args.write_held_out:
        records = [{"question": p.question, "answer": p.answer} for p in held_out()]
        _write_records(HELD_OUT_PATH, records)
    elif args.output:
        _write_records(args.output, make(args.seed, args.count))
    else:
        for problem in make(args.seed, args.count):
            print(document(**problem), end="\n\n")


def _write_records(path: Path, records: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


if __name__ == "__main__":
    main()
