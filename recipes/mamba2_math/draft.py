"""What one problem is written with: random draws, a question, worked steps that are right.

A problem is a question and an answer. The answer spells every operation with a calculator
annotation, ``48 / 2 = <<48/2=24>>24``, and ends with ``#### 24``. Every operation is binary and
every number small, because the model that learns from this text has six million parameters: it must
be able to do each line without a scratch pad.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

from mamba2_math import words

OPERATIONS: dict[str, Callable[[int, int], int]] = {
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

    def order(self, count: int) -> list[int]:
        """0 to ``count`` - 1 in a random order."""
        return self._rng.sample(range(count), count)

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
        value = OPERATIONS[op](left, right)
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


def document(question: str, answer: str) -> str:
    """A solved problem as the model reads it; few-shot prompts join these by blank lines."""
    return f"Question: {question}\nAnswer: {answer}"
