"""Chats to learn from: what the assistant writes in them is right, and held-out ones stay apart."""

from __future__ import annotations

import json
import re
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from mamba2_math import problems, skills
from mamba2_math.skills import __main__ as command
from mamba2_math.skills.calculator import OPERATIONS
from mamba2_math.skills.chat import Chat, pieces
from mamba2_math.story_words import NUMBER_WORDS

COUNT = 1500
SIGNS = {name: sign for sign, name in OPERATIONS.items()}
NUMBER = re.compile(r"\d+(?:\.\d+)?")


@pytest.fixture(scope="module")
def chats() -> list[Chat]:
    return list(islice(skills.stream(3), COUNT))


def evaluate(expression: str) -> Fraction:
    """From left to right, products first, as all expressions of the chats have it."""
    first, *rest = expression.split(" ")
    value = Fraction(first)
    for sign, word in zip(rest[::2], rest[1::2]):
        right = Fraction(word)
        value = {"+": value + right, "-": value - right, "*": value * right}.get(
            sign, value / right if right else value
        )
    return value


def called(message: dict[str, Any]) -> str:
    """The expression of a calculator's call."""
    function = message["tool_calls"][0]["function"]
    values = list(function["arguments"].values())
    if function["name"] in SIGNS:
        return f"{values[0]} {SIGNS[function['name']]} {values[1]}"
    return str(values[0])


def test_a_calculator_returns_what_its_call_asks_and_the_answer_says_it(chats: list[Chat]) -> None:
    calls = 0
    for chat in chats:
        for before, message, after in zip(chat.messages, chat.messages[1:], chat.messages[2:]):
            if message["role"] != "tool":
                continue
            calls += 1
            (told,) = NUMBER.findall(message["content"])
            assert abs(Fraction(told) - evaluate(called(before))) <= Fraction(1, 200), chat
            if content := after["content"]:
                assert content.endswith(f"#### {told}"), chat
    assert calls > COUNT // 10


def test_calls_name_tools_of_the_chat_and_their_parameters(chats: list[Chat]) -> None:
    for chat in chats:
        shapes = {t["function"]["name"]: t["function"]["parameters"] for t in chat.tools}
        for message in chat.messages:
            for call in message.get("tool_calls", ()):
                function = call["function"]
                assert [*function["arguments"]] == shapes[function["name"]]["required"], chat


def test_what_fills_a_key_stands_in_the_text(chats: list[Chat]) -> None:
    """Truths are told in other words, and a problem's result follows from it."""
    filled = 0
    for chat in (chat for chat in chats if chat.by_grammar):
        *_, asked, answer = chat.messages
        text, record = asked["content"], json.loads(answer["content"])
        if "?" in text or "<<" in answer["content"]:
            continue
        for value in record.values():
            for part in value if isinstance(value, list) else [value]:
                forms = [str(part)]
                forms += [NUMBER_WORDS[part]] if type(part) is int and part < 13 else []
                assert isinstance(part, bool) or any(form in text for form in forms), chat
                filled += 1
    assert filled > COUNT // 4


def test_further_questions_are_answered_from_what_was_said(chats: list[Chat]) -> None:
    talks = [c for c in chats if not c.tools and not c.by_grammar and len(c.messages) > 3]
    for chat in talks:
        said: list[str] = []
        for message in chat.messages:
            content = message["content"]
            if message["role"] != "assistant":
                said += NUMBER.findall(content)
                continue
            for left, sign, right, value in re.findall(r"<<(\d+)(.)(\d+)=(\d+)>>", content):
                assert evaluate(f"{left} {sign} {right}") == int(value), chat
            said += NUMBER.findall(content)
            assert content.rpartition("#### ")[2] in said
    assert len(talks) > COUNT // 10


def test_every_skill_and_every_kind_of_turn_comes(chats: list[Chat]) -> None:
    assert sum(chat.by_grammar for chat in chats) > COUNT // 5
    assert sum(bool(chat.tools) for chat in chats) > COUNT // 4
    assert sum(chat.messages[0]["role"] == "system" for chat in chats) > COUNT // 10
    assert len({chat.key for chat in chats}) > 0.98 * COUNT


def test_training_never_sees_a_held_out_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one that the seed would bring, either."""
    some = tuple(islice(skills.stream(5), 30))
    monkeypatch.setattr(skills, "held_out", lambda skill: some)
    assert not {chat.key for chat in some} & {chat.key for chat in islice(skills.stream(5), 60)}


@pytest.mark.parametrize("skill", skills.SKILLS)
def test_held_out_chats_are_about_held_out_problems(skill: str) -> None:
    chats = skills.held_out(skill)
    assert len({chat.key for chat in chats}) == skills.HELD_OUT_COUNT
    questions = {problem.question for problem in problems.held_out()}
    asked = {m["content"] for chat in chats for m in chat.messages if m["role"] == "user"}
    assert len(asked & questions) > 10
    others = {problem.question for problem in islice(problems.stream(skills.HELD_OUT_SEED), 2000)}
    assert not asked & others


def test_same_seed_gives_the_same_chats(chats: list[Chat], tmp_path: Path) -> None:
    assert list(islice(skills.stream(3), 50)) == chats[:50]
    assert list(islice(skills.stream(4), 50)) != chats[:50]
    command.main(["--count", "60", "--seed", "2", "--output", f"{tmp_path}/made"])
    made = [json.loads(line) for line in (tmp_path / "made").read_text().splitlines()]
    wanted = islice(skills.stream(2), sum("prompt" in record for record in made))
    texts = ["".join(piece.text for piece in pieces(chat)) for chat in wanted]
    assert [r["prompt"] + r["answer"] for r in made if "prompt" in r] == texts
    assert all(r["prompt"].endswith("\nAnswer:") for r in made if "prompt" in r)
    assert 20 < len(texts) < 50
