"""Further questions about a problem that has just been answered."""

# ruff: noqa: E501  (long lists of sentences)

from __future__ import annotations

import re

from mamba2_math.draft import OPERATIONS, Draft, Problem
from mamba2_math.skills.chat import Chat, assistant, user

RESULT = re.compile(r"= (\$?)<<[^>]*>>(\d+)")
ORDINALS = ("first", "second", "third", "fourth", "fifth")
MAX_RESULT = 2000

# {n} stands for a number, {m} for one of money or things, {p} for someone.
MORE = (
    "And with {m} more?",
    "What if there were {m} more?",
    "And if it were {m} more?",
    "How much would it be with {m} more?",
    "Then {m} more are added. What is it now?",
    "And if {p} gets {m} more?",
    "Then {p} finds {m} more. How many is that?",
    "What if {p} buys {m} more?",
    "And how much is it if {p} adds {m}?",
)
LESS = (
    "And with {m} less?",
    "What if {m} of that are taken away?",
    "And if it were {m} less?",
    "How much is left without {m} of them?",
    "Then {m} of them are lost. What is left?",
    "And if {p} gives {m} away?",
    "Then {p} loses {m}. How many are left?",
    "What is left when {p} takes {m} of it?",
    "And after {p} uses {m} of them?",
)
SOMEONE = ("he", "she", "someone", "a friend", "the teacher", "his brother", "her sister")
MULTIPLES = (
    "And {w} that?",
    "What if it were {w} as much?",
    "How much is {w} that?",
    "And if it were {w} as many?",
)
TIMES = (
    ("twice", 2),
    ("two times", 2),
    ("three times", 3),
    ("3 times", 3),
    ("four times", 4),
    ("5 times", 5),
    ("ten times", 10),
)
PARTS = (("half", 2), ("a third", 3), ("a quarter", 4), ("a fifth", 5), ("a tenth", 10))
SHARED = (
    "If that is shared equally among {n} people, how much does each get?",
    "And split into {n} equal parts?",
    "And that divided by {n}?",
)
MISSING = (
    "How many more are needed to have {n}?",
    "How much is missing to {n}?",
    "How far is that from {n}?",
)
EXPLAINED = (
    "How did you get that?",
    "Can you explain that?",
    "Show me the steps again.",
    "Why?",
    "How do you know?",
)
AGAIN = (
    "What was the answer again?",
    "Just the number, please.",
    "Only the result, please.",
    "Can you repeat the result?",
)
STARTS = ("", "", "", "OK. ", "Thanks. ", "Good. ", "Thank you! ", "I see. ")


class Talk:
    """The chat so far: ``result`` is the number that was said last, ``steps`` its worked lines."""

    def __init__(self, d: Draft, problem: Problem) -> None:
        self.messages = [user(problem.question), assistant(problem.answer)]
        self.steps = problem.answer.split("\n")[:-1]
        self.sign, value = RESULT.findall(self.steps[-1])[-1]
        self.result = int(value)
        self._draft = d

    def say(self, question: str, answer: str) -> None:
        start = self._draft.of(STARTS)
        self.messages += [user(start + question), assistant(answer)]

    def compute(self, question: str, left: int, op: str, right: int) -> None:
        value = OPERATIONS[op](left, right)
        line = f"It is {left} {op} {right} = {self.sign}<<{left}{op}{right}={value}>>{value}."
        self.steps, self.result = [line], value
        self.say(question, f"{line}\n#### {value}")


def arithmetic(d: Draft, talk: Talk) -> None:
    """The last result, changed."""
    now, kind = talk.result, d.pick("+", "-", "*", "part", "/", "missing")
    n, someone = d.number(2, 50), d.person().name if d.chance(0.5) else d.of(SOMEONE)
    if kind == "*" and now * 10 <= MAX_RESULT:
        told, factor = d.of(TIMES)
        talk.compute(d.of(MULTIPLES).format(w=told), now, "*", factor)
    elif kind == "part" and (fitting := [p for p in PARTS if now and now % p[1] == 0]):
        told, divisor = d.of(fitting)
        talk.compute(
            d.pick("And {} of that?", "How much is {} of that?").format(told), now, "/", divisor
        )
    elif kind == "/" and (divisors := [k for k in range(2, 13) if now and now % k == 0]):
        divisor = d.of(divisors)
        talk.compute(d.of(SHARED).format(n=divisor), now, "/", divisor)
    elif kind == "missing":
        talk.compute(d.of(MISSING).format(n=f"{talk.sign}{now + n}"), now + n, "-", now)
    elif kind == "-" and now > 2:
        n = d.number(1, min(50, now - 1))
        talk.compute(d.of(LESS).format(m=f"{talk.sign}{n}", p=someone), now, "-", n)
    else:
        talk.compute(d.of(MORE).format(m=f"{talk.sign}{n}", p=someone), now, "+", n)


def recall(d: Draft, talk: Talk) -> None:
    """What has been said already."""
    if d.chance(0.3):
        talk.say(d.of(AGAIN), f"#### {talk.result}")
        return
    if d.chance(0.3):
        talk.say(d.of(EXPLAINED), "\n".join([*talk.steps, f"#### {talk.result}"]))
        return
    if d.chance(0.4):
        bound = max(1, talk.result + d.number(1, 30) * d.pick(1, -1))
        bound += bound == talk.result
        word = d.pick("more", "less")
        is_so = (talk.result > bound) == (word == "more")
        truth = "more" if talk.result > bound else "less"
        text = f"{'Yes' if is_so else 'No'}, {talk.result} is {truth} than {bound}."
        talk.say(f"Is that {word} than {talk.sign}{bound}?", f"{text}\n#### {talk.result}")
        return
    which = d.number(0, len(talk.steps) - 1)
    line, name = talk.steps[which], ORDINALS[which]
    if which == len(talk.steps) - 1 and d.chance(0.5):
        name = "last"
    value = RESULT.findall(line)[-1][1]
    asked = d.pick(
        "What was the {} step?", "Can you repeat the {} step?", "How did the {} step go?"
    )
    talk.say(asked.format(name), f"{line}\n#### {value}")


def make(d: Draft, problem: Problem) -> Chat:
    """problem: one that may be asked."""
    talk = Talk(d, problem)
    for _ in range(d.pick(1, 1, 2, 3)):
        (arithmetic if d.chance(0.65) else recall)(d, talk)
    return Chat(talk.messages)
