"""Calls of a calculator: one for each step, and an answer that uses what it returned."""

# ruff: noqa: E501  (long lists of sentences)

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from mamba2_math import words
from mamba2_math.draft import Draft, Problem
from mamba2_math.skills.chat import Chat, Message, assistant, call, result, tool, user

NAMES = ("calculator", "calculator", "calculator", "calculate", "calc", "compute")
PARAMETERS = ("expression", "expression", "expression", "expr", "formula", "input")
OTHERS = (  # tools that are of no use for a number
    ("weather", "city"),
    ("search", "query"),
    ("send_mail", "to", "text"),
    ("get_time", "place"),
    ("play_song", "title"),
    ("translate", "text", "language"),
)
SPOKEN = {
    "+": ("{} plus {}", "the sum of {} and {}", "{} + {}"),
    "-": ("{} minus {}", "{} - {}"),
    "*": ("{} times {}", "the product of {} and {}", "{} * {}", "{} x {}"),
    "/": ("{} divided by {}", "{} / {}"),
}
COMMANDS = {
    "+": ("Add {} and {}.", "Add {1} to {0}."),
    "-": ("Take {1} away from {0}.", "Subtract {1} from {0}."),
    "*": ("Multiply {} by {}.", "Multiply {} and {}."),
    "/": ("Divide {} by {}.",),
}
ASKED = (
    "What is {}?",
    "How much is {}?",
    "Calculate {}.",
    "{}?",
    "Please work out {}.",
    "Can you compute {}?",
    "I need to know what {} is.",
)
FURTHER = {
    "+": ("And {} more than that?", "Now add {}."),
    "-": ("And {} less than that?", "Now subtract {}."),
    "*": ("And {} times that?", "Now multiply it by {}."),
    "/": ("And that divided by {}?", "Now divide it by {}."),
}
OPERATION = re.compile(r"<<(\d+)([-+*/])(\d+)=")
OPERATIONS = {"+": "add", "-": "subtract", "*": "multiply", "/": "divide"}
PAIRS = (("a", "b"), ("a", "b"), ("x", "y"), ("left", "right"), ("first", "second"))


def shown(value: float) -> str:
    """To two digits behind the point, without zeros at the end."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def value_of(left: float, sign: str, right: float) -> str:
    exact = {"+": left + right, "-": left - right, "*": left * right}
    return shown(exact[sign] if sign in exact else left / right)


def large(d: Draft) -> int:
    return d.number(10 ** (size := d.pick(1, 2, 2, 3, 3, 4)), 10 ** (size + 1) - 1)


def operands(d: Draft) -> tuple[float, str, float]:
    sign = d.pick("+", "-", "*", "*", "/")
    left: float = large(d)
    right: float = large(d)
    if sign == "-":
        left, right = max(left, right), min(left, right)
    if sign == "/":
        right = d.number(2, 99)
        left = left * right if d.chance(0.8) else left
    elif d.chance(0.15):
        left += d.pick(0.5, 0.25, 0.75, 0.1)
    return left, sign, right


class Steps:
    """The turns of one chat with a tool for expressions, or with tools for the ``signs``."""

    def __init__(self, d: Draft, signs: str = "") -> None:
        self._draft = d
        self.messages: list[Message] = []
        self.as_json = d.pick("result", "result", "value", "answer") if d.chance(0.3) else ""
        self.pair = d.of(PAIRS) if signs and d.chance(0.25) else None
        self.name, self.parameter = d.of(NAMES), d.of(PARAMETERS)
        self.tools = [tool(self.name, self.parameter)]
        if self.pair:
            chosen = [OPERATIONS[sign] for sign in OPERATIONS if sign in signs or d.chance(0.4)]
            self.tools = [tool(chosen[i], *self.pair) for i in d.order(len(chosen))]
        if d.chance(0.1):
            self.tools.insert(d.pick(0, 1), tool(*d.of(OTHERS)))

    def ask(self, text: str) -> None:
        self.messages.append(user(text))

    def compute(self, left: float, sign: str, right: float) -> tuple[str, str]:
        """The expression and its value."""
        expression = f"{shown(left)} {sign} {shown(right)}"
        value = value_of(left, sign, right)
        if self.pair:
            numbers = (json.loads(shown(number)) for number in (left, right))
            self._use(call(OPERATIONS[sign], dict(zip(self.pair, numbers))), value)
        else:
            self.evaluate(expression, value)
        return expression, value

    def evaluate(self, expression: str, value: str) -> None:
        self._use(call(self.name, {self.parameter: expression}), value)

    def _use(self, message: Message, value: str) -> None:
        told = json.dumps({self.as_json: json.loads(value)}) if self.as_json else value
        self.messages += [message, result(told)]

    def answer(self, text: str) -> None:
        self.messages.append(assistant(text))

    def chat(self) -> Chat:
        return Chat(self.messages, self.tools)


def sums(d: Draft) -> Chat:
    """Bare arithmetic of one operation, perhaps with further questions about its result."""
    left, sign, right = operands(d)
    signs = "+-*"
    steps = Steps(d, signs + sign)
    form = d.of(COMMANDS[sign])
    if d.chance(0.8):
        form = d.of(ASKED).format(d.of(SPOKEN[sign]))
    text = form.format(shown(left), shown(right))
    steps.ask(text[0].upper() + text[1:])
    expression, value = steps.compute(left, sign, right)
    steps.answer(f"{expression} = {value}\n#### {value}")
    while value.isdigit() and int(value) < 100_000 and d.chance(0.3):
        sign, right = d.of(signs), d.number(2, 99)
        if sign == "-" and right > int(value):
            break
        steps.ask(d.of(FURTHER[sign]).format(right))
        expression, value = steps.compute(int(value), sign, right)
        steps.answer(f"{expression} = {value}\n#### {value}")
    return steps.chat()


def longer(d: Draft) -> Chat:
    """An expression of two operations, or a percentage, in one call."""
    steps = Steps(d)
    if d.chance(0.4):
        share, whole = d.number(1, 99), large(d)
        expression, value = f"{whole} * {share} / 100", shown(whole * share / 100)
        text = d.pick("What is {}% of {}?", "How much is {}% of {}?", "{} percent of {}?").format(
            share, whole
        )
        said = f"{share}% of {whole} is {value}."
    else:
        left, right, third = large(d), large(d), large(d)
        sign = d.pick("+", "-") if left * right > third else "+"
        expression, value = f"{left} * {right} {sign} {third}", value_of(left * right, sign, third)
        text, said = d.of(ASKED).format(expression), f"{expression} = {value}"
    steps.ask(text)
    steps.evaluate(expression, value)
    steps.answer(f"{said}\n#### {value}")
    return steps.chat()


LARGE_STORIES = (  # {a} and {b} are the numbers, {x} things, {p} a place, {P} someone
    ("*", "A factory makes {a} {x} a day. How many {x} does it make in {b} days?", "The factory makes {v} {x}."),
    ("*", "A truck carries {a} {x}. How many {x} do {b} trucks carry?", "The trucks carry {v} {x}."),
    ("*", "{P} sells {a} {x} a month. How many {x} is that in {b} months?", "{P} sells {v} {x}."),
    ("*", "There are {b} shelves with {a} {x} on each. How many {x} are there?", "There are {v} {x}."),
    ("*", "A ticket to {p} costs ${a}. How much do {b} tickets cost?", "The tickets cost ${v}."),
    ("+", "{p} has {a} {x} and gets {b} more. How many {x} are there now?", "There are {v} {x} now."),
    ("+", "{P} counted {a} {x} on Monday and {b} on Tuesday. How many {x} is that in total?", "{P} counted {v} {x}."),
    ("+", "One ship brings {a} {x}, another one brings {b}. How many {x} do they bring?", "They bring {v} {x}."),
    ("-", "A store had {a} {x} and sold {b} of them. How many {x} are left?", "There are {v} {x} left."),
    ("-", "{P} has ${a} and pays ${b} for a car. How much money is left?", "There is ${v} left."),
    ("-", "{p} has {a} people and another town has {b}. How many more people does {p} have?", "{p} has {v} more people."),
    ("/", "{a} {x} are packed into {b} boxes of the same size. How many {x} are in a box?", "There are {v} {x} in a box."),
    ("/", "{b} friends share ${a} equally. How much does each of them get?", "Each of them gets ${v}."),
    ("/", "{a} {x} are shared among {b} schools. How many {x} does each school get?", "Each school gets {v} {x}."),
)  # fmt: skip


def large_story(d: Draft) -> Chat:
    """A word problem with numbers that are too large for the model itself."""
    sign, question, answer = d.of(LARGE_STORIES)
    steps = Steps(d, sign)
    left, right = large(d), large(d)
    if sign == "-":
        left, right = max(left, right), min(left, right)
    if sign in "*/":
        right = d.number(2, 365 if sign == "*" else 99)
    if sign == "/":
        left *= right
    told = {"a": left, "b": right, "x": d.of(words.THINGS)}
    told |= {"p": d.of(words.CITIES), "P": d.person()}
    steps.ask(question.format(**told))
    _, value = steps.compute(left, sign, right)
    steps.answer(f"{answer.format(**told, v=value)}\n#### {value}")
    return steps.chat()


def story(d: Draft, problem: Problem) -> Chat:
    """A problem of the usual kind: a call for each of its steps, then the worked answer."""
    steps = Steps(d, "+-*/")
    steps.ask(problem.question)
    for left, sign, right in OPERATION.findall(problem.answer):
        steps.compute(int(left), sign, int(right))
    steps.answer(problem.answer)
    return steps.chat()


def without_use(d: Draft, problem: Problem) -> Chat:
    """Tools that do not calculate: the model answers by itself."""
    tools = [tool(*OTHERS[i]) for i in d.order(len(OTHERS))[: d.pick(1, 1, 2)]]
    return Chat([user(problem.question), assistant(problem.answer)], tools)


def make(d: Draft, problems: Iterator[Problem]) -> Chat:
    """problems: those that may be asked."""
    kind = d.pick("sums", "sums", "longer", "large", "large", "story", "story", "story", "none")
    if kind == "sums":
        return sums(d)
    if kind == "longer":
        return longer(d)
    if kind == "large":
        return large_story(d)
    problem = next(problems)
    if kind == "none":
        return without_use(d, problem)
    while problem.answer.count("\n") > 3:
        problem = next(problems)
    return story(d, problem)
